"""Draft model: a smaller model reads the same text as the target, and drafts continuations.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al. (2023). For
drafts with another tokenizer: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies" (2025).
"""

from __future__ import annotations

import os
from numbers import Real
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from hf_specgen import compat
from hf_specgen.call import Compile
from hf_specgen.candidates.attached import number_of
from hf_specgen.candidates.base import Candidates, Depth, DraftCall, DraftSession, Tree, check_tree
from hf_specgen.candidates.draft_model_session import DraftModelSession
from hf_specgen.candidates.draft_prompt import check_pair, draft_prompt, embedding_size, known_tokens
from hf_specgen.candidates.translated import translated_session
from hf_specgen.candidates.vocabulary import have_same_vocabulary
from hf_specgen.depth import Policy
from hf_specgen.targets.model_parts import is_causal_kernel, keeps_state, reads_encoder, text_config
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.self_check import check_computation
from hf_specgen.targets.support import check_model, position_table

MAX_DEPTH = 16
"""Maximum depth of k="auto": drafts of copied text are accepted that far; elsewhere trees stop growing earlier."""


class DraftModelCandidates(Candidates):
    """Drafts with a small model.

    A draft with another tokenizer proposes tokens that both vocabularies have, or, if few of the prompt's tokens are
    such, chains of text that is encoded again in the target's vocabulary. Fewer of its tokens are accepted than with a
    draft of the target's family; a warning is issued once if generation becomes slower.

    Args:
        model_or_id: a loaded model (also one that PEFT has wrapped), a Hub id or a folder.
        k: maximum depth of a draft, in tokens; "auto" adapts it to acceptance and latency.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the size of every tree. Left out, it is "auto" with k="auto", and with a number for
            k the draft is a chain of k tokens.
        confidence_threshold: do not draft after a token with a lower probability; 0 never stops.
        dtype, device, quantization_config: how to load a draft that is given by name; by default in the dtype of its
            checkpoint, on the target's device. int8: Transformers' `TorchAoConfig` around torchao's
            `Int8WeightOnlyConfig()`.
        share_encoder: with an encoder-decoder target, whether the draft's decoder reads what the target's encoder
            returned, as Distil-Whisper does; otherwise the draft runs its own encoder, once for each call. Left out,
            the encoder is shared if both have the same weights.
        compile: "graphs" captures the draft's forward passes as CUDA graphs. The tokens of `generate` stay the same.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        TypeError: if model_or_id is neither a model nor a name.
        ValueError: if a number is out of range, or loading options are given for a model that is loaded already; at
            the first call, if the draft cannot go with the target.

    Example:
        >>> DraftModelCandidates("org/small-model", k=4)
        DraftModelCandidates('org/small-model', k=4, confidence_threshold=0.0)
    """

    def __init__(
        self,
        model_or_id: PreTrainedModel | str | os.PathLike[str],
        k: Depth = "auto",
        *,
        tree: Tree = None,
        confidence_threshold: float = 0.0,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        quantization_config: Any = None,
        share_encoder: bool | None = None,
        compile: Compile = False,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=MAX_DEPTH)
        self.tree = check_tree(tree, k)
        self.adaptive_tree = self.tree == "auto"
        if not isinstance(cast(Any, confidence_threshold), Real) or not 0 <= confidence_threshold < 1:
            raise ValueError(f"confidence_threshold must be at least 0 and below 1, got {confidence_threshold!r}")
        if isinstance(model_or_id, os.PathLike):
            model_or_id = os.fspath(model_or_id)
        loaded = not isinstance(model_or_id, str)
        if loaded and (dtype != "auto" or device is not None or quantization_config is not None):
            raise ValueError("dtype, device and quantization_config are for a draft given by name; this one is loaded")
        self.confidence_threshold, self.share_encoder = confidence_threshold, share_encoder
        if compile is not False and compile != "graphs":
            raise ValueError(f'compile must be False or "graphs", got {compile!r}')
        self.compile, self._is_given_loaded = compile, loaded
        self._model = None if isinstance(model_or_id, str) else _without_wrapper(model_or_id)
        self._name = model_or_id if isinstance(model_or_id, str) else str(cast(Any, self._model).name_or_path)
        self._loading = {"dtype": dtype, "device_map": device, "quantization_config": quantization_config}

    def start(self, call: DraftCall) -> DraftSession:
        draft = self._load(call.model)
        check_pair(draft, call)
        check_model(draft)
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
        is_same_vocabulary = call.model is None or have_same_vocabulary(draft, call.model)
        if is_same_vocabulary:
            _check_prompt_length(draft, max(map(len, call.state.prompts)))
        elif reads_encoder(draft):
            raise ValueError(
                f"the draft {type(draft).__name__} has another tokenizer than the target, which works with "
                "decoder-only models; use a draft of the target's family"
            )
        prompts = [known_tokens(prompt, embedding_size(draft)) for prompt in call.state.prompts]
        prompt = draft_prompt(draft, call, prompts, self.share_encoder)
        check_computation(draft, TargetRequirements(), *(prompt if reads_encoder(draft) else ()))
        if not is_same_vocabulary:
            # In a combination the policy observes all members together.
            warns = False
            return translated_session(
                call, draft, self.k, self.tree, self.confidence_threshold, compile=self.compile, warns=warns
            )
        reader = make_target(TargetRequirements(), draft, *prompt, compile=self.compile)
        return DraftModelSession(call, draft, reader, self.k, self.tree, self.confidence_threshold)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        key: tuple[str | int | float | bool, ...] = (
            "draft_model",
            *self._identity(),
            self.k,
            str(self.tree),
            self.confidence_threshold,
        )
        key = key if self.share_encoder is None else (*key, self.share_encoder)
        return (*key, self.compile) if self.compile else key

    def _identity(self) -> tuple[str, ...]:
        """The draft model's name and how it is loaded; one that was given loaded may have no name, but a number."""
        if not self._is_given_loaded or self._model is None:
            return (self._name, *map(str, self._loading.values()))
        model = self._model
        name = self._name or f"{type(model).__qualname__} {number_of(model)}"
        quantization = getattr(model.config, "quantization_config", None)
        return name, str(model.dtype), str(compat.input_device(model)), str(quantization)

    def _load(self, target: PreTrainedModel | None) -> PreTrainedModel:
        if self._model is None:
            options = {name: value for name, value in self._loading.items() if value is not None}
            if target is not None:
                options.setdefault("device_map", compat.input_device(target))
            self._model = _auto_class(target).from_pretrained(self._name, **options)
        return self._model

    def __repr__(self) -> str:
        tree = "" if self.tree is None else f", tree={self.tree!r}"
        share = "" if self.share_encoder is None else f", share_encoder={self.share_encoder}"
        compile = f", compile={self.compile!r}" if self.compile else ""
        settings = f"k={self.k}{tree}, confidence_threshold={self.confidence_threshold}{share}{compile}"
        return f"DraftModelCandidates({self._name!r}, {settings}{self._show_policy()})"


