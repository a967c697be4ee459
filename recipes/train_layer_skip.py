"""Trains an exit adapter, which predicts the target's next token from the hidden state after an early layer.

    accelerate launch recipes/train_layer_skip.py --target ID --exit-layer 8 --data answers.jsonl --output my-exit

An adapter is a copy of the target's final norm and a LoRA matrix on its output matrix (PEFT). The target is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from arguments import Arguments, launch, option, public
from conversations import IGNORED, Batch
from drafter import Drafter, with_lora
from hf_specgen import FixedDepth, LayerSkipCandidates
from hf_specgen.heads.exit_head import ExitHead, save_exit_head
from losses import Drafts
from target import States
from training import run


@dataclass(kw_only=True)
class ExitArguments(Arguments):
    """The exit layer and the size of the adapter."""

    exit_layer: int = option(help="number of the target's layers that run before the exit")
    rank: int = option(default=64, help="of the LoRA matrix")


class ExitDrafter(Drafter):
    """An exit head in training."""

    recipe, kind, library = "train_layer_skip", "an exit adapter", "peft"
    args: ExitArguments

    def __init__(self, args: ExitArguments, target: PreTrainedModel, rows: Any):
        super().__init__(args, target, rows)
        self.layers = (args.exit_layer,)
        size = {"r": args.rank, "lora_alpha": args.rank}
        head = ExitHead.from_target(target, args.exit_layer)
        self.adapter = with_lora(head, size, target_modules=["head"], modules_to_save=["norm"])
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # bfloat16 is too coarse for small updates

    @classmethod
    def check(cls, args: Any, target: PreTrainedModel) -> None:
        """Draft once without an adapter: not every target can run a part of its layers."""
        ExitHead.from_target(target, args.exit_layer)
        if not any(parameter.is_meta for parameter in target.parameters()):
            ids = torch.ones(1, 4, dtype=torch.long, device=target.device)
            candidates = LayerSkipCandidates(args.exit_layer, k=2, policy=FixedDepth())
            call: Any = {"max_new_tokens": 4, "do_sample": False, "candidate_generator": candidates}
            cast(Any, target).generate(ids, attention_mask=torch.ones_like(ids), **call)

    def draft(self, batch: Batch, states: States) -> Drafts:
        chosen = states.features[batch["labels"] != IGNORED]
        trained = [parameter for parameter in self.adapter.parameters() if parameter.requires_grad]
        return Drafts([chosen], [self.adapter], first=0, trained=trained)

    def save(self, folder: Path) -> None:
        self.adapter.to(self.target.dtype)
        save_exit_head(self.adapter, folder, self.target, public(self.args.target))


# `training.run`: arguments, rows and target; ExitDrafter.check and its constructor; draft() for each batch of
# the Trainer; save(); real generations by domain; the model card.
main = partial(run, ExitDrafter, ExitArguments, __doc__)

if __name__ == "__main__":
    launch(main)
