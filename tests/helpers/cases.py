"""Parameters that several test files combine: processors, and oracles of every accuracy."""

from functools import partial
from typing import Any

from transformers import LogitsProcessorList

from hf_specgen import Statistics
from tests.helpers.oracle import Oracle
from tests.helpers.processors import PrefixReader, StatefulReader

FULL_SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 0}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "warpers": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 9, "eos_token_id": list(range(40, 60)), "pad_token_id": 0},
    "bad_words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "custom": {"make_processors": lambda: LogitsProcessorList([PrefixReader()])},
    "stateful": {"make_processors": lambda: LogitsProcessorList([StatefulReader()])},
}
SAMPLING_AND_PROCESSORS = [(s, p) for s in FULL_SAMPLING for p in PROCESSORS if (s, p) != ("greedy", "warpers")]
"""Warpers have no effect on greedy decoding."""
ORACLES: dict[str, Any] = {
    "always": partial(Oracle, accuracy=1.0),
    "sometimes": partial(Oracle, accuracy=0.6),
    "never": partial(Oracle, accuracy=0.0),
    "tree": partial(Oracle, accuracy=0.7, branching=True),
}


def assert_oracle_was_used(oracle: str, statistics: Statistics) -> None:
    """Assert that draft tokens were accepted, rejected, or both, as the oracle intends: else a test proves nothing."""
    assert statistics.drafted > 0
    if oracle == "always":
        assert statistics.accepted == statistics.drafted
    elif oracle == "never":
        assert statistics.accepted == 0
    else:
        assert 0 < statistics.accepted < statistics.drafted
