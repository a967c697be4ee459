"""Trains an EAGLE-3 head on a target's own answers, with training-time test; or a P-EAGLE head.

    accelerate launch recipes/train_eagle.py --preset 8b --target ID --data answers.jsonl --output my-head

At the first draft step the head reads the target's hidden states; at each further step its own output of the step
before, as when it drafts, together with the true next token. One pass of step s drafts from all chosen positions of the
answers (`anchors`): position i attends to the keys of the true features up to i, and to its own of the steps 1 to s.

    keys of true features  |  step 1  |  step 2           of position i of 3, at step 2
        x  x  x            |  .  .  x |  .  .  x

A P-EAGLE head (`--parallel true`) drafts all steps in one pass, in which a mask token and a learned state stand for the
tokens and states that are not known yet.

Sources: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025),
section 3.1; P-EAGLE (2026), https://arxiv.org/abs/2602.01469.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from arguments import launch, option
from conversations import Batch
from draft_heads import HeadArguments, HeadDrafter, frequent_tokens, new_layer
from drafter import Anchors, block_mask, choose_anchors, visible_positions
from hf_specgen.heads.base import BoundHead, HeadInputs
from hf_specgen.heads.eagle import Eagle3Head, EagleConfig, eagle_layers
from hf_specgen.targets.model_parts import decoder_layers, output_matrix
from losses import Drafts
from target import States, whole
from training import run


@dataclass(kw_only=True)
class EagleArguments(HeadArguments):
    """The head."""

    draft_vocab_size: int | None = option(default=None, help="the most frequent tokens of the answers; none: all")
    norm_output: bool = option(default=False, help="feed the normalised output to the next step (EAGLE-3.1)")
    fc_norm: bool = option(default=False, help="a norm for each hidden state of the target (EAGLE-3.1)")
    parallel: bool = option(default=False, help="draft all tokens in one pass (P-EAGLE)")
    mask_token_id: int | None = option(default=None, help="P-EAGLE: mask token; none: the last one of the vocabulary")


class EagleDrafter(HeadDrafter):
    """An EAGLE-3 or P-EAGLE head in training.

    Its output matrix consists of rows of the target's and is not trained: a small head learns faster so, and the file
    is complete for every program that serves it.
    """

    recipe, kind, head_class = "train_eagle", "EAGLE-3 head", Eagle3Head
    args: EagleArguments

    def new_config(self, target: PreTrainedModel, rows: Any) -> EagleConfig:
        args, common = self.args, self.common_config(target, eagle_layers(len(decoder_layers(target))))
        mask = common["vocab_size"] - 1 if args.mask_token_id is None else args.mask_token_id
        own = {
            "layer": new_layer(target),
            "num_layers": len(self.sources(target)),
            "draft_vocab_size": min(args.draft_vocab_size or common["vocab_size"], common["vocab_size"]),
            "fc_norm": args.fc_norm,
            "norm_output": args.norm_output,
            "own_lm_head": True,
            "mask_token_id": mask if args.parallel else None,
        }
        return EagleConfig(**common | own)

    def first_state(self, states: Sequence[int], layer: int) -> int:
        """The one nearest to the input of the layer, which is `hidden_states[layer]`."""
        return min(range(len(states)), key=lambda place: abs(states[place] - layer))

    def new_head(self, target: PreTrainedModel, rows: Any) -> Eagle3Head:
        head, matrix = super().new_head(target, rows), whole(output_matrix(target).weight)
        ids = frequent_tokens(rows, head.config.draft_vocab_size, len(matrix))
        head.lm_head.weight.data = matrix[ids].float().clone()
        if head.draft_to_target is not None:
            head.draft_to_target.copy_(ids)
        return cast(Eagle3Head, head)

    def draft(self, batch: Batch, states: States) -> Drafts:
        bound = self.bound()
        anchors = choose_anchors(batch, self.args.anchors, self.step)
        draft = parallel_drafts if self.head.config.mask_token_id is not None else training_time_test
        outputs = draft(bound, batch, states.features.to(self.head.fc.weight.dtype), anchors, self.args.depth)
        logits = [bound.logits] * len(outputs)
        return Drafts(outputs, logits, anchors.numbers, drafted_ids=self.head.draft_to_target)


def training_time_test(
    bound: BoundHead, batch: Batch, features: torch.Tensor, anchors: Anchors, depth: int
) -> list[torch.Tensor]:
    """Draft `depth` tokens from chosen positions; returns for each depth `[anchors, hidden]`."""
    head: Any = bound.head
    cache, (roots, valid, _) = DynamicCache(), anchors
    output, visible = _known_positions(bound, batch, features, cache), visible_positions(batch, roots)
    ids = batch["input_ids"]
    row, length = torch.arange(len(ids), device=ids.device)[:, None], ids.shape[1]
    positions = batch["position_ids"].gather(1, roots)
    hidden, states = output.hidden[row, roots], [output.output[row, roots][valid]]
    own = torch.eye(roots.shape[1], dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
    for step in range(1, depth):
        visible = torch.cat([visible, own], dim=-1)
        tokens = bound.embed(ids[row, (roots + 1 + step).clamp(max=length - 1)])
        hidden, drafted = head(HeadInputs(tokens, hidden, positions + step, visible[:, None]), cache)
        states.append(drafted[valid])
    return states


def parallel_drafts(
    bound: BoundHead, batch: Batch, features: torch.Tensor, anchors: Anchors, depth: int
) -> list[torch.Tensor]:
    """The same for a P-EAGLE head: all mask positions of all anchors in one pass."""
    head: Any = bound.head
    cache, (roots, valid, _) = DynamicCache(), anchors
    output = _known_positions(bound, batch, features, cache)
    (rows, count), masked = roots.shape, depth - 1
    states = [output.output.gather(1, roots[..., None].expand(-1, -1, output.output.shape[-1]))[valid]]
    if not masked:
        return states
    device = roots.device
    first = batch["position_ids"].gather(1, roots)[..., None]
    positions = (first + torch.arange(1, depth, device=device)).flatten(1)
    mask = block_mask(batch, roots, torch.ones(masked, masked, dtype=torch.bool).tril())
    tokens = bound.embed(torch.full((rows, count * masked), head.config.mask_token_id, device=device))
    hidden = head.combine(head.mask_hidden.expand(rows, count * masked, -1))
    output = head(HeadInputs(tokens, hidden, positions, mask), cache)
    drafted = output.output.view(rows, count, masked, -1)[valid]
    return [*states, *drafted.unbind(1)]


def _known_positions(bound: BoundHead, batch: Batch, features: torch.Tensor, cache: DynamicCache) -> Any:
    """The head's pass over all positions."""
    head: Any = bound.head
    ids = batch["input_ids"]
    mask = visible_positions(batch, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))[:, None]
    following = bound.embed(ids.roll(-1, dims=1))
    return head(HeadInputs(following, head.combine(features), batch["position_ids"], mask), cache)


# `training.run`: arguments, rows and target; EagleDrafter.check and its constructor; draft() for each batch of
# the Trainer; save(); real generations by domain; the model card.
main = partial(run, EagleDrafter, EagleArguments, __doc__)

if __name__ == "__main__":
    launch(main)
