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


def draw(
    seed: int | str,
    architectures: Sequence[str] | None = None,
    strategies: Sequence[str] | None = None,
) -> Case:
    """The case of a seed."""
    random = Random(str(seed))
    parts: dict[str, Any] = {"seed": random.randrange(10**6)}
    for draw_part in (_model, _prompts, _strategy, _sampling, _ends, _processors, _outputs, _caches, _fault):
        parts |= draw_part(random, parts)
    if architectures is not None:
        parts["architecture"] = random.choice(architectures)
    if strategies is not None:
        parts |= {"strategy": random.choice(strategies), "members": ()}
    if parts["strategy"] == "combined":
        parts["members"] = tuple(random.sample(COMBINED, random.randint(1, 3)))
    return _consistent(Case(**parts))


def _model(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    group = _weighted(random, {"tested": 60, "untested": 30, "stateful": 8, "refused": 2})
    names = {"tested": TESTED, "untested": UNTESTED, "stateful": STATEFUL, "refused": REFUSED}[group]
    return {
        "architecture": random.choice(sorted(names)),
        "layers": _weighted(random, {2: 3, 3: 1}),
        "attention": _weighted(random, {"sdpa": 4, "eager": 1}),
        "window": _weighted(random, {8: 3, 4: 1, 2: 1}),
        "tight_positions": _often(random, 0.05),
        "training": _weighted(random, {"": 30, "target": 1, "draft": 1, "dropout": 1}),
    }


def _prompts(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    batch = _weighted(random, {1: 4, 2: 2, 3: 3, 5: 1})
    shortest, longest = _weighted(random, {(1, 3): 2, (2, 9): 3, (4, 12): 3, (9, 9): 2, (20, 40): 0.5})
    return {
        "lengths": tuple(random.randint(shortest, longest) for _ in range(batch)),
        "repetitive": _often(random, 0.5),
        "pad_id": _weighted(random, {0: 3, 7: 1}),
        "pad_in_prompt": _often(random, 0.2),
        "give_mask": _often(random, 0.85),
    }


def _strategy(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    weights = {"scripted": 5, "without_training": 7, "draft_models": 5, "heads": 7, "combined": 3}
    strategy = random.choice(GROUPS[_weighted(random, weights)])
    return {
        "strategy": strategy,
        "k": random.choice((1, 2, 3, 4, 5, 9)),
        "accuracy": random.choice((1.0, 0.9, 0.7, 0.5, 0.0)),
        "branches": random.choice((2, 3, 4)),
        "threshold": _weighted(random, {0.0: 3, 0.1: 1, 0.5: 1}),
        "exit_layer": random.randint(1, parts["layers"] - 1),
        "policy": _weighted(random, {"fixed": 10, "random": 5, "window": 1, "schedule": 1, "adaptive": 4, "auto": 1}),
        "draft_tree": _weighted(random, {None: 3, 2: 1, 8: 2, "auto": 2}),
        "verification": _weighted(random, {"exact": 10, "rejection": 1, "typical": 1}),
        "settings": _some(random, CALL_SETTINGS, 0.15),
        "entry": _weighted(random, {"keyword": 8, "custom": 1, "custom_streamer": 1, "attach": 2}),
    }


def _sampling(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    if _often(random, 0.45):
        return {}
    return {
        "do_sample": True,
        "temperature": random.choice((1.0, 0.7, 0.3, 2.0)),
        "top_k": random.choice((0, 0, 1, 5, 50)),
        "top_p": random.choice((1.0, 1.0, 0.9, 0.5)),
        "min_p": random.choice((0.0, 0.0, 0.0, 0.1)),
        "typical_p": random.choice((1.0, 1.0, 1.0, 0.8)),
    }


def _ends(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    max_new_tokens = _weighted(random, {1: 1, 2: 1, 4: 3, 7: 4, 10: 4, 14: 2, 40: 0.5})
    kind = _weighted(random, {"none": 4, "many": 2, "column": 4})
    ends: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if kind == "many":
        ends["eos_ids"] = tuple(range(3, 3 + random.choice((3, 8, 20))))
    elif kind == "column":
        columns = [random.randrange(max_new_tokens) for _ in range(random.choice((1, 1, 2)))]
        ends["eos_columns"] = tuple(sorted(set(columns)))
    if _often(random, 0.15):
        ends["min_new_tokens"] = random.randint(1, max_new_tokens)
    if _often(random, 0.1):
        ends["stop_string_column"] = random.randrange(max_new_tokens)
    ends["criteria"] = _some(random, CRITERIA, 0.15)
    return ends


def _processors(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "repetition_penalty": _weighted(random, {1.0: 8, 1.3: 1, 0.8: 1}),
        "no_repeat_ngram_size": _weighted(random, {0: 8, 2: 1, 3: 1}),
        "bad_words": tuple(
            tuple(random.randrange(1, VOCAB) for _ in range(random.choice((1, 1, 2)))) for _ in range(30)
        )
        if _often(random, 0.1)
        else (),
        "processors": _some(random, PROCESSORS, 0.2),
        "options": _some(random, OPTIONS, 0.2),
        "broken_logits": random.choice(BROKEN_LOGITS) if _often(random, 0.02) else "",
    }


def _outputs(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "return_dict": _often(random, 0.5),
        "output_scores": _often(random, 0.25),
        "output_logits": _often(random, 0.25),
        "num_return_sequences": random.choice((2, 3)) if parts.get("do_sample") and _often(random, 0.15) else 1,
        "prefill_chunk_size": random.choice((1, 2, 3, 5)) if _often(random, 0.1) else None,
        "streamer": _often(random, 0.2),
        "config_object": _often(random, 0.1),
        "inference_mode": _often(random, 0.05),
    }


def _caches(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "cache": _weighted(random, {"none": 5, "dynamic": 1}),
        "turns": _weighted(random, {1: 6, 2: 2, 3: 1}),
        "swap_caches": _often(random, 0.3),
    }


def _fault(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    if not _often(random, 0.15):
        return {}
    return {"fault": random.choice(FAULTS), "fault_call": random.randint(1, 4), "interrupt": _often(random, 0.2)}


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


def _often(random: Random, probability: float) -> bool:
    return random.random() < probability


def _weighted(random: Random, weights: dict[T, float]) -> T:
    return random.choices(list(weights), list(weights.values()))[0]


def _some(random: Random, names: Sequence[str], probability: float) -> tuple[str, ...]:
    """None as a rule, or one or two."""
    return tuple(random.sample(names, random.choice((1, 1, 2)))) if _often(random, probability) else ()
