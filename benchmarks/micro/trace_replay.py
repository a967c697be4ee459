"""Tokens per forward pass of strategies without a network, on recorded outputs of a 7B model.

The recorded texts are replayed by a scripted target in the real decoding loops, ours and Transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.harness.variants import Arguments, ours
from benchmarks.workloads.scripted import ScriptedTarget
from hf_specgen import NgramCandidates, NgramHistory
from hf_specgen.evaluation.workloads import ASSETS, load

TRACES = ASSETS / "traces"
BASELINE = "prompt lookup n=2"
Scripts = Sequence[tuple[list[int], list[int]]]


def trace_replay(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Tokens per forward pass, and their ratio to prompt lookup. Counted, so one run is exact."""
    _, tokenizer = load()
    rows = []
    for file in sorted(TRACES.glob("*.jsonl")):
        scripts = load_scripts(file, tokenizer)[: 5 if quick else None]
        values = {
            name: tokens_per_forward(scripts, len(tokenizer), arguments) for name, arguments in _variants().items()
        }
        for name, value in values.items():
            row = {"trace": file.stem, "variant": name, "tokens/forward": value}
            rows.append({**row, f"over {BASELINE}": value / values[BASELINE]})
    return rows


def _variants() -> dict[str, Arguments]:
    """By name; the history is empty at first and learns from one text for the next."""
    lookup: partial[dict[str, Any]] = partial(dict, prompt_lookup_num_tokens=10)
    return {
        BASELINE: partial(lookup, max_matching_ngram_size=2),
        "prompt lookup n=3": partial(lookup, max_matching_ngram_size=3),
        "n-grams k=10": ours(NgramCandidates(k=10)),
        "n-grams k=64, tree of 64": ours(NgramCandidates(k=64, tree=64)),
        "n-grams k=64, tree of 64, history": ours(NgramCandidates(k=64, tree=64, history=NgramHistory())),
    }


def tokens_per_forward(scripts: Scripts, vocab_size: int, arguments: Arguments) -> float:
    """Tokens per forward pass of the target, its prefill included, over all scripts: prompt and answer as token ids.

    `arguments` returns those of `generate`, and is called for each script. The output has to be the recorded text.
    """
    target = ScriptedTarget(vocab_size)
    tokens = 0
    target.script = torch.zeros(9, dtype=torch.long)  # the first call checks the model, in passes of its own
    cast(Any, target).generate(target.script[None, :1], max_new_tokens=4, **arguments())
    target.forwards = 0
    for prompt, answer in scripts:
        target.script = torch.tensor(prompt + answer)
        ids = cast(Any, target).generate(torch.tensor([prompt]), max_new_tokens=len(answer), **arguments())
        assert ids[0].tolist() == prompt + answer, "the output differs from the recorded text"
        tokens += len(answer)
    return tokens / target.forwards


def load_scripts(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """The recordings of one file as token ids."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return [(encode(row["prompt"]), encode(row["response"])) for row in rows]
