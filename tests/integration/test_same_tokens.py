"""Promises 1 and 2: the tokens of plain `generate`, greedy and sampled, whatever is guessed."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList

from tests.helpers import (
    ARCHITECTURES,
    PrefixReader,
    RowWisePrefixReader,
    StatefulReader,
    plain_and_speculative,
    prompts,
    tiny_model,
)

SAMPLING = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 0}}
PROCESSORS = {
    "none": {},
    "warpers": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 9, "eos_token_id": list(range(40, 60)), "pad_token_id": 0},
    "bad_words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "custom": {"make_processors": lambda: LogitsProcessorList([PrefixReader()])},
}
ORACLES = {
    "always": {"accuracy": 1.0},
    "sometimes": {"accuracy": 0.6},
    "never": {"accuracy": 0.0},
    "tree": {"accuracy": 0.7, "branching": True},
}


def _arguments(sampling: str, processors: str) -> dict:
    arguments = {"max_new_tokens": 14, **SAMPLING[sampling], **PROCESSORS[processors]}
    if sampling == "greedy" and processors == "warpers":
        arguments["do_sample"] = True
    return arguments


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_architecture_and_processor(architecture: str, batch: int) -> None:
    """Would catch: a wrong mask, position, cache slot, prefix or noise, in any architecture."""
    model, inputs = tiny_model(architecture), prompts(batch)
    kinds = list(ORACLES)
    for index, (sampling, processors) in enumerate((s, p) for s in SAMPLING for p in PROCESSORS):
        for name in (kinds[index % 4], kinds[(index + 2) % 4]):
            plain, output = plain_and_speculative(model, inputs, ORACLES[name], **_arguments(sampling, processors))
            assert torch.equal(plain, output.sequences), (sampling, processors, name)
            if processors != "minimum":  # an end token may come before the first guess
                _assert_meaningful(name, output.speculation)


def _assert_meaningful(oracle: str, speculation) -> None:
    """The test proves something only if guesses were accepted, rejected, or both, as intended."""
    assert speculation.drafted > 0
    if oracle == "always":
        assert speculation.accepted == speculation.drafted
    elif oracle == "never":
        assert speculation.accepted == 0
    else:
        assert 0 < speculation.accepted < speculation.drafted


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("batch", [1, 4])
def test_twenty_seeds(oracle: str, sampling: str, batch: int) -> None:
    """Would catch: noise taken from a wrong step or row, which single seeds can hide."""
    model, inputs = tiny_model("llama"), prompts(batch)
    for seed in range(20):
        inputs["input_ids"][:, -1] = seed + 1
        plain, output = plain_and_speculative(model, inputs, ORACLES[oracle], max_new_tokens=24, **SAMPLING[sampling])
        assert torch.equal(plain, output.sequences)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("oracle", ORACLES)
def test_processors_with_a_state(batch: int, sampling: str, oracle: str) -> None:
    """Would catch: a stateful processor called for a rejected guess, twice for a column, or out of order."""
    plain, output = plain_and_speculative(
        tiny_model("llama"),
        prompts(batch),
        ORACLES[oracle],
        max_new_tokens=20,
        make_processors=lambda: LogitsProcessorList([StatefulReader()]),
        **SAMPLING[sampling],
    )
    assert torch.equal(plain, output.sequences)


@pytest.mark.parametrize("batch", [1, 3])
def test_guidance_keeps_its_own_cache(batch: int) -> None:
    """Classifier-free guidance runs the model from inside the processor, one token a call."""
    inputs = prompts(batch)
    if batch > 1:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    plain, output = plain_and_speculative(
        tiny_model("llama"), inputs, ORACLES["sometimes"], max_new_tokens=14, guidance_scale=1.5
    )
    assert torch.equal(plain, output.sequences)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"make_processors": lambda: LogitsProcessorList([RowWisePrefixReader()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + step + row) % 99 for step in (1, 2, 5)]},
        {"sequence_bias": {(5,): 0.5, (6, 7): 2.0}},
        {"encoder_repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2},
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [4, 5], "pad_token_id": 0},
        {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": [4, 5]},
        {"forced_eos_token_id": 7, "renormalize_logits": True, "remove_invalid_values": True},
        {"do_sample": True, "min_p": 0.05, "typical_p": 0.9, "top_k": 0},
        {"do_sample": True, "epsilon_cutoff": 0.005, "eta_cutoff": 0.005, "top_h": 0.6, "top_k": 0},
    ],
)
def test_the_other_processors_that_generate_builds(batch: int, arguments: dict) -> None:
    plain, output = plain_and_speculative(
        tiny_model("llama"), prompts(batch), ORACLES["sometimes"], max_new_tokens=14, **arguments
    )
    assert torch.equal(plain, output.sequences)


def test_rows_do_not_wait_for_each_other() -> None:
    """A batch is never cut to its shortest match: with row-wise processors each row takes its own number of steps."""
    for arguments in ({}, {"repetition_penalty": 1.2}):
        _, output = plain_and_speculative(
            tiny_model("llama"), prompts(3), ORACLES["sometimes"], max_new_tokens=40, **arguments
        )
        assert len({len(steps) for steps in output.speculation.rows}) > 1


def test_num_return_sequences() -> None:
    plain, output = plain_and_speculative(
        tiny_model("llama"),
        prompts(2),
        ORACLES["sometimes"],
        max_new_tokens=16,
        do_sample=True,
        num_return_sequences=3,
    )
    assert output.sequences.shape[0] == 6
    assert torch.equal(plain, output.sequences)


@pytest.mark.parametrize("architecture", ["llama4_text", "gemma4_text", "mistral"])
def test_windows_and_chunks_smaller_than_the_text(architecture: str) -> None:
    """Would catch: a window counted in slots instead of positions (siblings of a tree share a position)."""
    overrides = {"attention_chunk_size": 8} if architecture == "llama4_text" else {"sliding_window": 8}
    model = tiny_model(architecture, **overrides)
    for batch in (1, 3):
        plain, output = plain_and_speculative(model, prompts(batch), ORACLES["tree"], max_new_tokens=24)
        assert torch.equal(plain, output.sequences)
