"""At the end of a table of positions, behind it, where rotary frequencies change: still the tokens of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from tests.helpers import Oracle, prompts, tiny_model

TABLE = {"gpt2": "n_positions", "opt": "max_position_embeddings", "llama": "max_position_embeddings"}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def sharp(architecture: str, positions: int, **overrides: Any) -> Any:
    """A model with a table of so many positions, whose attention is sharp enough for a wrong position to show."""
    model = tiny_model.__wrapped__(architecture, **{TABLE[architecture]: positions}, **overrides)  # not a shared one
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 4
    return model


def compare(model: Any, inputs: dict, candidates: Any, **arguments: Any) -> Any:
    """Tokens and logits of ours are those of plain `generate`."""
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(2)
    plain = model.generate(**inputs, **arguments)
    torch.manual_seed(2)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates)
    assert torch.equal(plain.sequences, ours.sequences)
    for expected, got in zip(plain.logits, ours.logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # float32, sums in another order
    return ours


def oracle(model: Any, inputs: dict, **arguments: Any) -> Oracle:
    answers = model.generate(**inputs, **arguments)[:, inputs["input_ids"].shape[1] :]
    return Oracle(answers, accuracy=1.0)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}])
def test_prompt_behind_the_table(sampling: dict) -> None:
    """Rotary positions go on behind the table. Would catch: guesses that are read at its last position."""
    model, inputs = sharp("llama", 16), prompts(2, length=24)
    torch.manual_seed(2)
    right = oracle(model, inputs, max_new_tokens=10, **sampling)
    for candidates in (right, LayerSkipCandidates(2, k=3)):
        ours = compare(model, inputs, candidates, max_new_tokens=10, **sampling)
        assert ours.speculation.drafted > 0


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
@pytest.mark.parametrize(("length", "new"), [(12, 4), (13, 3), (14, 2)])
@pytest.mark.parametrize("as_dict", [True, False])
def test_a_row_ends_where_the_table_does(architecture: str, length: int, new: int, as_dict: bool) -> None:
    """Would catch: the last token of a row that has ended being read, at a position that does not exist."""
    model, inputs = sharp(architecture, 15), prompts(2, length=length)
    plain = model.generate(**inputs, max_new_tokens=new)
    answers = plain[:, length:].clone()
    answers[1] = (answers[1] + 1) % 90  # wrong for this row, which goes on alone
    arguments = {"max_new_tokens": new, "candidate_generator": Oracle(answers, accuracy=1.0)}
    ours = model.generate(**inputs, **arguments, return_dict_in_generate=as_dict)
    assert torch.equal(plain, ours.sequences if as_dict else ours)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_draft_whose_table_ends_with_the_prompt(architecture: str) -> None:
    """Would catch: rows that the draft has no positions for being read with the others."""
    model, draft, inputs = sharp(architecture, 40), sharp(architecture, 12), prompts(3, length=12)
    compare(model, inputs, DraftModelCandidates(draft, k=3), max_new_tokens=12)


def test_padding_behind_the_table() -> None:
    """Would catch: padding of an ended row read at the table's last position, and so scores that differ."""
    model, inputs = sharp("llama", 16), prompts(3, length=14)
    ids = model.generate(**inputs, max_new_tokens=10)[:, 14:]
    ends = int(ids[1, 2])
    assert ends not in ids[0].tolist(), "another row has to go on"
    compare(model, inputs, NgramCandidates(k=3), max_new_tokens=10, eos_token_id=[ends], pad_token_id=0)


def test_a_cache_that_holds_the_whole_prompt() -> None:
    """Plain `generate` then reads the prompt again. Would catch: guesses taken for the unread rest of the prompt."""
    model, inputs = tiny_model("llama"), prompts(1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(input_ids=inputs["input_ids"], past_key_values=cache)
    right = oracle(model, inputs, max_new_tokens=8)
    plain = model.generate(**inputs, max_new_tokens=8, past_key_values=caches[0])
    assert torch.equal(
        plain, model.generate(**inputs, max_new_tokens=8, past_key_values=caches[1], candidate_generator=right)
    )


@pytest.mark.parametrize(("parameters", "length", "new"), [(DYNAMIC, 10, 6), (LONG, 10, 6), (LONG, 40, 8)])
def test_on_one_side_of_a_change_of_frequencies(parameters: dict, length: int, new: int) -> None:
    """Would catch: columns that fill up the other rows, and change everybody's frequencies."""
    model = sharp("llama", 64 if parameters is LONG else 16, rope_parameters=parameters)
    inputs = prompts(2, length=length)
    answers = model.generate(**inputs, max_new_tokens=new)[:, length:]
    compare(model, inputs, Oracle(answers, accuracy=0.7), max_new_tokens=new)
    compare(model, inputs, LayerSkipCandidates(2, k=4), max_new_tokens=new)


@pytest.mark.parametrize(("parameters", "length"), [(DYNAMIC, 10), (DYNAMIC, 20), (LONG, 10), (LONG, 18)])
def test_across_a_change_of_frequencies(parameters: dict, length: int) -> None:
    """The last case has one row before the change, and one behind it."""
    model = sharp("llama", 64 if parameters is LONG else 16, rope_parameters=parameters)
    with pytest.raises(ValueError, match="changes its rotary frequencies"):
        model.generate(**prompts(2, length=length), max_new_tokens=12, candidate_generator=NgramCandidates())
