"""Trains an EAGLE-3 head on a target's own answers, with training-time test.

    accelerate launch recipes/train_eagle.py --config recipes/configs/eagle_reference.yaml

At the first draft step the head reads the target's hidden states; at each further step its own output of the step
before, as when it drafts, together with the true next token. One pass of step s drafts from all chosen positions of the
answers (`anchors`): position i attends to the keys of the true features up to i, and to its own of the steps 1 to s.

    keys of true features  |  step 1  |  step 2           of position i of 3, at step 2
        x  x  x            |  .  .  x |  .  .  x

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025),
section 3.1.
"""

from __future__ import annotations

from collections import Counter
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
    initial_tap,
    new_layer,
    start_from_tap,
)
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.eagle import Eagle3Head, EagleConfig, eagle_layers
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets.model_parts import output_matrix


@dataclass(kw_only=True)
class Settings(HeadSettings):
    """The head and its training."""

    draft_vocab_size: int | None = option(default=None, help="the most frequent tokens of the answers; none: all")
    norm_output: bool = option(default=False, help="feed the normalised output to the next step (EAGLE-3.1)")
    fc_norm: bool = option(default=False, help="a norm for each hidden state of the target (EAGLE-3.1)")


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    settings = parse_config(Settings, __doc__, arguments)

    def draft(attached: BoundHead, batch: Batch, features: torch.Tensor) -> Drafts:
        return training_time_test(attached, batch, features, settings.anchors, settings.depth)

    run(settings, "train_eagle", make_head, draft)


def make_head(settings: Settings, target: PreTrainedModel, rows: Any) -> Eagle3Head:
    """A new head in float32, or the one to continue with.

    Its output matrix consists of rows of the target's and is not trained: a small head learns faster so, and the file
    is complete for every program that serves it.
    """
    if settings.head is not None:
        loaded = load_head(settings.head, dtype=torch.float32)
        if not isinstance(loaded, Eagle3Head):
            raise ValueError(f"{settings.head!r} is a {type(loaded).__name__}, not an EAGLE-3 head")
        head = loaded
    else:
        head = _new_head(settings, target, rows)
    head.requires_grad_(True)
    if head.lm_head is not None:
        head.lm_head.requires_grad_(False)
    return head.to(output_matrix(target).weight.device).train()


def _new_head(settings: Settings, target: PreTrainedModel, rows: Any) -> Eagle3Head:
    layers, matrix = target.config.get_text_config().num_hidden_layers, output_matrix(target).weight
    taps, copied = tuple(settings.taps) or eagle_layers(layers), copied_layers(settings, target)
    ids = frequent_tokens(rows, settings.draft_vocab_size or len(matrix), len(matrix))
    config = EagleConfig(
        layer=new_layer(target),
        num_layers=len(copied),
        hidden_size=matrix.shape[1],
        vocab_size=len(matrix),
        draft_vocab_size=len(ids),
        target_hidden_size=matrix.shape[1],
        num_aux_hidden_states=len(taps),
        aux_hidden_state_layers=taps,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        own_lm_head=True,
        speculative_tokens=settings.depth,
        base_model=settings.target,
        num_target_layers=layers,
    )
    head = Eagle3Head(config)
    copy_layers(list(head.layers), target, copied)
    start_from_tap(head.fc, initial_tap(taps, copied[0]))
    assert isinstance(head.lm_head, torch.nn.Linear)
    head.lm_head.weight.data = matrix[ids].float().clone()
    if head.draft_to_target is not None:
        head.draft_to_target.copy_(ids)
    return head


def frequent_tokens(rows: Any, count: int, vocab: int) -> torch.Tensor:
    """`[count]` ids of the most frequent tokens of the answers, in ascending order.

    Args:
        rows: encoded conversations.
        count: how many.
        vocab: size of the vocabulary; unseen tokens follow in the order of their ids.
    """
    if count >= vocab:
        return torch.arange(vocab)
    seen = Counter(dict.fromkeys(range(vocab), 0))
    for row in rows:
        seen.update(row["input_ids"][row["answer_start"] :])
    return torch.tensor(sorted(token for token, _ in seen.most_common(count)))


def training_time_test(attached: BoundHead, batch: Batch, features: torch.Tensor, anchors: int, depth: int) -> Drafts:
    """Draft `depth` tokens from random positions of each answer.

    Args:
        attached: the head on its target.
        batch: as from `collate`.
        features: `[batch, length, taps * hidden]`.
        anchors: positions of a row at most.
        depth: draft steps.
    """
    head: Any = attached.head
    ids, cache = batch["input_ids"], DynamicCache()
    count, length = ids.shape
    slots = torch.arange(length, device=ids.device)
    following = attached.embed(ids.roll(-1, dims=1))
    output = head(following, head.combine(features), slots.expand(count, -1), None, cache)
    row = torch.arange(count, device=ids.device)[:, None]
    roots, valid, numbers = choose_anchors(batch["predicts"], anchors)
    hidden, states = output.hidden[row, roots], [output.output[row, roots][valid]]
    visible = slots <= roots[..., None]
    own = torch.eye(roots.shape[1], dtype=torch.bool, device=ids.device).expand(count, -1, -1)
    for step in range(1, depth):
        visible = torch.cat([visible, own], dim=-1)
        tokens = attached.embed(ids[row, (roots + 1 + step).clamp(max=length - 1)])
        hidden, drafted = head(tokens, hidden, roots + step, visible[:, None], cache)
        states.append(drafted[valid])
    return Drafts(states, numbers)


if __name__ == "__main__":
    main()
