"""Shared by the recipes of EAGLE and block heads: settings, new heads, the target's pass, the trained module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from common import option
from corpus import Batch
from distillation import DistillationSettings
from draft_loss import draft_loss
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.targets.model_parts import decoder, decoder_layers


@dataclass(kw_only=True)
class HeadSettings(DistillationSettings):
    """Settings of every head that reads several of the target's hidden states.

    Raises:
        ValueError: for fewer than one anchor or draft token.
    """

    head: str | None = option(default=None, help="folder or Hub id of a head to continue with, instead of a new one")
    taps: list[int] = option(default_factory=list, help="hidden_states of the target to read; none: format's default")
    layers: list[int] = option(default_factory=list, help="a new head's layers: copies of these layers of the target")
    anchors: int = option(default=32, help="positions of each answer from which drafts start in a step, at random")
    depth: int = option(default=5, help="draft tokens that the head learns to propose from each position")
    decay: float = option(default=0.8, help="weight of each draft token's loss relative to the one before")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.anchors, self.depth) < 1:
            raise ValueError(f"anchors and depth must be at least 1, got {self.anchors} and {self.depth}")


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


NEW_WEIGHT_FACTOR = 0.1
"""Factor on the random weights beside copied ones, so that a new head begins close to the copied layer."""
DraftPass = Callable[[BoundHead, Batch, torch.Tensor], Drafts]
"""Drafts from positions of a batch, given the features."""


class HeadTraining(nn.Module):
    """A head as one module whose forward pass is called once per batch, as data-parallel training requires."""

    def __init__(self, head: nn.Module, draft: DraftPass, decay: float):
        super().__init__()
        self.head, self._draft, self._decay = head, draft, decay

    def forward(self, batch: Batch, attached: list[BoundHead], target: PreTrainedModel) -> torch.Tensor:
        """The loss over a batch. The list hides the target from DDP."""
        states = read_target(target, attached[0], batch)
        drafts = self._draft(attached[0], batch, states.features)
        rows = batch["predicts"].nonzero()[:, 0]
        return draft_loss(
            target,
            drafts.states,
            [attached[0].logits] * len(drafts.states),
            states.hidden,
            rows,
            sources=drafts.anchors,
            drafted_ids=attached[0].head.draft_to_target,
            decay=self._decay,
        )


@torch.no_grad()
def read_target(target: PreTrainedModel, attached: BoundHead, batch: Batch) -> TargetPass:
    """One forward pass of the frozen target over whole conversations."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    layers = attached.aux_hidden_state_layers
    # Earlier versions count a list of indices without the embedding.
    captured = list(layers) if Version(transformers.__version__) >= Version("5.23") else True
    output = cast(Any, decoder(target))(**inputs, use_cache=False, output_hidden_states=captured)
    features = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
    return TargetPass(features.to(next(attached.head.parameters())), output.last_hidden_state[batch["predicts"]])


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


def copied_layers(settings: HeadSettings, target: PreTrainedModel) -> list[int]:
    """The layers of the target that a new head starts from; without settings the last one.

    Raises:
        ValueError: if the target has no such layer.
    """
    count = len(decoder_layers(target))
    layers = settings.layers or [count - 1]
    if not all(0 <= layer < count for layer in layers):
        raise ValueError(f"layers must be from 0 to {count - 1}, got {layers}")
    return layers


def initial_tap(taps: Sequence[int], layer: int) -> int:
    """Which of the taps is nearest to the input of a layer, which is `hidden_states[layer]`.

    Example:
        >>> initial_tap((2, 5, 7), 6)
        1
    """
    return min(range(len(taps)), key=lambda place: abs(taps[place] - layer))


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
        hidden_act=config.hidden_act,
        qk_norm=qk_norm,
        max_position_embeddings=config.max_position_embeddings,
        rope=dict(config.rope_parameters),
    )


@torch.no_grad()
def copy_layers(layers: Sequence[nn.Module], target: PreTrainedModel, sources: Sequence[int]) -> None:
    """Start the head's layers as copies of layers of the target, as far as names and shapes are the same.

    In the first layer of EAGLE-3, whose attention reads the token beside the state, the queries' copy reads the token
    and that of keys and values the states; the other halves start small. So a layer that finds where the current token
    stood before (an induction head) does the same in the head.

    Args:
        layers: of the head.
        target: the target.
        sources: for each of them which layer of the target, counted from 0.
    """
    for layer, source in zip(layers, sources, strict=True):
        known = decoder_layers(target)[source].state_dict()
        for name, parameter in layer.named_parameters():
            copied = known.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
            if copied is None or copied.shape[0] != parameter.shape[0]:
                continue
            copied = copied.to(parameter)
            if copied.shape == parameter.shape:
                parameter.copy_(copied)
            else:
                parameter.mul_(NEW_WEIGHT_FACTOR)
                half = slice(None, copied.shape[1]) if "q_proj" in name else slice(-copied.shape[1], None)
                parameter[:, half] = copied


@torch.no_grad()
def start_from_tap(fc: nn.Linear, tap: int) -> None:
    """Start the projection of the features as one of them, with little of the others.

    Args:
        fc: the projection.
        tap: which of the concatenated states.
    """
    width = fc.out_features
    fc.weight.mul_(NEW_WEIGHT_FACTOR)
    fc.weight[:, tap * width : (tap + 1) * width] += torch.eye(width, device=fc.weight.device)