def _auto_class(target: PreTrainedModel | None) -> Any:
    """The Auto class that loads a draft of the target's kind."""
    if target is None or not target.config.is_encoder_decoder:
        return AutoModelForCausalLM
    speech = type(target.config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    return AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM


def _without_wrapper(model: Any) -> PreTrainedModel:
    """The model inside a PEFT or `torch.compile` wrapper. Adapters such as LoRA are layers inside of it.

    Raises:
        TypeError: if there is no model.
        ValueError: for prefix or prompt tuning, which is a part of the wrapper.
    """
    model = compat.unwrapped(model)
    if isinstance(model, PreTrainedModel):
        return model
    if not hasattr(model, "get_base_model"):
        raise TypeError(f"model_or_id must be a loaded model, a Hub id or a folder, got {model!r:.80}")
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"the draft model uses {model.active_peft_config.peft_type.value}, whose virtual tokens only PEFT's own "
            "forward pass adds; give a draft model without it, or with LoRA"
        )
    return cast(PreTrainedModel, model.get_base_model())


def _check_prompt_length(draft: PreTrainedModel, longest: int) -> None:
    table = position_table(text_config(draft))
    if longest > table:
        raise ValueError(f"the prompt has {longest} tokens, but the draft reads at most {table}; use another draft")
