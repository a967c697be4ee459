"""Which models can verify a draft tree, by their configuration; the others are refused with the reason.

A model must place tokens by `position_ids`, take a 4-D attention mask, and keep all its state in the cache. What the
configuration does not show is checked by `hf_specgen.targets.requirements`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.libraries import has_virtual_tokens, uses_activated_lora
from hf_specgen.targets.model_parts import (
    INDEXED_TYPES,
    STATE_TYPES,
    TAKES_2D_MASK,
    WITHOUT_CACHE,
    decoder,
    is_causal_kernel,
    layer_kinds,
    matrix_rows,
    reads_encoder,
    text_config,
    text_embeddings,
)

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")
"""Implementations that take any mask. FlashAttention takes none: it verifies chains, of one row."""
MIN_CAPACITY = 16
"""Experts that take fewer tokens of a row in a pass have no capacity left for draft tokens."""
MASKS_OF_KERNELS = {"full_attention", "sliding_attention"}
"""Kinds of attention that FlashAttention computes without a mask."""
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", *STATE_TYPES, *INDEXED_TYPES, *WITHOUT_CACHE)


def check_model(model: PreTrainedModel) -> None:
    """Raise a `ValueError` unless the model, in its present mode, can verify draft tokens in one forward pass."""
    check_architecture(model)
    outputs = matrix_rows(model.get_output_embeddings())
    try:
        embedded = matrix_rows(text_embeddings(model))
    except (NotImplementedError, AttributeError):  # under a name that Transformers does not know
        embedded = None
    problems = {
        "uses gradient checkpointing in training mode, which switches the key/value cache off; call model.eval() "
        "first, or use plain generate(candidate_generator=None)": model.training
        and compat.uses_activation_checkpointing(model),
        "is used with prefix or prompt tuning (PEFT), whose virtual tokens take positions of their own; "
        "use plain generate(candidate_generator=None)": has_virtual_tokens(model),
        "is used with an activated LoRA (PEFT, alora_invocation_tokens), whose offsets count from the end of each pass "
        "and so reach other tokens in a pass over several; disable that adapter, or use plain "
        "generate(candidate_generator=None)": uses_activated_lora(model),
        "has parameters that are sharded over processes (FSDP, ZeRO-3), which must all run the same forward passes; "
        "use plain generate(candidate_generator=None)": compat.is_sharded(model),
        f"has {outputs} outputs and embeddings of {embedded} tokens, so that not all draft tokens can be read; call "
        f"model.resize_token_embeddings({outputs}), or use plain generate(candidate_generator=None)": (
            embedded is not None and outputs is not None and embedded < outputs
        ),
    }
    if problem := first_problem(model, problems):
        raise ValueError(problem)


def first_problem(model: PreTrainedModel, problems: dict[str, bool]) -> str | None:
    """The model's name and the first of these sentences about it that is true, if any."""
    sentence = next((sentence for sentence, is_true in problems.items() if is_true), None)
    return None if sentence is None else f"{type(model).__name__} {sentence}"


def check_architecture(model: PreTrainedModel) -> None:
    """The part of `check_model` that stays the same while a program runs: architecture and attention kernel."""
    if compat.has_own_decoding(model):
        raise ValueError(
            f"{type(model).__name__} decodes by a loop of its own, which makes more than one token in a step (several "
            "codebooks, or audio beside the text); use plain generate(candidate_generator=None)"
        )
    config = text_config(model)
    arguments = inspect.signature(model.forward).parameters
    implementation = compat.attention_implementation(config)
    kinds = layer_kinds(config)
    is_causal = is_causal_kernel(implementation)
    places_tokens = not reads_encoder(model)
    unknown = ", ".join(sorted(set(getattr(config, "layer_types", None) or ()).difference(LAYER_TYPES)))
    masked = ", ".join(sorted(kinds - MASKS_OF_KERNELS)) if is_causal else ""
    state = "which is not rolled back when a draft token is rejected; use plain generate(candidate_generator=None)"
    place = ", so draft tokens cannot be placed in a tree; use plain generate(candidate_generator=None)"
    is_masked_in_cache = places_tokens and kinds == {"sliding_attention"} and not _masks_sliding_windows(model)
    problems = {
        f"keeps a state outside of a cache, {state}": compat.is_stateful(model)
        and (compat.CACHE not in arguments or any(hasattr(module, "recurrent_states") for module in model.modules())),
        f"reads a part of its recording in each step and keeps a state of it (encoder_cache), {state}": (
            "encoder_cache" in arguments
        ),
        f"keeps a state in layers of type {unknown}, {state}": bool(unknown),
        f"uses attention implementation {implementation!r}, and what masks it takes is not known; load the model with "
        "attn_implementation='sdpa' or 'eager'": implementation not in ATTENTION_IMPLEMENTATIONS and not is_causal,
        f"has layers of type {masked}, whose mask {implementation!r} does not take; load the model with "
        "attn_implementation='sdpa'": bool(masked),
        f"derives positions from a 2-D mask (ALiBi){place}": places_tokens and bool(getattr(config, "alibi", False)),
        f"takes a mask of padding alone{place}": config.model_type in TAKES_2D_MASK,
        f"takes no position_ids{place}": places_tokens and "position_ids" not in arguments and bool(kinds),
        f"builds its local attention mask inside the layers{place}": (
            places_tokens and "local" in (getattr(config, "attention_layers", None) or ())
        ),
        f"has experts that drop tokens where a pass has more than {pass_capacity(model)}, as in verification; set "
        f"expert_capacity={MIN_CAPACITY} or more (NLLB-MoE: moe_eval_capacity_token_fraction=1.0), or use plain "
        "generate(candidate_generator=None)": pass_capacity(model) < MIN_CAPACITY,
        f"applies its sliding window in the cache and not in the attention mask{place}": is_masked_in_cache,
    }
    if problem := first_problem(model, problems):
        raise ValueError(problem)


