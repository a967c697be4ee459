"""What surrounds the calls of a case: a model that changes between calls, faulty drafters, threads, saved caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from tests.fuzz.models import DENSE

if TYPE_CHECKING:
    from tests.fuzz.cases import Case

T = TypeVar("T")
SCRIPTED = ("oracle", "oracle_tree", "random", "random_tree")
NETWORKS = ("draft", "draft_other", "medusa", "medusa_auto", "eagle1", "eagle3", "dflash", "peagle")
"""Strategies whose drafter gives scores, for any target."""
HOOKED = ("hook", "pre_hook", "forward")
"""How a layer is steered: hooks, or a replaced attribute `forward`."""
STEERING = ("last", "decoding", "prompt", "later", "all", "rows", "exact_rows")
"""Where a vector is added: the last position, passes of one token or of more, passes of one token after `LATER` others,
all positions; or one for each row."""
LORA = ("lora", "lora_rows", "activated_lora")
HALF = ("autocast", "prepared")
"""Interventions after which the model computes in half precision."""
SAVED = (*("attentions", "beams", "forced_bos", "hidden_states", "min_length", "no_cache", "prompt_lookup", "static"),)
"""Settings in the generation config of a checkpoint, beside those of `Case.saved_settings`."""
INTERVENTIONS = {
    "steering": tuple(f"{how} {where}" for how in HOOKED for where in STEERING),
    "replaced": ("attention", "model_forward", "output_matrix", "weights"),
    "lora": LORA,
    "half": HALF,
    "arguments": ("scheduled_number", "scheduled_tensor", "prepared_inputs"),
    "not_finite": ("nan_tokens", "inf_tokens"),
    "saved": tuple(f"saved {name}" for name in SAVED),
    "none": ("again",),
}
"""What is changed on one model object between two calls; by kind."""
ID_FAULTS = ("negative_id", "large_id", "float_ids", "extra_row", "missing_row", "no_tree")
SCORE_FAULTS = ("nan", "inf", "minus_inf", "one_nan")
DRAFTER_FAULTS = (*ID_FAULTS, *SCORE_FAULTS, "draws")
"""What is wrong with a drafter: its ids, its scores, or that it draws from the global random generator."""
CACHE_USES = ("saved", "copied", "tensors", "iterated")
"""What is done to the cache of a call before the next turn."""

SITUATIONS: dict[str, float] = {
    **{"": 70, "intervention": 12, "drafter": 5, "threads": 3, "other_thread": 1},
    **{"saved_settings": 3, "cache": 4, "padding": 3},
}
KINDS: dict[str, float] = {
    **{"steering": 8, "replaced": 4, "lora": 3, "half": 2, "arguments": 3, "not_finite": 3, "saved": 3, "none": 1}
}
"""Of interventions."""


def draw_situation(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    """What surrounds the calls: nothing as a rule, or one of `SITUATIONS`."""
    kind = weighted(random, SITUATIONS)
    if kind == "intervention":
        names = INTERVENTIONS[weighted(random, KINDS)]
        return {"intervention": random.choice(names), "changed_first": random.random() < 0.4}
    if kind == "drafter":
        return {"drafter_fault": random.choice(DRAFTER_FAULTS)}
    if kind == "threads":
        processors = some(random, ("prefix", "row_wise", "stateful"), 0.7)
        criteria = some(random, ("after", "any_row"), 0.4)
        return {"threads": random.choice((2, 3, 4)), "processors": processors, "criteria": criteria}
    if kind == "cache":
        return {"cache_use": random.choice(CACHE_USES), "turns": 2}
    if kind == "padding":
        empty = random.choice((1, len(parts["lengths"])))
        lengths = (*parts["lengths"][empty:], *[0] * empty)
        return {"lengths": tuple(random.sample(lengths, len(lengths)))}
    return {kind: True} if kind else {}


def single_situation(case: Case) -> Case:
    """Without what would hide the situation of a case, or repeat its calls many times."""
    changes: dict[str, Any] = {}
    if case.needs_new_model or case.drafter_fault:
        changes |= {"fault": "", "turns": 1, "broken_logits": "", "training": ""}
    if case.intervention in LORA + HALF and case.architecture not in DENSE:
        changes["architecture"] = DENSE[case.seed % len(DENSE)]
    if case.intervention in LORA + HALF and case.strategy in ("mtp", "assistant"):  # whose targets are other ones
        changes["strategy"] = "eagle3"
    if case.intervention in LORA:  # PEFT counts rows
        changes["num_return_sequences"] = 1
    if case.intervention.endswith("later"):  # a pass over one token begins no text
        changes["lengths"] = tuple(max(2, length) for length in case.lengths)
        changes["prefill_chunk_size"] = None if case.prefill_chunk_size == 1 else case.prefill_chunk_size
    if "rows" in case.intervention:  # some end before others
        changes |= {"lengths": case.lengths if len(case.lengths) > 1 else (*case.lengths, 7, 3)}
        changes["eos_ids"] = case.eos_ids or tuple(range(3, 23))
    if case.intervention == "saved beams":
        changes["num_return_sequences"] = 1
    if case.intervention in HALF:  # the scores tell whether a first difference is a near-tie
        changes |= {"do_sample": False, "num_return_sequences": 1, "return_dict": True, "output_scores": True}
        changes |= {"verification": "exact", "processors": (), "criteria": (), "options": ()}
    if case.drafter_fault in SCORE_FAULTS and case.strategy not in NETWORKS:
        changes["strategy"] = NETWORKS[case.seed % len(NETWORKS)]
    if case.drafter_fault in (*ID_FAULTS, "draws") and case.strategy not in (*SCRIPTED, "native"):
        changes["strategy"] = SCRIPTED[case.seed % len(SCRIPTED)]
    return replace(case, **changes)


def weighted(random: Random, weights: dict[T, float]) -> T:
    return random.choices(list(weights), list(weights.values()))[0]


def some(random: Random, names: Sequence[str], probability: float) -> tuple[str, ...]:
    """None as a rule, or one or two."""
    return tuple(random.sample(names, random.choice((1, 1, 2)))) if random.random() < probability else ()
