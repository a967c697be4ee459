"""Chooses the strategy that belongs to a checkpoint: a draft head of any known format, or a draft model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from hf_specgen.candidates import draft_heads
from hf_specgen.candidates.base import Candidates, source_of
from hf_specgen.candidates.draft_model import DraftModelCandidates
from hf_specgen.candidates.layer_skip import LayerSkipCandidates
from hf_specgen.heads.checkpoint import Checkpoint, Fields, base_of_adapter, named_errors, open_checkpoint, read_json
from hf_specgen.heads.exit_head import EXIT_CONFIG
from hf_specgen.heads.head_file import speculators_type
from hf_specgen.heads.head_formats import FORMATS, check_supported, head_format
from hf_specgen.heads.source import Source

logger = logging.getLogger("hf_specgen")
Build = Callable[..., Candidates]


class AutoCandidates:
    """Builds the strategy for a checkpoint, in the convention of Transformers' Auto classes."""

    def __init__(self, *_: object) -> None:
        raise TypeError(
            "AutoCandidates is built by AutoCandidates.from_pretrained(name_or_path); to merge several strategies use "
            "CombinedCandidates([...])"
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        tokenizer: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Candidates:
        """The strategy that drafts with a checkpoint, determined from its config.json and its tensors.

        Args:
            name_or_path: a folder, or a repository of the Hub.
            tokenizer, chat_template_kwargs: with which prompts are written; a warning is issued if the drafter was
                trained with another chat template, or in another mode such as `{"enable_thinking": False}`.
            settings: of the strategy, such as `k=4` or `tree=16`; and where the checkpoint lies, as for
                `from_pretrained` of Transformers: `revision`, `token`, `subfolder`, `cache_dir`; `trust_remote_code`
                runs the code of a draft model's repository, heads have none.

        Returns:
            `EagleCandidates`, `PEagleCandidates`, `DFlashCandidates`, `MTPCandidates` (for a target's own checkpoint),
            `GemmaAssistantCandidates`, `MedusaCandidates`, `LayerSkipCandidates` or `DraftModelCandidates`.

        Raises:
            FileNotFoundError: if there is no such folder or repository.
            ValueError: if the format is unknown, or a file is damaged.
            TypeError: for a setting that the strategy does not have.

        Example:
            >>> AutoCandidates.from_pretrained("benchmarks/assets/draft-lm", k=4)
            DraftModelCandidates('benchmarks/assets/draft-lm', k=4)
        """
        source = source_of(name_or_path, settings)
        build = _strategy(source)
        if tokenizer is not None and (warning := other_chat_format(source, tokenizer, chat_template_kwargs or {})):
            logger.warning("%s: %s", source, warning)
        if source.trust_remote_code and build is DraftModelCandidates:
            settings["trust_remote_code"] = True
        return build(source.local_name(), **settings)


def _strategy(source: Source) -> Build:
    """What builds the strategy from the folder or name of the checkpoint."""
    if source.file(EXIT_CONFIG) is not None:
        return LayerSkipCandidates.of_checkpoint
    if (base := base_of_adapter(source)) is not None:  # of a head or a draft model, which it is loaded with
        return _strategy(base)
    checkpoint = open_checkpoint(source)
    with named_errors(source):
        check_supported(checkpoint)
    try:
        strategy: Build = getattr(draft_heads, head_format(checkpoint).strategy)
        return strategy
    except ValueError:
        has_code = "AutoModelForCausalLM" in Fields(checkpoint.config).nested("auto_map").values
        if _is_language_model(checkpoint) or (has_code and source.trust_remote_code):
            return DraftModelCandidates
        if has_code:
            raise ValueError(f"{source} is a model with code of its own; trust_remote_code=True runs it") from None
        known = "; ".join(("exit adapters", *(format.name for format in FORMATS), "language models"))
        raise ValueError(f"{checkpoint.source} has none of the known formats, which are: {known}") from None


def chat_template_hash(tokenizer: Any) -> str | None:
    """The first 16 hexadecimal digits of the SHA-256 of a tokenizer's chat template; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def other_chat_format(source: Source, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> str | None:
    """A warning if a drafter was trained with another chat format, of which its `training.json` has a record."""
    path = source.file("training.json")
    record = {} if path is None else read_json(path)
    template = record.get("chat_template")
    if template is not None and template != chat_template_hash(tokenizer):
        return "it was trained with another chat template than this tokenizer's: fewer draft tokens are accepted"
    trained = record.get("chat_template_kwargs")
    given = dict(chat_template_kwargs)
    if trained is None or trained == given:
        return None
    return f"it was trained with chat_template_kwargs {trained}, not {given}: fewer draft tokens are accepted"


def _is_language_model(checkpoint: Checkpoint) -> bool:
    """Whether it is a whole model: heads name the class of their layers too, but hold no model of that class."""
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()}
    known |= set(MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values())
    classes = checkpoint.config.get("architectures")
    named = isinstance(classes, list) and any(isinstance(name, str) and name in known for name in classes)
    has_embeddings = any(part in name for name in checkpoint.tensors for part in ("embed", "wte", "shared"))
    return named and has_embeddings and speculators_type(checkpoint) is None
