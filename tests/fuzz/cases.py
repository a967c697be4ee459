"""What a case is."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

SCRIPTED = ("oracle", "oracle_tree", "random", "random_tree")
WITHOUT_TRAINING = ("ngram", "ngram_tree", "history", "prediction", "recycling", "combined_default", "auto", "native")
DRAFT_MODELS = ("draft", "draft_other", "draft_reencoded", "skip", "skip_adapter")
MEDUSA = ("medusa", "medusa_auto")
HEADS = ("eagle1", "eagle3", "dflash", "peagle")
"""Heads that are built for any target."""
OWN_TARGETS = {
    "mtp": ("mtp_deepseek_v3", "mtp_glm4_moe", "mtp_qwen3_5", "mtp_qwen3_next"),
    "assistant": ("assistant_gemma4",),
}
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
    *("draft", "draft_reencoded", "skip", *MEDUSA, *HEADS),
)
"""What a combined strategy may have as members."""
CALL_SETTINGS = ("no_memory", "monitor", "pack_weights", "not_compiled")
ENTRIES = ("keyword", "custom", "custom_streamer", "attach")
PROCESSORS = ("prefix", "row_wise", "stateful")
BROKEN_LOGITS = ("nan", "inf", "minus_inf", "rounded")
OPTIONS = (
    "allowed_tokens",
    "begin_suppress",
    "cutoffs",
    "decay",
    "encoder_no_repeat",
    "encoder_repetition",
    "forced_eos",
    "guidance",
    "remove_invalid",
    "renormalize",
    "sequence_bias",
    "suppress",
)
CRITERIA = ("after", "any_row", "scores", "max_time")
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
    """ "none", or "dynamic": the caller gives a `DynamicCache`."""
    turns: int = 1
    """Calls that go on from the cache of the one before."""
    swap_caches: bool = False
    """In later turns plain `generate` gets the cache that speculation left, and the other way round."""

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


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
