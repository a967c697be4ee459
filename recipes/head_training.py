"""What the recipes of EAGLE and block heads share: settings, new heads, the target's pass, what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from common import option
from corpus import Batch
from distillation import DistillationSettings
from draft_loss import draft_loss
from hf_specgen.heads.base import AttachedHead
from hf_specgen.heads.layers import DecoderLayer, LayerConfig
from hf_specgen.target.model_parts import decoder, decoder_layers


@dataclass(kw_only=True)
class HeadSettings(DistillationSettings):
    """Settings of every head that reads several of the target's hidden states.

    Raises:
        ValueError: for fewer than one layer, anchor or draft token.
    """

    head: str | None = option(default=None, help="folder or Hub id of a head to continue with, instead of a new one")
    taps: list[int] = option(default_factory=list, help="hidden_states of the target to read; none: format's default")
    num_layers: int = option(default=1, help="decoder layers of a new head")
    anchors: int = option(default=32, help="positions of each answer from which drafts start in a step, at random")
    depth: int = option(default=5, help="draft tokens that the head learns to propose from each position")
    decay: float = option(default=0.8, help="weight of each draft token's loss relative to the one before")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_layers, self.anchors, self.depth) < 1:
            raise ValueError(
                f"num_layers, anchors and depth must be at least 1, got {self.num_layers}, {self.anchors} and "
                f"{self.depth}"
            )


class TargetPass(NamedTuple):
    """What one forward pass of the frozen target gives.

    Args:
        features: `[batch, length, taps * hidden]` the hidden states that the head reads.
        hidden: `[positions, hidden]` inputs of the output matrix at the predicting positions.
    """

    features: torch.Tensor
    hidden: torch.Tensor


class Drafts(NamedTuple):
    """What a head drafts in one training pass.

    Args:
        states: for each depth `[anchors, hidden]` inputs of the output matrix.
        anchors: `[anchors]` which of the predicting positions these are drafted from.
    """

    states: list[torch.Tensor]
    anchors: torch.Tensor


class Anchors(NamedTuple):
    """The positions to draft from.

    Args:
        places: `[batch, anchors]` positions in ascending order.
        valid: `[batch, anchors]` which of them are no padding.
        numbers: `[valid anchors]` their numbers among all predicting positions of the batch.
    """

    places: torch.Tensor
    valid: torch.Tensor
    numbers: torch.Tensor


DraftPass = Callable[[AttachedHead, Batch, torch.Tensor], Drafts]
"""Drafts from positions of a batch, given the features."""


class HeadTraining(nn.Module):
    """A head as one module whose forward pass is called once per batch, as data-parallel training requires."""

    def __init__(self, head: nn.Module, draft: DraftPass, decay: float):
        super().__init__()
        self.head, self._draft, self._decay = head, draft, decay

    def forward(self, batch: Batch, attached: list[AttachedHead], target: PreTrainedModel) -> torch.Tensor:
        """The loss over a batch. The list hides the target from DDP."""
        states = read_target(target, attached[0], batch)
        drafts = self._draft(attached[0], batch, states.features)
        rows = batch["predicts"].nonzero()[:, 0]
        ids = getattr(self.head, "draft_to_target", None)
        logits = [attached[0].logits] * len(drafts.states)
        return draft_loss(
            target, drafts.states, logits, states.hidden, rows,
            sources=drafts.anchors, drafted_ids=ids, decay=self._decay,
        )  # fmt: skip


@torch.no_grad()
def read_target(target: PreTrainedModel, attached: AttachedHead, batch: Batch) -> TargetPass:
    """One forward pass of the frozen target over whole conversations."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = cast(Any, decoder(target))(**inputs, use_cache=False, **attached.capture_arguments)
    return TargetPass(attached.features(output.hidden_states), output.last_hidden_state[batch["predicts"]])


def choose_anchors(predicts: torch.Tensor, most: int) -> Anchors:
    """Random positions of each answer.

    Args:
        predicts: `[batch, length]` bool, as from `collate`.
        most: positions of a row at most.

    Example:
        >>> choose_anchors(torch.tensor([[False, True, True], [True, False, False]]), 2).places
        tensor([[1, 2],
                [0, 2]])
    """
    length = predicts.shape[1]
    order = (predicts * (1 + torch.rand(predicts.shape, device=predicts.device))).argsort(dim=1, descending=True)
    chosen = order[:, : min(most, int(predicts.sum(dim=1).max()))]
    places = torch.where(predicts.gather(1, chosen), chosen, length).sort(dim=1).values
    valid = places < length
    places = places.clamp(max=length - 1)
    numbers = predicts.flatten().cumsum(0).view_as(predicts) - 1
    return Anchors(places, valid, numbers.gather(1, places)[valid])


def new_layer(target: PreTrainedModel, *, qk_norm: bool = False) -> LayerConfig:
    """A layer of the target's own sizes."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    return LayerConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        qk_norm=qk_norm,
        max_position_embeddings=config.max_position_embeddings,
        rope=dict(config.rope_parameters),
    )


@torch.no_grad()
def copy_last_layers(layers: Sequence[nn.Module], target: PreTrainedModel) -> None:
    """Start the head's layers as copies of the target's last ones, as far as the names and shapes are the same.

    A matrix that reads a wider input, as in the first layer of EAGLE-3, gets the copy in its last columns.
    """
    for layer, source in zip(layers, list(decoder_layers(target))[-len(layers) :], strict=True):
        assert isinstance(layer, DecoderLayer)
        known = source.state_dict()
        for name, parameter in layer.named_parameters():
            copied = known.get(name)
            if copied is not None and copied.shape[0] == parameter.shape[0]:
                parameter[..., -copied.shape[-1] :] = copied.to(parameter)


@torch.no_grad()
def start_from_last_tap(fc: nn.Linear, width: int) -> None:
    """Start the projection of the features as the last of them, with little of the others."""
    fc.weight.mul_(0.1)
    fc.weight[:, -width:] += torch.eye(fc.out_features, width)
