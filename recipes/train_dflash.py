"""Trains a block head (DFlash, or JetSpec with `causal: true`) on a target's own answers.

    accelerate launch recipes/train_dflash.py --preset 8b --target ID --data answers.jsonl --output my-head

The head predicts all tokens of a block in one pass: the block begins with the last known token, the anchor, followed by
mask tokens, and attends to the target's hidden states of the positions before the anchor. Anchors are drawn at random
from the answers; a block sees the features before its anchor and itself.

Sources: DFlash (2026), https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedModel

from arguments import launch, option
from conversations import Batch
from draft_heads import HeadArguments, HeadDrafter, new_layer
from drafter import Anchors, block_mask, choose_anchors
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead, block_layers
from hf_specgen.targets.model_parts import decoder_layers
from losses import Drafts
from target import States
from training import run


@dataclass(kw_only=True)
class BlockArguments(HeadArguments):
    """The head; `depth` is the number of mask tokens of a block."""

    causal: bool = option(default=False, help="attend only backwards inside the block (JetSpec)")
    mask_token_id: int | None = option(default=None, help="token of the masks; none: the last one of the vocabulary")


class BlockDrafter(HeadDrafter):
    """A block head in training."""

    recipe, kind = "train_dflash", "block head (DFlash)"
    head_class: ClassVar[type[BlockHead]] = BlockHead
    args: BlockArguments

    def new_config(self, target: PreTrainedModel, rows: Any) -> BlockConfig:
        args, copied = self.args, self.sources(target)
        common = self.common_config(target, block_layers(len(decoder_layers(target)), len(copied)))
        own = {
            "layer": new_layer(target, qk_norm=True),
            "attention": (BlockAttention(causal=args.causal),) * len(copied),
            "block_size": args.depth + 1,
            "mask_token_id": common["vocab_size"] - 1 if args.mask_token_id is None else args.mask_token_id,
        }
        return BlockConfig(**common | own)

    def draft(self, batch: Batch, states: States) -> Drafts:
        bound, first = self.bound(), self.head.config.first_proposing_position
        anchors = choose_anchors(batch, self.args.anchors, self.step)
        block = block_states(bound, batch, states.features.to(self.head.fc.weight.dtype), anchors)
        outputs = list(block[:, first:].unbind(1))
        return Drafts(outputs, [bound.logits] * len(outputs), anchors.numbers)


def block_states(bound: BoundHead, batch: Batch, features: torch.Tensor, anchors: Anchors) -> torch.Tensor:
    """Draft a block from chosen positions; returns `[anchors, block, hidden]`."""
    head: Any = bound.head
    config: BlockConfig = head.config
    ids, cache, (roots, valid, _) = batch["input_ids"], DynamicCache(), anchors
    head.extend(features, batch["position_ids"], cache)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    offsets = torch.arange(config.block_size, device=ids.device)
    first = ids[row, (roots + 1).clamp(max=ids.shape[1] - 1)]
    tokens = torch.where(offsets == 0, first[..., None], config.mask_token_id)  # [batch, anchors, block]
    positions = batch["position_ids"].gather(1, roots)[..., None] + 1 + offsets
    masks = {kind: _training_mask(kind, batch, roots, config.block_size) for kind in set(config.attention)}
    states = bound.embed(tokens.flatten(1))
    rotary = head.rotary(states, positions.flatten(1))
    for layer, kind in zip(head.layers, config.attention, strict=True):
        states = layer(states, rotary, masks[kind], cache)
    return head.norm(states).view(*tokens.shape, -1)[valid]


def _training_mask(kind: BlockAttention, batch: Batch, roots: torch.Tensor, block: int) -> torch.Tensor:
    """The mask of a kind of attention, as `block_mask`."""
    if kind.window is not None:
        raise ValueError("training heads with sliding windows is not supported; continue with a head without them")
    inside = torch.ones(block, block, dtype=torch.bool)
    return block_mask(batch, roots, inside.tril() if kind.causal else inside)


# `training.run`: arguments, rows and target; BlockDrafter.check and its constructor; draft() for each batch of
# the Trainer; save(); real generations by domain; the model card.
main = partial(run, BlockDrafter, BlockArguments, __doc__)

if __name__ == "__main__":
    launch(main)
