"""Trains a block head (DFlash, or JetSpec with `causal: true`) on a target's own answers.

    accelerate launch recipes/train_dflash.py --preset 8b --target ID --data answers.jsonl --output my-head

The head predicts all tokens of a block in one pass: the block begins with the last known token, the anchor, followed by
mask tokens, and attends to the target's hidden states of the positions before the anchor. Anchors are drawn at random
from the answers; a block sees the features before its anchor and itself.

Sources: DFlash (2026), https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedModel

from arguments import launch, option
from conversations import Batch
from draft_heads import HeadArguments, HeadDrafter, copy_layers, new_layer, start_from_state
from drafter import Anchors, choose_anchors, positions_of, same_conversation
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead, block_layers
from hf_specgen.targets.model_parts import output_matrix
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

    def new_head(self, target: PreTrainedModel, rows: Any) -> BlockHead:
        head = BlockHead(BlockConfig(**self.new_config(target)))
        copy_layers(list(head.layers), target, self.sources(target))
        start_from_state(head.fc, head.config.num_aux_hidden_states - 1)
        return head

    def new_config(self, target: PreTrainedModel) -> dict[str, Any]:
        """The fields of the config of a new head."""
        args, layers = self.args, target.config.get_text_config().num_hidden_layers
        vocab, hidden = output_matrix(target).weight.shape
        copied = self.sources(target)
        default = dict.fromkeys(min(max(layer, 1), layers) for layer in block_layers(layers, len(copied)))
        states = tuple(args.aux_hidden_state_layers) or tuple(default)
        return {
            "layer": new_layer(target, qk_norm=True),
            "attention": (BlockAttention(causal=args.causal),) * len(copied),
            "block_size": args.depth + 1,
            "mask_token_id": vocab - 1 if args.mask_token_id is None else args.mask_token_id,
            "hidden_size": hidden,
            "vocab_size": vocab,
            "draft_vocab_size": vocab,
            "target_hidden_size": hidden,
            "num_aux_hidden_states": len(states),
            "aux_hidden_state_layers": states,
            "speculative_tokens": args.depth,
            "base_model": args.target,
            "num_target_layers": layers,
        }

    def draft(self, batch: Batch, states: States) -> Drafts:
        bound, first = self.bound(), self.head.config.first_proposing_position
        anchors = choose_anchors(batch, self.args.anchors, self.step)
        block = block_states(bound, batch, states.features.to(self.head.fc.weight.dtype), anchors)
        outputs = list(block[:, first:].unbind(1))
        return Drafts(outputs, [lambda state, _: bound.logits(state)] * len(outputs), anchors.numbers)


def block_states(bound: BoundHead, batch: Batch, features: torch.Tensor, anchors: Anchors) -> torch.Tensor:
    """Draft a block from chosen positions; returns `[anchors, block, hidden]`."""
    head: Any = bound.head
    config: BlockConfig = head.config
    ids, cache, (roots, valid, _) = batch["input_ids"], DynamicCache(), anchors
    head.extend(features, positions_of(batch), cache)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    offsets = torch.arange(config.block_size, device=ids.device)
    first = ids[row, (roots + 1).clamp(max=ids.shape[1] - 1)]
    tokens = torch.where(offsets == 0, first[..., None], config.mask_token_id)  # [batch, anchors, block]
    positions = positions_of(batch).gather(1, roots)[..., None] + 1 + offsets
    masks = {kind: _training_mask(kind, batch, roots, config.block_size) for kind in set(config.attention)}
    states = bound.embed(tokens.flatten(1))
    rotary = head.rotary(states, positions.flatten(1))
    for layer, kind in zip(head.layers, config.attention, strict=True):
        states = layer(states, rotary, masks[kind], cache)
    return head.norm(states).view(*tokens.shape, -1)[valid]


def _training_mask(kind: BlockAttention, batch: Batch, roots: torch.Tensor, block: int) -> torch.Tensor:
    """`[batch, 1, anchors * block, length + anchors * block]`: a block sees itself and what precedes its anchor."""
    if kind.window is not None:
        raise ValueError("training heads with sliding windows is not supported; continue with a head without them")
    length, count = batch["input_ids"].shape[1], roots.shape[1]
    context = torch.arange(length, device=roots.device) <= roots[..., None]
    if (together := same_conversation(batch)) is not None:
        context = context & together.gather(1, roots[..., None].expand(-1, -1, length))
    inside = torch.ones(block, block, dtype=torch.bool, device=roots.device)
    own = torch.block_diag(*[inside.tril() if kind.causal else inside] * count).bool().to(roots.device)
    return torch.cat([context.repeat_interleave(block, dim=1), own.expand(len(roots), -1, -1)], dim=-1)[:, None]


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    run(BlockDrafter, BlockArguments, __doc__, arguments)


if __name__ == "__main__":
    launch(main)
