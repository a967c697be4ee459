"""What an n-gram match is worth: how often the token after it is the next one, by its length and by who agrees.

Replayed over answers of the embedded model, token by token, looking into the text so far as `NgramCandidates` does.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Any, cast

from benchmarks.common import Rows
from hf_specgen.candidates.ngram_index import NgramIndex
from hf_specgen.evaluation.workloads import ASSETS, WorkloadSettings, load

ANSWERS_PER_DOMAIN = 100
LONGEST, LOOKED_AT = 8, 8
FEWEST = 100  # with fewer cases a share says little
LENGTHS = {"1": range(1, 2), "2": range(2, 3), "3": range(3, 4), "4 to 7": range(4, 8), "8 or more": range(8, 9)}
KINDS = ("its only occurrence", "the two latest agree", "they disagree")
Counts = dict[tuple[int, str], list[int]]


def matches(repeats: int, quick: bool) -> Rows:
    """The share of right guesses by length of the longest match, and in how many cases; counted, so once is enough."""
    counts: Counts = defaultdict(lambda: [0, 0])
    for prompt, answer in _answers(10 if quick else ANSWERS_PER_DOMAIN):
        _count(prompt, answer, counts)
    rows: Rows = []
    for name, lengths in LENGTHS.items():
        row: dict[str, Any] = {"length of the match": name}
        for kind in KINDS:
            right, all_of_them = (sum(counts[n, kind][i] for n in lengths) for i in (0, 1))
            row[kind] = right / all_of_them if all_of_them >= FEWEST else "too few"
            row[f"cases, {kind}"] = all_of_them
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
    index = NgramIndex(LONGEST)
    index.extend(prompt)
    for token in answer:
        found = list(index.matches(index.tokens, 1, LOOKED_AT))
        latest = [index.tokens[position] for n, position in found if n == found[0][0]][:2]
        if latest:
            kind = KINDS[0] if len(latest) == 1 else KINDS[1 if latest[0] == latest[1] else 2]
            case = counts[found[0][0], kind]
            case[0] += latest[0] == token
            case[1] += 1
        index.extend([token])
