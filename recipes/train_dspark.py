"""Trains a DSpark head: a block head whose logits are corrected by the token before, with a confidence head.

    accelerate launch recipes/train_dspark.py --preset 8b --target ID --data answers.jsonl --output my-head

The block begins with the last known token and drafts one token at each of its positions (`sample_from_anchor`). In
training the true tokens before each position are given to the correction. The confidence head learns how much q and p
overlap, without a gradient for q.

Source: DSpark (2026), as deepseek-ai/DeepSpec trains it: 0.1 cross-entropy, 0.9 sum_v abs(p - q) = 1.8 TV, 1.0 binary
cross-entropy of the confidence, each weighted by exp(-depth / 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from arguments import launch, option
from conversations import Batch
from drafter import choose_anchors
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockConfig, BlockHead
from hf_specgen.heads.dspark import DSparkConfig, DSparkHead
from losses import Drafts
from target import States
from train_dflash import BlockArguments, BlockDrafter, block_states
from training import run


@dataclass(kw_only=True)
class SparkArguments(BlockArguments):
    """The head; `depth` is the number of positions of a block."""

    markov_rank: int = option(default=256, help="of the correction by the token before")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = option(default="vanilla", help="kind of the correction")


class SparkDrafter(BlockDrafter):
    """A DSpark head in training."""

    recipe, kind, head_class = "train_dspark", "DSpark head", DSparkHead
    args: SparkArguments

    def new_config(self, target: PreTrainedModel, rows: Any) -> DSparkConfig:
        block = replace(super().new_config(target, rows), block_size=self.args.depth, first_proposing_position=0)
        return self.with_correction(block)

    def with_correction(self, block: BlockConfig) -> DSparkConfig:
        """The config of a block head, with a correction by the token before."""
        kinds = {"markov_rank": self.args.markov_rank, "markov_head_type": self.args.markov_head_type}
        return DSparkConfig(**{**vars(block), **kinds})

    def new_head(self, target: PreTrainedModel, rows: Any) -> DSparkHead:
        return _without_correction(super().new_head(target, rows))

    def loaded_head(self, name: str) -> DraftHead:
        """A DSpark head, or one that begins as a DFlash head, in the layout of that head."""
        head = super().loaded_head(name)
        if type(head) is not BlockHead:
            return head
        spark = _without_correction(DSparkHead(self.with_correction(head.config)))
        spark.load_state_dict(head.state_dict(), strict=False)
        return spark

    def draft(self, batch: Batch, states: States) -> Drafts:
        bound, head, ids = self.bound(), self.head, batch["input_ids"]
        anchors = choose_anchors(batch, self.args.anchors, self.step)
        block = block_states(bound, batch, states.features.to(head.fc.weight.dtype), anchors)
        row = torch.arange(len(ids), device=ids.device)[:, None].expand_as(anchors.places)[anchors.valid]
        place, first = anchors.places[anchors.valid] + 1, head.config.first_proposing_position
        tokens = [ids[row, (place + depth).clamp(max=ids.shape[1] - 1)] for depth in range(block.shape[1] - first)]
        state, outputs = head.first_state(block, tokens[0], bound.embed, first), []
        for depth, before in enumerate(tokens):
            hidden = block[:, first + depth]
            query, state = head.step(hidden, before, state, depth, bound.embed)
            confidence = head.confidence_logits(hidden.detach(), before)
            outputs.append(torch.cat([hidden, query, confidence[:, None]], dim=-1))
        width = block.shape[-1]

        def logits(state: torch.Tensor) -> torch.Tensor:
            return bound.logits(state[:, :width]) + state[:, width:-1] @ head.keys().T

        count, trained = len(outputs), [head.keys()]
        return Drafts(
            outputs, [logits] * count, anchors.numbers, trained=trained, confidence=lambda state: state[:, -1]
        )


@torch.no_grad()
def _without_correction(head: DSparkHead) -> DSparkHead:
    """A new head, which first drafts as if it had no correction."""
    if head.markov_head is not None:
        nn.init.normal_(head.markov_head.markov_w1.weight, std=0.02)
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    return head


# `training.run`: arguments, rows and target; SparkDrafter.check and its constructor; draft() for each batch of
# the Trainer; save(); real generations by domain; the model card.
main = partial(run, SparkDrafter, SparkArguments, __doc__)

if __name__ == "__main__":
    launch(main)
