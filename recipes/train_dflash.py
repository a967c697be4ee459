"""Trains a block head (DFlash, or JetSpec with `causal: true`) on a target's own answers.

    accelerate launch recipes/train_dflash.py --config recipes/configs/dflash_reference.yaml

The head predicts all tokens of a block in one pass: the block begins with the last known token, the anchor, followed by
mask tokens, and attends to the target's hidden states of the positions before the anchor. Anchors are drawn at random
from the answers; a block sees the features before its anchor and itself.

Sources: DFlash (2026), https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from common import option, parse_config
from corpus import Batch
from head_saving import run
from head_training import (
    Drafts,
    HeadSettings,
    choose_anchors,
    copied_layers,
    copy_layers,
    new_layer,
    start_from_tap,
)
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead, block_layers
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets.model_parts import output_matrix


@dataclass(kw_only=True)
class Settings(HeadSettings):
    """The head and its training; `depth` is the number of mask tokens of a block."""

    causal: bool = option(default=False, help="attend only backwards inside the block (JetSpec)")
    mask_token_id: int | None = option(default=None, help="token of the masks; none: the last one of the vocabulary")


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    settings = parse_config(Settings, __doc__, arguments)

    def draft(attached: BoundHead, batch: Batch, features: torch.Tensor) -> Drafts:
        return block_drafts(attached, batch, features, settings.anchors)

    run(settings, "train_dflash", make_head, draft)


def make_head(settings: Settings, target: PreTrainedModel, rows: Any) -> BlockHead:
    """A new head in float32, or the one to continue with."""
    if settings.head is not None:
        loaded = load_head(settings.head, dtype=torch.float32)
        if not isinstance(loaded, BlockHead):
            raise ValueError(f"{settings.head!r} is a {type(loaded).__name__}, not a block head")
        head = loaded
    else:
        head = _new_head(settings, target)
    return head.requires_grad_(True).to(output_matrix(target).weight.device).train()


def _new_head(settings: Settings, target: PreTrainedModel) -> BlockHead:
    layers, matrix = target.config.get_text_config().num_hidden_layers, output_matrix(target).weight
    copied = copied_layers(settings, target)
    taps = tuple(settings.taps) or block_layers(layers, len(copied))
    mask = len(matrix) - 1 if settings.mask_token_id is None else settings.mask_token_id
    config = BlockConfig(
        layer=new_layer(target, qk_norm=True),
        attention=(BlockAttention(causal=settings.causal),) * len(copied),
        block_size=settings.depth + 1,
        mask_token_id=mask,
        hidden_size=matrix.shape[1],
        vocab_size=len(matrix),
        draft_vocab_size=len(matrix),
        target_hidden_size=matrix.shape[1],
        num_aux_hidden_states=len(taps),
        aux_hidden_state_layers=taps,
        speculative_tokens=settings.depth,
        base_model=settings.target,
        num_target_layers=layers,
    )
    head = BlockHead(config)
    copy_layers(list(head.layers), target, copied)
    start_from_tap(head.fc, len(taps) - 1)
    return head


def block_drafts(attached: BoundHead, batch: Batch, features: torch.Tensor, anchors: int) -> Drafts:
    """Draft a block from random positions of each answer.

    Args:
        attached: the head on its target.
        batch: as from `collate`.
        features: `[batch, length, taps * hidden]`.
        anchors: blocks of a row at most.
    """
    head: Any = attached.head
    config: BlockConfig = head.config
    ids, cache = batch["input_ids"], DynamicCache()
    count, length = ids.shape
    slots = torch.arange(length, device=ids.device)
    head.extend(features, slots.expand(count, -1), cache)
    row = torch.arange(count, device=ids.device)[:, None]
    roots, valid, numbers = choose_anchors(batch["predicts"], anchors)
    places = roots[..., None] + 1 + torch.arange(config.block_size, device=ids.device)  # [batch, anchors, block]
    tokens = ids[row[..., None], places.clamp(max=length - 1)]
    offsets = torch.arange(config.block_size, device=ids.device)
    tokens = torch.where(offsets == 0, tokens, config.mask_token_id)
    masks = {kind: _training_mask(kind, roots, length, config.block_size) for kind in set(config.attention)}
    states = attached.embed(tokens.flatten(1))
    rotary = head.rotary(states, places.flatten(1))
    for layer, kind in zip(head.layers, config.attention, strict=True):
        states = layer(states, rotary, masks[kind], cache)
    output = head.norm(states).view(*tokens.shape, -1)[valid]  # [sources, block, hidden]
    return Drafts(list(output[:, config.first_proposing_position :].unbind(1)), numbers)


def _training_mask(kind: BlockAttention, roots: torch.Tensor, length: int, block: int) -> torch.Tensor:
    """`[batch, 1, anchors * block, length + anchors * block]`: a block sees itself and what precedes its anchor."""
    if kind.window is not None:
        raise ValueError("training heads with sliding windows is not supported; continue with a head without them")
    count = roots.shape[1]
    context = (torch.arange(length, device=roots.device) <= roots[..., None]).repeat_interleave(block, dim=1)
    inside = torch.ones(block, block, dtype=torch.bool, device=roots.device)
    own = torch.block_diag(*[inside.tril() if kind.causal else inside] * count).bool().to(roots.device)
    return torch.cat([context, own.expand(len(roots), -1, -1)], dim=-1)[:, None]


if __name__ == "__main__":
    main()
