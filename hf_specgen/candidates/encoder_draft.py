"""Prepares the input of a draft model's prefill: the prompts, and for an encoder-decoder the encoder's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Call, EncoderInput
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.targets.model_parts import reads_encoder

_same_encoders: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, bool]] = WeakKeyDictionary()


def check_pair(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise unless the draft can read what the target reads: both read what an encoder returns, or none does."""
    has_encoder = bool(target.config.is_encoder_decoder)
    if reads_encoder(draft) == has_encoder:
        return
    kinds = ("an encoder-decoder", "a decoder-only model")
    wanted, given = kinds if has_encoder else kinds[::-1]
    names = type(target).__name__, type(draft).__name__
    raise ValueError(f"{names[0]} is {wanted} and the draft {names[1]} {given}; use a draft of the same kind")


def draft_prompt(
    draft: PreTrainedModel, batch: DraftBatch, prompts: list[list[int]]
) -> tuple[torch.Tensor, GenerationConfig, dict[str, Any]]:
    """The prompts as `generate` of the draft would prepare them."""
    call = batch.call
    if not reads_encoder(draft):
        chunk = call.config.prefill_chunk_size
        input_ids, config, arguments = decoder_prompt(draft, prompts, batch.state.max_new_tokens, chunk)
        if compat.supports_logits_to_keep(draft):
            arguments["logits_to_keep"] = 1
        return input_ids, config, arguments
    input_ids, mask = left_padded(prompts, compat.input_device(draft))
    read = call.encoder
    if read is None:
        raise ValueError(
            "a draft that reads the encoder needs the input of the target's encoder; give it to generate() instead of "
            "encoder_outputs"
        )
    if not draft.config.is_encoder_decoder:
        size = read.outputs.last_hidden_state.shape[-1]
        if size != draft.config.hidden_size:
            raise ValueError(
                f"the draft's decoder reads encoder outputs of size {draft.config.hidden_size}, those of the target "
                f"have {size}; use a draft with an encoder of its own"
            )
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        config = GenerationConfig(pad_token_id=0)
        shared = {"encoder_outputs": _moved(read.outputs, draft), compat.CACHE: cache, "use_cache": True}
        return input_ids, config, {"attention_mask": mask, **shared}
    start = int(input_ids[0, 0])
    settings = {"max_new_tokens": 1, "num_beams": 1, "num_return_sequences": 1, "decoder_start_token_id": start}
    given = _encoder_arguments(draft, call, read)
    if not bool(mask.all()):
        given["decoder_attention_mask"] = mask
    moved = {name: _moved(value, draft) for name, value in given.items()}
    return compat.prepared_call(draft, decoder_input_ids=input_ids, **settings, **moved)


def embedding_size(model: PreTrainedModel) -> int:
    """The number of tokens that a model has embeddings for."""
    return int(cast(Any, model.get_input_embeddings()).weight.shape[0])


def decoder_prompt(
    draft: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: float, chunk: int | None = None
) -> tuple[torch.Tensor, GenerationConfig, dict[str, Any]]:
    """The prompts of a decoder-only draft model, its generation config, and the arguments of its forward pass.

    `max_new_tokens` are those of the call, which follow the prompts; a prefill processes `chunk` tokens at a time.
    """
    input_ids, mask = left_padded(prompts, compat.input_device(draft))
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
    longest = input_ids.shape[1] + max_new_tokens  # all tokens of the call after the draft's own prompt
    max_length = int(longest) if isfinite(longest) else None
    return input_ids, GenerationConfig(prefill_chunk_size=chunk, max_length=max_length), arguments


def _encoder_arguments(draft: PreTrainedModel, call: Call, read: EncoderInput) -> dict[str, Any]:
    """What `generate` of the draft receives for its encoder: its input, or the outputs of an equal encoder."""
    if not have_same_encoder(draft, cast(PreTrainedModel, call.model)):
        if draft.main_input_name == "input_ids" and read.values.is_floating_point():
            raise ValueError("the draft's encoder reads token ids; give input_ids to generate(), not inputs_embeds")
        return {**read.arguments, draft.main_input_name: read.values}
    return {**read.arguments, "encoder_outputs": read.outputs}


def _moved(value: Any, draft: PreTrainedModel) -> Any:
    """A tensor, or the tensors of a model's output, on the draft's device and in its dtype."""
    from accelerate.utils import recursively_apply

    device = compat.input_device(draft)
    return recursively_apply(lambda one: one.to(device, draft.dtype if one.is_floating_point() else one.dtype), value)


def have_same_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether both encoders have the same weights, as those of Whisper and Distil-Whisper. Compared once for a pair."""
    known = _same_encoders.setdefault(draft, WeakKeyDictionary())
    if target not in known:
        ours, theirs = (cast(Any, model).get_encoder() for model in (draft, target))
        known[target] = ours is theirs or (
            type(ours) is type(theirs) and _have_equal_tensors(ours.state_dict(), theirs.state_dict())
        )
    return known[target]


def _have_equal_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    our_layout, their_layout = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} for tensors in (ours, theirs)
    )
    if our_layout != their_layout or any(one.device.type == "meta" for one in ours.values()):
        return False
    return all(torch.equal(one, theirs[name].to(one.device)) for name, one in ours.items())


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as `[batch, tokens]` ids, padded on the left with 0 to at least one token, and their mask."""
    width = max(1, *map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
