"""Draft model: a smaller model reads the same text as the target, and drafts the tokens after it.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al. (2023). For
drafts with another tokenizer: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies" (2025).
"""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any, TypedDict, Unpack, cast

import torch
from transformers import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from hf_specgen import compat, random_state
from hf_specgen.candidates.base import Depth, DraftSession, PretrainedCandidates, TreeSetting, vocabulary_size
from hf_specgen.candidates.cross_tokenizer import DraftText, load_tokenizer, retokenized_texts
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_heads import BoundModules
from hf_specgen.candidates.draft_model_drafter import DraftModelDrafter, LoadedDraft
from hf_specgen.candidates.draft_vocabulary import DraftVocabulary, check_vocabulary, restricted_model, vocabulary_ids
from hf_specgen.candidates.draft_window import DraftWindowSetting, check_window, draft_window
from hf_specgen.candidates.drafter_session import DrafterSession
from hf_specgen.candidates.encoder_draft import check_pair
from hf_specgen.candidates.parallel_draft import ParallelDraft
from hf_specgen.depth import Policy
from hf_specgen.heads.source import first_line, source_errors
from hf_specgen.libraries import prompt_learning, unwrapped_model
from hf_specgen.targets.model_parts import is_causal_kernel, keeps_state, reads_encoder, text_config
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.targets.support import check_model

logger = logging.getLogger("hf_specgen")
MAX_DEPTH = 32
MAX_PARALLEL_DEPTH = 16
"""Maximum depth of k="auto": with 16 the projected speed is 0.95 of that with 32, as text of which the draft model is
nearly certain is accepted to a greater depth. A draft in one pass takes longer with every level, accepted or not."""


class Loading(TypedDict, total=False):
    """How to load a draft model, see `DraftModelCandidates`."""

    dtype: torch.dtype | str
    device: torch.device | str | None
    quantization_config: Any
    trust_remote_code: bool


