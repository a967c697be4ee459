"""Behind the end of a position table, and where rotary frequencies change; up to its end: `test_cases.py`."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from tests.fuzz.models import tiny_model as tiny_model_of_fuzz
from tests.helpers import Oracle, fresh_model, prompts, tiny_model

TABLE = {"gpt2": "n_positions", "opt": "max_position_embeddings", "llama": "max_position_embeddings"}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ALWAYS = partial(Oracle, accuracy=1.0)


def sharp_model(architecture: str, positions: int, **overrides: Any) -> Any:
    """A model with a table of so many positions, and attention that is sharp enough to show a wrong position."""
    model = fresh_model(architecture, **{TABLE[architecture]: positions}, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 4
    return model


def assert_same_logits(model: Any, inputs: dict[str, torch.Tensor], candidates: Any, **arguments: Any) -> Any:
    """Assert that tokens and logits are those of plain `generate`; returns the speculative output."""
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(2)
    plain = model.generate(**inputs, **arguments)
    if not isinstance(candidates, Candidates):
        candidates = candidates(plain.sequences[:, inputs["input_ids"].shape[1] :])
    torch.manual_seed(2)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates)
    assert torch.equal(plain.sequences, ours.sequences)
    for expected, got in zip(plain.logits, ours.logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # float32, sums in another order
    return ours


def test_causal_mask_of_a_fixed_size_ends_drafts_same_logits() -> None:
    """Would catch: a tree whose nodes take more cache slots than the layers' causal mask has, at few positions."""
    model = tiny_model_of_fuzz("gpt_neo", positions=90)
    candidates = partial(Oracle, accuracy=0.7, branching=True)
    assert assert_same_logits(model, prompts(2), candidates, max_new_tokens=78).speculation.drafted > 0


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "candidates",
    [ALWAYS, LayerSkipCandidates(1, k=3), LayerSkipCandidates(1, k=3, tree=6)],
    ids=["oracle", "layer-skip", "layer-skip tree"],
)
def test_prompt_behind_position_table_same_logits(sampling: dict, candidates: Any) -> None:
    """Rotary positions continue behind the table. Would catch: draft tokens that are read at its last position."""
    ours = assert_same_logits(
        sharp_model("llama", 16), prompts(2, length=24), candidates, max_new_tokens=10, **sampling
    )
    assert ours.speculation.drafted > 0


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_draft_model_whose_table_ends_with_the_prompt_same_logits(architecture: str) -> None:
    """Would catch: rows that the draft has no positions for being read with the others."""
    draft = sharp_model(architecture, 12)
    candidates = DraftModelCandidates(draft, k=3)
    assert_same_logits(sharp_model(architecture, 40), prompts(3, length=12), candidates, max_new_tokens=12)


def test_padding_behind_position_table_same_logits() -> None:
    """Would catch: padding of an ended row that is read at the table's last position, so that its scores differ."""
    model, inputs = sharp_model("llama", 16), prompts(3, length=14)
    ids = model.generate(**inputs, max_new_tokens=10)[:, 14:]
    end = int(ids[1, 2])
    assert end not in ids[0].tolist(), "another row has to continue"
    assert_same_logits(model, inputs, NgramCandidates(k=3), max_new_tokens=10, eos_token_id=[end], pad_token_id=0)


def test_given_cache_with_whole_prompt_same_tokens() -> None:
    """Plain `generate` then reads the prompt again. Would catch: a draft taken for the uncached rest of the prompt."""
    model, inputs = tiny_model("llama"), prompts(1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(input_ids=inputs["input_ids"], past_key_values=cache)
    oracle = ALWAYS(model.generate(**inputs, max_new_tokens=8)[:, 12:])
    plain = model.generate(**inputs, max_new_tokens=8, past_key_values=caches[0])
    ours = model.generate(**inputs, max_new_tokens=8, past_key_values=caches[1], candidate_generator=oracle)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(("parameters", "length", "new"), [(DYNAMIC, 10, 6), (LONG, 10, 6), (LONG, 40, 8)])
@pytest.mark.parametrize(
    "candidates", [partial(Oracle, accuracy=0.7), LayerSkipCandidates(1, k=4)], ids=["oracle", "layer-skip"]
)
def test_text_on_one_side_of_frequency_change_same_logits(
    parameters: dict, length: int, new: int, candidates: Any
) -> None:
    """Would catch: padding of shorter drafts that crosses the change, and changes the frequencies of all rows."""
    model = sharp_model("llama", 64 if parameters is LONG else 16, rope_parameters=parameters)
    assert_same_logits(model, prompts(2, length=length), candidates, max_new_tokens=new)


@pytest.mark.parametrize(("parameters", "length"), [(DYNAMIC, 10), (DYNAMIC, 20), (LONG, 10), (LONG, 18)])
def test_text_across_frequency_change_raises(parameters: dict, length: int) -> None:
    """The last case has one row before the change, and one behind it."""
    model = sharp_model("llama", 64 if parameters is LONG else 16, rope_parameters=parameters)
    with pytest.raises(ValueError, match="changes its rotary frequencies"):
        model.generate(**prompts(2, length=length), max_new_tokens=12, candidate_generator=NgramCandidates())