def pass_capacity(model: PreTrainedModel) -> float:
    """How many tokens of a row an expert takes in a pass, in which it drops further ones; infinite without a limit."""
    config = text_config(model)
    fraction = getattr(config, "moe_eval_capacity_token_fraction", None)  # of the tokens of all rows, in NLLB-MoE
    if fraction is not None:
        return math.inf if fraction >= 1 and not model.training else 0
    limit = getattr(config, "expert_capacity", None)
    return math.inf if limit is None else int(limit)


def check_length(model: PreTrainedModel, first_positions: Sequence[int], new_tokens: float) -> None:
    """Raise if rotary frequencies change within the text: draft tokens after that position change earlier scores."""
    for kind, edge in _frequency_changes(text_config(model)):
        within = max(first_positions) + new_tokens <= edge
        if within or (kind == "longrope" and min(first_positions) > edge):
            continue
        remaining = edge - max(first_positions)
        raise ValueError(
            f"{type(model).__name__} changes its rotary frequencies ({kind}) at position {edge}, which this text may "
            "reach, so draft tokens there would change its scores; "
            + (f"set max_new_tokens to at most {remaining}, or " if remaining > 0 else "")
            + "use plain generate(candidate_generator=None)"
        )


def last_position(config: Any, first_positions: Sequence[int]) -> int:
    """How far a text can go before a table of positions ends, or its rotary frequencies change."""
    edges = [edge for _, edge in _frequency_changes(config) if max(first_positions) <= edge]
    return min([position_table(config), *edges]) - 1


def position_table(config: Any) -> int:
    """How many positions a model has; practically unlimited if its config names no number."""
    names = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")
    sizes = [getattr(config, name, None) for name in names]
    return int(next((size for size in sizes if size), 2**31))


def slot_limit(model: PreTrainedModel) -> int:
    """How many cache slots the model can attend to, if its layers hold a causal mask of a fixed size, as in GPT-Neo."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))
    shapes = [buffer.shape for layers in islice(lists, 1) for buffer in layers[0].buffers() if buffer.dim() == 4]
    return min((shape[-1] for shape in shapes if shape[-1] == shape[-2] > 1), default=2**31)


def _frequency_changes(config: Any) -> Iterator[tuple[str, int]]:
    """The kind of scaling and the position at which rotary frequencies change, for each set of rotary parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        if rope.get("rope_type") == "dynamic":
            yield "dynamic", config.max_position_embeddings
        elif rope.get("rope_type") == "longrope":
            yield "longrope", rope["original_max_position_embeddings"]


def _masks_sliding_windows(model: PreTrainedModel) -> bool:
    """Whether the modeling file of the decoder builds sliding-window masks itself, by Transformers' mask functions."""
    module = inspect.getmodule(type(decoder(model)))
    return any(hasattr(module, name) for name in ("create_sliding_window_causal_mask", "create_masks_for_generate"))


def largest_differences(reference: torch.Tensor, logits: torch.Tensor) -> list[float]:
    """Of each row of `[rows, vocab]` the largest difference, in standard deviations of the reference.

    Infinite where an entry is finite in one alone, or is another of NaN, inf and -inf; 0 for a single finite logit.
    """
    reference, logits, finite = reference.float(), logits.float(), reference.isfinite()
    agree = torch.where(finite, logits.isfinite(), reference.nan_to_num() == logits.nan_to_num()).all(dim=-1)
    counts = finite.sum(dim=-1)
    known = reference.where(finite, 0.0)
    from_mean = (known - (known.sum(dim=-1) / counts)[:, None]).where(finite, 0.0)
    deviation = (from_mean.square().sum(dim=-1) / (counts - 1)).sqrt().clamp(min=1e-6)
    largest = (reference - logits).where(finite, 0.0).abs().amax(dim=-1) / deviation
    differences: list[float] = largest.where(counts > 1, 0.0).where(agree, math.inf).tolist()
    return differences


def is_rounding(differences: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether differences of logits at several positions, in standard deviations, are within rounding.

    Wrong positions or masks were off by 0.03 and more on random models of 189 types. In half precision the median
    counts: single positions may differ where a router of experts has a near-tie.
    """
    if dtype in (torch.float32, torch.float64):
        return max(differences) <= 1e-3
    return sorted(differences)[len(differences) // 2] <= 0.1
