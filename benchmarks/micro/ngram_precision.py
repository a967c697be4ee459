"""Precision of n-gram matches: how often the token after a match is the next one.

Counted by match length and by agreement between occurrences, on answers of the embedded model, token by token, with the
index that `NgramCandidates` uses.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Any, cast

from hf_specgen.candidates.ngram_index import NgramIndex
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.workloads import ASSETS, load

ANSWERS_PER_DOMAIN = 100
MAX_MATCH_LENGTH, MAX_OCCURRENCES = 8, 8
MIN_CASES = 100
"""With fewer cases no share is given."""
LENGTHS = {"1": range(1, 2), "2": range(2, 3), "3": range(3, 4), "4 to 7": range(4, 8), "8 or more": range(8, 9)}
AGREEMENT = ("one occurrence", "the latest two agree", "the latest two disagree")
Counts = dict[tuple[int, str], list[int]]


def ngram_precision(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """The share of correct tokens and the number of cases. Counted, so one run is exact."""
    counts: Counts = defaultdict(lambda: [0, 0])
    for prompt, answer in _answers(10 if quick else ANSWERS_PER_DOMAIN):
        _count(prompt, answer, counts)
    rows = []
    for name, lengths in LENGTHS.items():
        row: dict[str, Any] = {"match length": name}
        for kind in AGREEMENT:
            correct, cases = (sum(counts[n, kind][i] for n in lengths) for i in (0, 1))
            row[kind] = correct / cases if cases >= MIN_CASES else "too few"
            row[f"cases, {kind}"] = cases
        rows.append(row)
    return rows


def _answers(per_domain: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and the embedded model's own answers, as token ids."""
    import datasets

    _, tokenizer = load(WorkloadSettings())
    data = str(ASSETS / "distillation.jsonl.gz")
    rows = cast(Any, datasets.load_dataset("json", data_files=data, split="train"))
    chosen = [
        row
        for domain in sorted(rows.unique("domain"))
        for row in islice((row for row in rows if row["domain"] == domain), per_domain)
    ]
    return [(tokenizer(row["prompt"])["input_ids"], tokenizer(row["response"])["input_ids"]) for row in chosen]


def _count(prompt: list[int], answer: list[int], counts: Counts) -> None:
    index = NgramIndex()
    index.extend(prompt)
    for token in answer:
        tail = index.tokens[-MAX_MATCH_LENGTH:]
        found = index.occurrences(tail, MAX_OCCURRENCES)
        longest = max(found.values(), default=0)
        latest = [index.tokens[position] for position, n in found.items() if n == longest][:2]
        if latest:
            kind = AGREEMENT[0] if len(latest) == 1 else AGREEMENT[1 if latest[0] == latest[1] else 2]
            case = counts[longest, kind]
            case[0] += latest[0] == token
            case[1] += 1
        index.extend([token])
