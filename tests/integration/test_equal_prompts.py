"""Rows with equal prompts, as the samples of a group: prefilled once, with the states and tokens of rows alone."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_specgen import NgramCandidates
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.inputs import PreparedCall
from tests.helpers import assert_same_tokens, fresh_model, prompts
from tests.helpers.strategies import STRATEGIES, make

LAYERS = (0, 1, -1)
WITH_STATES_OF_THE_PROMPT = ["n-grams, tree", "draft model, tree", "layer skip", "Medusa, tree", "n-grams and EAGLE"]


def repeated(rows: list[int], **changes: Any) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, left-padded, repeated in this order."""
    return {name: values[rows] for name, values in prompts(3).items()} | changes


def prefilled(model: Any, text: dict[str, torch.Tensor]) -> tuple[HiddenStateTarget, torch.Tensor]:
    mask = text["attention_mask"]
    kwargs = {**text, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0), "use_cache": True}
    target = HiddenStateTarget(PreparedCall(model, kwargs.pop("input_ids"), GenerationConfig(), kwargs), LAYERS)
    return target, target.prefill()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_equal_prompts_are_prefilled_once_with_the_states_of_all_rows(kind: str) -> None:
    """Would catch: a prompt computed for each sample of a group, or logits, keys or states of another row's prompt."""
    model = fresh_model(kind)
    target, logits = prefilled(model, repeated([2, 0, 0, 2, 1]))
    assert target._inputs.prefill_rows == [0, 1, 1, 0, 2]
    model.register_forward_hook(lambda *_: None)  # which may hold something for each row: all rows are computed
    reference, expected = prefilled(model, repeated([2, 0, 0, 2, 1]))
    assert reference._inputs.prefill_rows is None
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(target.last_states(LAYERS), reference.last_states(LAYERS))
    assert target.cache.lengths == reference.cache.lengths
    for layer, other in zip(target.cache.layers, reference.cache.layers, strict=True):
        slots = layer.get_seq_length()
        torch.testing.assert_close(layer.keys[:, :, :slots], other.keys[:, :, :slots])


@torch.no_grad()
def test_rows_that_differ_in_anything_are_prefilled_apart() -> None:
    """Would catch: rows taken for equal whose tokens are, but not their padding."""
    model = fresh_model("llama")
    ids = torch.full((2, 6), 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    assert prefilled(model, {"input_ids": ids, "attention_mask": mask})[0]._inputs.prefill_rows is None
    assert prefilled(model, repeated([0, 1, 2]))[0]._inputs.prefill_rows is None


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
@pytest.mark.parametrize("strategy", WITH_STATES_OF_THE_PROMPT)
def test_repeated_prompts_same_tokens(strategy: str, sampling: dict[str, Any]) -> None:
    """Would catch: samples of a group that begin with the states of another prompt, or a drafter that does."""
    given = {"max_new_tokens": 12, **sampling}
    assert_same_tokens(STRATEGIES[strategy].target(), repeated([1, 1, 0, 1]), make(strategy), **given)


def test_samples_of_a_group_same_tokens_and_cache() -> None:
    """Would catch: a returned cache with a row for each prompt in place of each sample."""
    given = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 12, "return_dict_in_generate": True}
    model = fresh_model("llama")
    torch.manual_seed(0)
    plain = model.generate(**prompts(2), **given)
    torch.manual_seed(0)
    ours = model.generate(**prompts(2), candidate_generator=NgramCandidates(), **given)
    assert torch.equal(plain.sequences, ours.sequences)
    for layer, other in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
