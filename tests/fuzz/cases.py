"""What a case is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from tests.fuzz.models import REFUSED, STATEFUL, TESTED, UNTESTED, VOCAB
from tests.fuzz.situations import draw_situation, single_situation, some, weighted

SCRIPTED = ("oracle", "oracle_tree", "random", "random_tree")
WITHOUT_TRAINING = ("ngram", "ngram_tree", "history", "prediction", "recycling", "combined_default", "auto", "native")
DRAFT_MODELS = ("draft", "draft_other", "draft_reencoded", "skip", "skip_adapter", "uno")
MEDUSA = ("medusa", "medusa_auto")
HEADS = ("eagle1", "eagle3", "dflash", "peagle")
"""Heads that are built for any target."""
MTP = ("mtp_deepseek_v3", "mtp_glm4_moe", "mtp_qwen3_5", "mtp_qwen3_next")
OWN_TARGETS = {"mtp": MTP, "assistant": ("assistant_gemma4",)}
"""Strategies whose heads exist for these targets only; keys of `tests.fuzz.models.FIXTURES`."""
GROUPS = {
    "scripted": SCRIPTED,
    "without_training": WITHOUT_TRAINING,
    "draft_models": DRAFT_MODELS,
    "heads": (*MEDUSA, *HEADS, *OWN_TARGETS),
    "combined": ("combined",),
}
STRATEGIES = tuple(name for group in GROUPS.values() for name in group)
COMBINED = (
    *("ngram", "ngram_tree", "history", "prediction", "recycling", "oracle", "random_tree"),
    *("draft", "draft_reencoded", "skip", "uno", *MEDUSA, *HEADS),
)
"""What a combined strategy may have as members."""
CALL_SETTINGS = ("no_memory", "monitor", "not_compiled")
ENTRIES = ("keyword", "custom", "custom_streamer", "attach")
PROCESSORS = ("prefix", "row_wise", "stateful")
BROKEN_LOGITS = ("nan", "inf", "minus_inf", "rounded")
OPTIONS = (
    *("allowed_tokens", "begin_suppress", "cutoffs", "decay", "encoder_no_repeat", "encoder_repetition"),
    *("forced_eos", "guidance", "remove_invalid", "renormalize", "sequence_bias", "suppress"),
)
CRITERIA = ("after", "any_row", "scores", "all_scores", "max_time")
FAULTS = ("drafter", "processor", "criterion", "streamer", "model")


@dataclass(frozen=True)
class Case:
    """One comparison with plain `generate`, as plain JSON values. The defaults are the simplest case.

    What depends on the text that plain `generate` writes (an end token, a stop string, what an oracle proposes) is
    given by column.
    """

    seed: int = 0
    """Of prompts, sampling, and whatever the drafters draw."""

    architecture: str = "llama"
    layers: int = 2
    attention: str = "sdpa"
    window: int = 8
    tight_positions: bool = False
    """The table of positions ends with the text."""
    training: str = ""
    """Which model is in training mode: "target", "draft" or none; "dropout": the target, and it has dropout."""

    lengths: tuple[int, ...] = (4,)
    """Tokens of each row's prompt; shorter ones are padded on the left."""
    repetitive: bool = False
    pad_id: int = 0
    pad_in_prompt: bool = False
    give_mask: bool = True
    embeddings: str = ""
    """The prompt is given as `inputs_embeds`: "beside" its ids, or "alone"."""

    strategy: str = "oracle"
    k: int = 3
    accuracy: float = 1.0
    """Share of the tokens of an oracle or a head that are right; of a draft model's weights that are the target's."""
    branches: int = 2
    threshold: float = 0.0
    exit_layer: int = 1
    members: tuple[str, ...] = ()
    """Strategies of a combined one."""
    policy: str = "fixed"
    """ "fixed", "random", "window", "schedule", "adaptive" (with given latencies) or "auto" (with measured ones)."""
    draft_tree: int | str | None = None
    """Size of the trees that networks draft; "auto", or None for chains."""
    verification: str = "exact"
    settings: tuple[str, ...] = ()
    """Names of `CALL_SETTINGS`: further arguments of the call."""
    entry: str = "keyword"
    """How speculation is asked for: "keyword", "custom" (`custom_generate=`), "custom_streamer" or "attach"."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    max_new_tokens: int = 8
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    eos_columns: tuple[int, ...] = ()
    """End tokens that plain `generate` would write in these columns."""
    stop_string_column: int | None = None
    criteria: tuple[str, ...] = ()

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    processors: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    broken_logits: str = ""
    """Now and then the model's logits hold this: "nan", "inf" or only "minus_inf"; or all are "rounded"."""

    return_dict: bool = False
    output_scores: bool = False
    output_logits: bool = False
    num_return_sequences: int = 1
    prefill_chunk_size: int | None = None
    streamer: bool = False
    config_object: bool = False
    """Settings in a `GenerationConfig` instead of keywords."""
    inference_mode: bool = False

    cache: str = "none"
    """ "none", "static_setting" (`cache_implementation`), or what the caller gives: "dynamic", "static" or "float8"."""
    turns: int = 1
    """Calls that go on from the cache of the one before."""
    swap_caches: bool = False
    """In later turns plain `generate` gets the cache that speculation left, and the other way round."""

    cache_use: str = ""
    """What is done to the cache between two turns, one of `CACHE_USES`."""
    saved_settings: bool = False
    """Settings in the model's own `generation_config` instead of keywords."""

    intervention: str = ""
    """What is changed on the model between calls, one of `INTERVENTIONS`; calls are made with it and without."""
    changed_first: bool = False
    """The first call has it; otherwise one without it comes before."""
    drafter_fault: str = ""
    """One of `DRAFTER_FAULTS`: the text is right, or a `ValueError` names the strategy."""
    threads: int = 1
    """How many threads make the speculative call at the same time, on a model that no call has used before."""
    other_thread: bool = False
    """Another thread draws from the global random generator while the speculative call runs."""

    fault: str = ""
    """Where an exception is raised in an additional call."""
    fault_call: int = 2
    """In which call of that object."""
    interrupt: bool = False
    """The exception is a `KeyboardInterrupt`."""

    def to_json(self) -> str:
        """One line; only what differs from the defaults."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default})

    @classmethod
    def from_json(cls, line: str) -> Case:
        return cls(**{name: _tuples(value) for name, value in json.loads(line).items()})

    def strategies(self) -> tuple[str, ...]:
        return self.members if self.strategy == "combined" else (self.strategy,)

    @property
    def needs_new_model(self) -> bool:
        """Whether the case changes the model, or needs one that no call has used before."""
        return bool(self.intervention) or self.threads > 1 or self.other_thread

    @property
    def repeats_text(self) -> bool:
        """Whether plain `generate` writes the same text each time: not where several threads sample."""
        return not (self.do_sample and (self.threads > 1 or self.other_thread))

    @property
    def situation(self) -> str:
        """What surrounds the calls, as a key of the report."""
        named = self.intervention or (f"drafter: {self.drafter_fault}" if self.drafter_fault else "")
        flags = {
            "threads": self.threads > 1,
            "another thread": self.other_thread,
            "saved settings": self.saved_settings,
            f"cache {self.cache_use}": self.cache_use != "",
            "prompt of padding": min(self.lengths) == 0,
            f"embeddings {self.embeddings}": self.embeddings != "",
        }
        return named or next((name for name, applies in flags.items() if applies), "usual")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# Draws a case from a seed

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
    "cache": {"none": 20, "dynamic": 4, "static": 1, "static_setting": 1, "float8": 1},
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
    parts |= {name: weighted(random, weights) for name, weights in WEIGHTS.items()}
    if random.random() < 0.55:
        parts |= {"do_sample": True, **{name: weighted(random, weights) for name, weights in SAMPLING.items()}}
        parts["num_return_sequences"] = weighted(random, {1: 11, 2: 1, 3: 1})
    group = weighted(random, {"tested": 60, "untested": 30, "stateful": 8, "refused": 2})
    names = {"tested": TESTED, "untested": UNTESTED, "stateful": STATEFUL, "refused": REFUSED}[group]
    parts["architecture"] = random.choice(sorted(names) if architectures is None else architectures)
    weights = {"scripted": 5, "without_training": 7, "draft_models": 5, "heads": 7, "combined": 3}
    parts["strategy"] = random.choice(GROUPS[weighted(random, weights)] if strategies is None else strategies)
    if parts["strategy"] == "combined":
        parts["members"] = tuple(random.sample(COMBINED, random.randint(1, 3)))
    for draw_more in (_prompts, _ends, _objects, draw_situation):
        parts |= draw_more(random, parts)
    parts["embeddings"] = weighted(random, {"": 20, "beside": 1, "alone": 1})
    return _consistent(Case(**parts))


def _prompts(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    batch = weighted(random, {1: 4, 2: 2, 3: 3, 5: 1})
    shortest, longest = weighted(random, {(1, 3): 2, (2, 9): 3, (4, 12): 3, (9, 9): 2, (20, 40): 0.5})
    lengths = tuple(random.randint(shortest, longest) for _ in range(batch))
    return {"lengths": lengths, "exit_layer": random.randint(1, parts["layers"] - 1)}


def _ends(random: Random, parts: dict[str, Any]) -> dict[str, Any]:
    columns, ends = range(parts["max_new_tokens"]), dict[str, Any]()
    kind = weighted(random, {"none": 4, "many": 2, "column": 4})
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
        "settings": some(random, CALL_SETTINGS, 0.15),
        "criteria": some(random, CRITERIA, 0.15),
        "processors": some(random, PROCESSORS, 0.2),
        "options": some(random, OPTIONS, 0.2),
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
    case = single_situation(case)
    changes: dict[str, Any] = {}
    reads_scores = not {"scores", "all_scores"}.isdisjoint(case.criteria)
    if case.output_scores or case.output_logits or reads_scores:
        changes["return_dict"] = True
    if reads_scores:
        changes["output_scores"] = True
    if case.turns > 1 and case.cache in ("none", "static_setting"):
        changes["return_dict"] = True
    if case.architecture in ("mamba", "falcon_mamba"):  # whose cache has no length, which a divided prefill asks for
        changes["prefill_chunk_size"] = None
    if case.architecture == "falcon" and case.cache == "static_setting":  # a divided prefill allocates all heads for it
        changes["prefill_chunk_size"] = None
    if case.architecture == "gpt_neo" and case.cache.startswith("static"):  # its local mask is as long as the text
        changes["cache"] = "none"
    if "uno" in case.strategies() and case.intervention == "activated_lora":  # made for the changed model
        changes["intervention"] = ""
    if case.embeddings:  # of a first turn, whose prompt is not divided
        changes |= {"turns": 1, "prefill_chunk_size": None, "cache_use": ""}
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
