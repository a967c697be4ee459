"""Draws a case from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from tests.fuzz.cases import (
    BROKEN_LOGITS,
    CALL_SETTINGS,
    COMBINED,
    CRITERIA,
    FAULTS,
    GROUPS,
    OPTIONS,
    OWN_TARGETS,
    PROCESSORS,
    Case,
)
from tests.fuzz.models import REFUSED, STATEFUL, TESTED, UNTESTED, VOCAB

T = TypeVar("T")
RARELY, SELDOM, SOMETIMES = ({True: p, False: 1 - p} for p in (0.05, 0.1, 0.25))
WEIGHTS: dict[str, dict[Any, float]] = {
    "layers": {2: 3, 3: 1},
    "attention": {"sdpa": 4, "eager": 1},
    "window": {8: 3, 4: 1, 2: 1},
    "tight_positions": RARELY,
    "training": {"": 30, "target": 1, "draft": 1, "dropout": 1},
    "repetitive": {True: 1, False: 1},
    "pad_id": {0: 3, 7: 1},
    "pad_in_prompt": {True: 1, False: 4},
    "give_mask": {True: 6, False: 1},
    "k": dict.fromkeys((1, 2, 3, 4, 5, 9), 1),
    "accuracy": dict.fromkeys((1.0, 0.9, 0.7, 0.5, 0.0), 1),
    "branches": dict.fromkeys((2, 3, 4), 1),
    "threshold": {0.0: 3, 0.1: 1, 0.5: 1},
    "policy": {"fixed": 10, "random": 5, "window": 1, "schedule": 1, "adaptive": 4, "auto": 1},
    "draft_tree": {None: 3, 2: 1, 8: 2, "auto": 2},
    "verification": {"exact": 10, "rejection": 1, "typical": 1},
    "entry": {"keyword": 8, "custom": 1, "custom_streamer": 1, "attach": 2},
    "max_new_tokens": {1: 1, 2: 1, 4: 3, 7: 4, 10: 4, 14: 2, 40: 0.5},
    "repetition_penalty": {1.0: 8, 1.3: 1, 0.8: 1},
    "no_repeat_ngram_size": {0: 8, 2: 1, 3: 1},
    "broken_logits": {"": 200, **dict.fromkeys(BROKEN_LOGITS, 1)},
    "return_dict": {True: 1, False: 1},
    "output_scores": SOMETIMES,
    "output_logits": SOMETIMES,
    "prefill_chunk_size": {None: 36, **dict.fromkeys((1, 2, 3, 5), 1)},
    "streamer": {True: 1, False: 4},
    "config_object": SELDOM,
    "inference_mode": RARELY,
    "cache": {"none": 5, "dynamic": 1},
    "turns": {1: 6, 2: 2, 3: 1},
    "swap_caches": {True: 3, False: 7},
}
"""Of the values of the fields that do not depend on other ones."""
SAMPLING: dict[str, dict[Any, float]] = {
    "temperature": dict.fromkeys((1.0, 0.7, 0.3, 2.0), 1),
    "top_k": {0: 2, 1: 1, 5: 1, 50: 1},
    "top_p": {1.0: 2, 0.9: 1, 0.5: 1},
    "min_p": {0.0: 3, 0.1: 1},
    "typical_p": {1.0: 3, 0.8: 1},
}
"""The same, of sampled cases."""


def draw(seed: int | str, architectures: Sequence[str] | None = None, strategies: Sequence[str] | None = None) -> Case:
    """The case of a seed."""
    random = Random(str(seed))
    parts: dict[str, Any] = {"seed": random.randrange(10**6)}
    parts |= {name: _weighted(random, weights) for name, weights in WEIGHTS.items()}
    if random.random() < 0.55:
        parts |= {"do_sample": True, **{name: _weighted(random, weights) for name, weights in SAMPLING.items()}}
        parts["num_return_sequences"] = _weighted(random, {1: 11, 2: 1, 3: 1})
    group = _weighted(random, {"tested": 60, "untested": 30, "stateful": 8, "refused": 2})
    names = {"tested": TESTED, "untested": UNTESTED, "stateful": STATEFUL, "refused": REFUSED}[group]
    parts["architecture"] = random.choice(sorted(names) if architectures is None else architectures)
    weights = {"scripted": 5, "without_training": 7, "draft_models": 5, "heads": 7, "combined": 3}
    parts["strategy"] = random.choice(GROUPS[_weighted(random, weights)] if strategies is None else strategies)
    if parts["strategy"] == "combined":
        parts["members"] = tuple(random.sample(COMBINED, random.randint(1, 3)))
    for draw_more in (_prompts, _ends, _objects):
        parts |= draw_more(random, parts)
    return _consistent(Case(**parts))


def _prompts(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    batch = _weighted(random, {1: 4, 2: 2, 3: 3, 5: 1})
    shortest, longest = _weighted(random, {(1, 3): 2, (2, 9): 3, (4, 12): 3, (9, 9): 2, (20, 40): 0.5})
    lengths = tuple(random.randint(shortest, longest) for _ in range(batch))
    return {"lengths": lengths, "exit_layer": random.randint(1, parts["layers"] - 1)}


def _ends(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    columns, ends = range(parts["max_new_tokens"]), dict[str, Any]()
    kind = _weighted(random, {"none": 4, "many": 2, "column": 4})
    if kind == "many":
        ends["eos_ids"] = tuple(range(3, 3 + random.choice((3, 8, 20))))
    elif kind == "column":
        ends["eos_columns"] = tuple(sorted({random.choice(columns) for _ in range(random.choice((1, 1, 2)))}))
    if random.random() < 0.15:
        ends["min_new_tokens"] = 1 + random.choice(columns)
    if random.random() < 0.1:
        ends["stop_string_column"] = random.choice(columns)
    return ends


def _objects(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    """Processors, criteria, settings and faults: none as a rule."""
    objects: dict[str, Any] = {
        "settings": _some(random, CALL_SETTINGS, 0.15),
        "criteria": _some(random, CRITERIA, 0.15),
        "processors": _some(random, PROCESSORS, 0.2),
        "options": _some(random, OPTIONS, 0.2),
    }
    if random.random() < 0.1:
        lengths = (random.choice((1, 1, 2)) for _ in range(30))
        objects["bad_words"] = tuple(tuple(random.randrange(1, VOCAB) for _ in range(length)) for length in lengths)
    if random.random() < 0.15:
        objects |= {"fault": random.choice(FAULTS), "fault_call": random.randint(1, 4)}
        objects["interrupt"] = random.random() < 0.2
    return objects


def _consistent(case: Case) -> Case:
    """What cannot go together is left out: a case that only ever ends in an error of plain `generate` tests nothing."""
    changes: dict[str, Any] = {}
    if case.output_scores or case.output_logits or "scores" in case.criteria:
        changes["return_dict"] = True
    if "scores" in case.criteria:
        changes["output_scores"] = True
    if case.turns > 1 and case.cache == "none":
        changes["return_dict"] = True
    if case.turns > 1 and case.num_return_sequences > 1:
        changes["turns"] = 1
    if "native" in case.strategies():  # Transformers' own generators take one row
        changes |= {"lengths": case.lengths[:1], "num_return_sequences": 1}
    if case.strategy in OWN_TARGETS and case.architecture not in OWN_TARGETS[case.strategy]:
        targets = OWN_TARGETS[case.strategy]
        changes["architecture"] = targets[case.seed % len(targets)]
    if case.strategy == "auto" or case.entry == "attach":  # the statistics are in the output only
        changes["return_dict"] = True
    if case.strategy == "auto" and case.fault == "drafter":
        changes["fault"] = "model"
    if case.fault in ("processor", "criterion", "streamer"):
        changes |= {"streamer": case.streamer or case.fault == "streamer"}
    return replace(case, **changes)


def _weighted(random: Random, weights: dict[T, float]) -> T:
    return random.choices(list(weights), list(weights.values()))[0]


def _some(random: Random, names: Sequence[str], probability: float) -> tuple[str, ...]:
    """None as a rule, or one or two."""
    return tuple(random.sample(names, random.choice((1, 1, 2)))) if random.random() < probability else ()
