"""What the recipes have in common as modules: a drafter as `Trainer` trains it, and the choice of positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from conversations import IGNORED, Batch
from hf_specgen.heads.checkpoint import check_plain_lora, named_errors
from losses import Drafts, TrainingPositions, acceptance_counts, draft_loss
from target import States, read_target


class Drafter(nn.Module):
    """A drafter as the module that `Trainer` trains; a recipe adds what is drafted and how it is saved.

    The target is no part of it: it is neither trained, nor saved, nor wrapped for several processes.
    """

    accepts_loss_kwargs = True  # `Trainer` passes `num_items_in_batch`
    target: PreTrainedModel
    recipe: ClassVar[str]  # name of the script
    kind: ClassVar[str]  # what the drafter is, for the card
    library: str = "hf-specgen"  # of the card, for the code that the Hub shows
    layers: Sequence[int] = ()  # indices of the target's `hidden_states` that are read
    copied: Sequence[int] = ()  # layers of the target that the drafter starts from
    depth: int = 4  # draft tokens whose acceptance is counted in the evaluation

    def __init__(self, args: Any, target: PreTrainedModel, rows: Any):
        super().__init__()
        self.args, self.step = args, 0
        self.use_target(target)

    def use_target(self, target: PreTrainedModel) -> None:
        """Use this copy of the target, such as one without layers; as an attribute that is no submodule."""
        self.__dict__["target"] = target

    @classmethod
    def check(cls, args: Any, target: PreTrainedModel) -> None:
        """Raise a `ValueError` for a target that this drafter cannot have; called before any data are read."""

    @abstractmethod
    def draft(self, batch: Batch, states: States) -> Drafts:
        """What is drafted from a batch."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the result, with which `AutoCandidates.from_pretrained(folder)` drafts."""

    def settings(self, with_tree: bool) -> dict[str, Any]:
        """Settings of the candidate generator in the evaluation."""
        return {"k": self.depth, "tree": 32 if with_tree else None}

    def activation_checkpointing_enable(self, **settings: Any) -> None:
        """Recompute activations in the backward pass, in a whole model that is trained."""
        models: list[Any] = [module for module in self.modules() if isinstance(module, PreTrainedModel)]
        if not models or not models[0].supports_gradient_checkpointing:
            raise ValueError("activation checkpointing is for whole models that are trained; a head has a few layers")
        name = "activation_checkpointing_enable"
        getattr(models[0], name if hasattr(models[0], name) else "gradient_checkpointing_enable")(**settings)

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name before Transformers 5.23

    def trained(self, state: dict[str, Any]) -> dict[str, Any]:
        """The entries of a state dict that are trained."""
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in state.items() if name in names}

    def states(self, batch: Batch) -> States:
        """The target's states: those in the batch, or computed now."""
        if "hidden" in batch:
            return States(batch["features"], batch["hidden"])
        with torch.no_grad():
            return read_target(self.target, batch, self.layers)

    def forward(
        self, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None, **inputs: Any
    ) -> dict[str, torch.Tensor]:
        """The loss per predicted token; in evaluation mode also the counts of `acceptance_counts`."""
        batch = {"labels": labels, **inputs}
        states, predicts = self.states(batch), labels != IGNORED
        drafts = self.draft(batch, states)
        positions = TrainingPositions(states.hidden, labels[predicts], answer_numbers(batch))
        loss = draft_loss(self.target, drafts, positions, self.args.loss, self.args.decay)
        count = predicts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        result = {"loss": loss / count}
        if not self.training:
            rows = predicts.nonzero()[:, 0]
            counts = acceptance_counts(self.target, drafts, positions, rows, self.depth)
            missing = len(labels) - len(counts)  # rows without predictions at the end
            result["counts"] = torch.cat([counts, counts.new_zeros(missing, *counts.shape[1:])])
        return result


def with_lora(model: Any, fields: Mapping[str, Any], **more: Any) -> Any:
    """The `PeftModel` around a model, with LoRA matrices; `fields` of its config replace the recipe's.

    `ValueError` for a head if hf_specgen would not load the adapter.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 16, "lora_alpha": 32, **more, **fields})
    if not isinstance(model, PreTrainedModel):  # PEFT loads the adapters of models
        with named_errors("lora"):
            check_plain_lora(config.to_dict())
    return get_peft_model(model, config)


def answer_numbers(batch: Batch) -> torch.Tensor:
    """`[positions]` number of the answer of each predicting position: a run of them in one conversation.

    Example:
        >>> answer_numbers({"labels": torch.tensor([[-100, 5, 6, -100, 7], [8, 9, -100, -100, -100]])})
        tensor([1, 1, 2, 3, 3])
    """
    predicts = batch["labels"] != IGNORED
    before = torch.cat([torch.zeros_like(predicts[:, :1]), predicts[:, :-1]], dim=1)
    return (predicts & ~before).flatten().cumsum(0)[predicts.flatten()]


class Anchors(NamedTuple):
    """The positions to draft from."""

    places: torch.Tensor  # [batch, anchors], in ascending order
    valid: torch.Tensor  # [batch, anchors], which of them are no padding
    numbers: torch.Tensor  # [valid anchors], among all predicting positions of the batch


def choose_anchors(batch: Batch, most: int, step: int) -> Anchors:
    """Random predicting positions of each row.

    They depend on the row's tokens and the step alone: a run draws the same with any number of processes, and after it
    was resumed.
    """
    predicts = batch["labels"] != IGNORED
    length = predicts.shape[1]
    keys = (batch["labels"].clamp(min=0) * torch.arange(1, length + 1, device=predicts.device)).sum(dim=1).tolist()
    seeds = [hash((step, key)) % 2**63 for key in keys]
    noise = torch.stack([torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    order = (predicts * (1 + noise.to(predicts.device))).argsort(dim=1, descending=True)
    chosen = order[:, : min(most, int(predicts.sum(dim=1).max()))]
    places = torch.where(predicts.gather(1, chosen), chosen, length).sort(dim=1).values
    valid = places < length
    places = places.clamp(max=length - 1)
    numbers = predicts.flatten().cumsum(0).view_as(predicts) - 1
    return Anchors(places, valid, numbers.gather(1, places)[valid])


def visible_positions(batch: Batch, roots: torch.Tensor) -> torch.Tensor:
    """`[batch, anchors, length]` the positions of its conversation up to each anchor."""
    conversations = (batch["position_ids"] == 0).cumsum(dim=1)  # their numbers
    known = torch.arange(conversations.shape[1], device=roots.device) <= roots[..., None]
    return known & (conversations[:, None] == conversations.gather(1, roots)[..., None])


def block_mask(batch: Batch, roots: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """`[batch, 1, anchors * block, length + anchors * block]`: a block sees what its anchor does, and itself."""
    context = visible_positions(batch, roots).repeat_interleave(len(inside), dim=1)
    own = torch.block_diag(*[inside] * roots.shape[1]).bool().to(roots.device)
    return torch.cat([context, own.expand(len(roots), -1, -1)], dim=-1)[:, None]