class DraftModelCandidates(PretrainedCandidates):
    """Drafts with a small model.

    A draft with another tokenizer proposes tokens that both vocabularies have. Fewer of its tokens are accepted than
    with a draft of the target's family.

    Args:
        model_or_id: a loaded model (also one that PEFT has wrapped), a Hub id or a folder; or "self" for a quantised
            copy of the target, which shares with it all weights but those of its linear layers.
        k, tree, policy: as for `Candidates`.
        confidence_threshold: do not draft after a token with a lower probability (in trees with rejection sampling, of
            a lower expected one, by its rank); 0 never stops.
        draft_window: how much of a long text the draft reads: a number of recent tokens, or a pair of first and recent
            ones; its cache holds up to twice as many. "auto": as many recent ones as it was trained on (the
            `trained_length` of its config), or half of its positions; None: all of it. For decoder-only drafts with the
            target's tokenizer.
        draft_vocabulary: which tokens the draft proposes: ids, or "frequent" for a quarter of the vocabulary, tokens of
            the first call's prompts and those of the lowest ids. Its output matrix, a copy, is smaller by as much.
        loading: how to load a draft that is given by name: `dtype`, by default that of its checkpoint; `device`, by
            default the target's; `quantization_config`, for int8 Transformers' `TorchAoConfig` around torchao's
            `Int8WeightOnlyConfig()`, which "self" takes too; `trust_remote_code`, to run the code of its repository.

    Raises:
        TypeError: if model_or_id is neither a model nor a name, or for an unknown argument.
        ValueError: if a number is out of range, or loading options are given for a model that is loaded already; at
            the first call, if the draft cannot go with the target.

    Example:
        >>> DraftModelCandidates("org/small-model", k=4)
        DraftModelCandidates('org/small-model', k=4)
    """

    latency_kind = "draft_model"
    may_have_code = True
    arguments = {
        **PretrainedCandidates.arguments,
        "confidence_threshold": 0.0,
        "draft_window": "auto",
        "draft_vocabulary": None,
    }

    def __init__(
        self,
        model_or_id: PreTrainedModel | str | os.PathLike[str],
        k: Depth = "auto",
        *,
        tree: TreeSetting = None,
        confidence_threshold: float = 0.0,
        draft_window: DraftWindowSetting = "auto",
        draft_vocabulary: DraftVocabulary = None,
        policy: Policy | None = None,
        **loading: Unpack[Loading],
    ):
        super().__init__(k, policy, tree=tree, max_k=MAX_DEPTH)
        if not isinstance(cast(Any, confidence_threshold), Real) or not 0 <= confidence_threshold < 1:
            raise ValueError(f"confidence_threshold must be at least 0 and below 1, got {confidence_threshold!r}")
        loaded = not isinstance(model_or_id, str | os.PathLike)
        self.drafter = drafter = _without_wrapper(model_or_id) if loaded else os.path.expanduser(cast(Any, model_or_id))
        self._loading = _loading_arguments(drafter, loading)
        self._copies: BoundModules[PreTrainedModel] | None = BoundModules() if drafter == "self" else None
        self.confidence_threshold = confidence_threshold
        self.draft_window = check_window(draft_window)
        self.draft_vocabulary = check_vocabulary(draft_vocabulary)
        self._restricted: BoundModules[tuple[PreTrainedModel, torch.Tensor]] = BoundModules()
        self._model = cast(PreTrainedModel, drafter) if loaded else None

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        """The hidden states that a PARD-2 draft reads."""
        draft = self._load(model)
        parallel = None if draft.config.is_encoder_decoder else ParallelDraft.from_model(draft)
        return TargetRequirements(
            parallel.layers_of(model) if parallel is not None and parallel.aux_hidden_state_layers else ()
        )

    def start(self, batch: DraftBatch) -> DraftSession:
        batch.call.check_prompt_ids("a draft model")
        draft = self._load(batch.model)
        check_draft(draft, batch.model)
        loaded = self._in_call(batch, draft)
        k = self.k
        if loaded.parallel is not None and self.adaptive_tree:
            k = min(k, MAX_PARALLEL_DEPTH)
        drafter = DraftModelDrafter(batch, loaded, k)
        return DrafterSession(
            batch,
            drafter,
            k,
            self.tree,
            confidence_threshold=self.confidence_threshold,
            warns_of_length=loaded.takes_window and loaded.window is None,
        )

    def _in_call(self, batch: DraftBatch, draft: PreTrainedModel) -> LoadedDraft:
        """The draft model with what it reads and proposes in a call."""
        prompts = batch.state.prompts
        loaded = LoadedDraft(draft, [DraftText(prompt) for prompt in prompts], batch.call.settings.compile)
        if self._has_other_tokenizer(draft, batch.model):
            texts, shared = retokenized_texts(batch, draft)
            loaded = replace(loaded, texts=texts, shared=shared)
        elif not reads_encoder(draft):
            loaded = replace(loaded, parallel=ParallelDraft.from_model(draft))
        if loaded.takes_window:
            loaded = replace(loaded, window=draft_window(self.draft_window, text_config(draft), batch.state))
        if (vocabulary := self.draft_vocabulary) is not None:
            if loaded.shared is not None or loaded.parallel is not None:
                kind = "that drafts all tokens in one pass (PARD)" if loaded.parallel else "of another tokenizer"
                raise ValueError(f"draft_vocabulary cannot be used with a draft model {kind}; leave it out")
            ids = vocabulary_ids(vocabulary, prompts, min(vocabulary_size(batch.model), vocabulary_size(draft)))
            model, token_ids = self._restricted.on(draft, lambda: restricted_model(draft, ids))
            loaded = replace(loaded, model=model, token_ids=token_ids)
        # Captured passes run without the hook that adds the target's hidden states, and with the same rows.
        return replace(loaded, compile=False) if loaded.reads_target or batch.state.drafts_together else loaded

    def _has_other_tokenizer(self, draft: PreTrainedModel, target: PreTrainedModel) -> bool:
        if have_same_vocabulary(draft, target):
            return False
        if reads_encoder(draft):
            raise ValueError(
                f"the draft {type(draft).__name__} has another tokenizer than the target, which works with "
                "decoder-only models; use a draft of the target's family"
            )
        return True

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """A draft model that is loaded by name is also identified by how."""
        return (*super().profile_key(), *map(str, self._loading.values()))

    def _load(self, target: PreTrainedModel) -> PreTrainedModel:
        if self._copies is not None:
            return self._copies.on(target, lambda: quantised_copy(target, self._loading["quantization_config"]))
        if self._model is None:
            options = {name: value for name, value in self._loading.items() if value is not None}
            device = compat.input_device(target)
            options.setdefault("device_map", device)
            _check_device(options.get("device_map"))
            # Transformers initialises at random what the checkpoint lacks.
            with source_errors(str(self.drafter)), random_state.kept(device):
                model, info = _auto_class(target).from_pretrained(self.drafter, output_loading_info=True, **options)
            if info["unexpected_keys"] and (missing := sorted(info["missing_keys"])):
                raise ValueError(
                    f"{self.drafter!r} has other tensors than a {type(model).__name__}, and lacks {missing[0]}; for a "
                    "draft head use AutoCandidates.from_pretrained"
                )
            self._model = model
        return self._model


