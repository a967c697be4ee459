"""The model of the benchmark of a large target."""

import pytest
import torch

from benchmarks.micro.large_target import _common, deepen
from hf_specgen.evaluation.measure import Sample
from tests.helpers import prompts
from tests.helpers.models import fresh_model


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("gemma2", {"num_hidden_layers": 4})],
    ids=["plain", "biases", "two kinds of attention"],
)
def test_deepen_keeps_logits(architecture: str, overrides: dict[str, int]) -> None:
    model = fresh_model(architecture, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    deep = deepen(model, 9)
    given = prompts(2)
    assert len(deep.model.layers) == 9 > len(model.model.layers)
    with torch.no_grad():
        torch.testing.assert_close(deep(**given).logits, model(**given).logits, rtol=0, atol=0)
    assert deep.generate(**given, max_new_tokens=8).tolist() == model.generate(**given, max_new_tokens=8).tolist()


@pytest.mark.parametrize(
    ("ours", "plain", "expected"), [([], [], 0), ([5, 6, 7], [5, 6, 8], 2), ([5, 6], [5, 6, 8], 2), ([], [5], 0)]
)
def test_common_counts_new_tokens_before_the_first_difference(ours: list[int], plain: list[int], expected: int) -> None:
    samples = [Sample(len(new), 1.0, torch.tensor([[1, 2, 3, *new]]), None) for new in (ours, plain)]
    assert _common(*samples) == expected