def check_draft(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise a `ValueError` for a model that cannot draft for this target."""
    check_pair(draft, target)
    try:
        check_model(draft)
    except ValueError as error:
        raise ValueError(f"the draft model, not the target: {error}; or give another draft") from error
    if keeps_state(text_config(draft)):
        raise ValueError(
            f"{type(draft).__name__} keeps a state that draft trees cannot branch from; use a draft model with "
            "attention layers only"
        )
    implementation = compat.attention_implementation(text_config(draft))
    if is_causal_kernel(implementation):
        raise ValueError(
            f"the draft model uses {implementation!r}, which takes no mask for draft trees and rows of different "
            "lengths; load the draft with attn_implementation='sdpa'"
        )


def _loading_arguments(drafter: PreTrainedModel | str, loading: Loading) -> dict[str, Any]:
    """The arguments for Transformers' `from_pretrained` of a draft; `ValueError` if they do not fit it."""
    if unknown := sorted(set(loading) - set(Loading.__annotations__)):
        raise TypeError(f"DraftModelCandidates got an unexpected keyword argument {unknown[0]!r}")
    dtype = loading.get("dtype", "auto")
    device = loading.get("device")
    quantization = loading.get("quantization_config")
    if not isinstance(drafter, str) and (dtype != "auto" or device is not None or quantization is not None):
        raise ValueError("dtype, device and quantization_config are for a draft given by name; this one is loaded")
    if drafter == "self" and (quantization is None or dtype != "auto" or device is not None):
        raise ValueError(
            'DraftModelCandidates("self") takes quantization_config=, such as TorchAoConfig(Int8WeightOnlyConfig()), '
            "and neither dtype nor device; those are the target's"
        )
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name not in ("", "auto") and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f'dtype must be "auto" or a dtype such as torch.bfloat16, got {dtype!r}')
    arguments = {"dtype": dtype, "device_map": device, "quantization_config": quantization}
    return {**arguments, "trust_remote_code": True} if loading.get("trust_remote_code") else arguments


def _check_device(device: Any) -> None:
    """Raise a `ValueError` for a device that PyTorch cannot use here; the other names are Transformers' own."""
    try:
        if device not in (None, "auto", "balanced", "balanced_low_0", "sequential"):
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {str(device)!r} cannot be used for the draft ({first_line(error)}); leave it out for the target's"
        ) from error


def quantised_copy(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """A copy of a model whose linear layers torchao has quantised; the other weights are the model's own.

    The config is torchao's, or Transformers' `TorchAoConfig` around it.
    """
    from torchao.quantization import quantize_

    weights = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(weight): weight for weight in weights})
    quantize_(copied, getattr(config, "quant_type", config))
    return copied.eval()


def _auto_class(target: PreTrainedModel) -> Any:
    """The Auto class that loads a draft of the target's kind."""
    if not target.config.is_encoder_decoder:
        return AutoModelForCausalLM
    speech = type(target.config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    return AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM


def _without_wrapper(model: Any) -> PreTrainedModel:
    """The model inside a PEFT or `torch.compile` wrapper. Adapters such as LoRA are layers inside of it."""
    inner = unwrapped_model(model)
    if inner is None:
        raise TypeError(f"model_or_id must be a loaded model, a Hub id or a folder, got {model!r:.80}")
    if (kind := prompt_learning(compat.unwrapped(model))) is not None:
        raise ValueError(
            f"the draft model uses {kind}, whose virtual tokens only PEFT's own forward pass adds; give a draft model "
            "without it, or with LoRA"
        )
    return inner


@lru_cache(maxsize=8)
def _load_failure(name: str) -> str | None:
    """Why the tokenizer of a model cannot be loaded, as a sentence; None if it can."""
    if not name:
        return "they were not loaded from a folder or repository"
    try:
        load_tokenizer(name)
    except Exception as error:  # damaged files and missing packages raise errors of many types
        reason = f"the tokenizer of {name!r} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        logger.warning("%s; whether its vocabulary is that of the other model is not checked", reason)
        return reason
    return None


@lru_cache(maxsize=64)
def _have_equal_tokens(draft: str, target: str) -> bool:
    """Whether the tokenizers in two folders or repositories have the same tokens, with the same ids."""
    of_draft, of_target = map(load_tokenizer, (draft, target))
    return of_draft.get_vocab() == of_target.get_vocab()


def have_same_vocabulary(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether two models have the same tokenizer, as far as their tokenizers can be loaded.

    The sizes of their embedding tables are no criterion, since tables are padded: Qwen models have tables of 151,936
    and 152,064 rows for one tokenizer.
    """
    names = str(draft.name_or_path or ""), str(target.name_or_path or "")
    if draft is target or names[0] == names[1] != "":
        return True
    reasons = [reason for name in names if (reason := _load_failure(name)) is not None]
    if not reasons:
        return _have_equal_tokens(*names)
    sizes = [model.config.get_text_config().vocab_size for model in (draft, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft has a vocabulary of {sizes[0]}, the target of {sizes[1]}, and their tokenizers could not be "
            f"compared ({'; '.join(reasons)}); load both models from folders that hold their tokenizers"
        )
    if "" in names:  # of the others `_load_failure` has logged why
        logger.warning_once(  # type: ignore[attr-defined]  # of Transformers
            "draft or target was not loaded from a folder or repository; whether they have the same tokenizer is not "
            "checked, only that both have %d tokens",
            sizes[0],
        )
    return True
