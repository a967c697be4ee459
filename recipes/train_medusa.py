"""Trains Medusa heads on a target's own answers; the target is frozen.

    accelerate launch recipes/train_medusa.py --preset 8b --target ID --data answers.jsonl --output my-heads

All heads are trained on the hidden states of one forward pass of the target without gradients.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from arguments import Arguments, launch, option
from conversations import IGNORED, Batch
from drafter import Drafter
from hf_specgen.heads.lora import FOLDER, HeadOutputs, load_lora
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.medusa_formats import load_medusa
from hf_specgen.targets.model_parts import output_logits, output_matrix
from losses import Drafts
from target import States
from training import run

SHAPE = ("num_heads", "num_layers", "own_outputs", "reads_token", "reads_path", "lora_rank")


@dataclass(kw_only=True)
class MedusaArguments(Arguments):
    """The heads and their training.

    Raises:
        ValueError: for fewer than one head or layer, or a negative rank.
    """

    heads: str | None = option(default=None, help="folder or Hub id of heads to continue with, instead of new ones")
    num_heads: int = option(default=4, help="of new heads")
    num_layers: int = option(default=1, help="residual blocks in each head")
    own_outputs: bool = option(default=False, help="an output matrix for each head, instead of the target's")
    reads_token: bool = option(default=False, help="the heads also read the token that the target has just generated")
    reads_path: bool = option(default=False, help="each head also reads the draft tokens before its own (Hydra)")
    lora_rank: int = option(default=0, help="of a LoRA matrix for each head on the shared output matrix; 0: none")
    decay: float = option(default=0.8, help="weight of each head's loss relative to the one before")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_heads, self.num_layers) < 1 or self.lora_rank < 0:
            raise ValueError(
                f"num_heads and num_layers must be at least 1 and lora_rank at least 0, got {self.num_heads}, "
                f"{self.num_layers} and {self.lora_rank}"
            )


class MedusaDrafter(Drafter):
    """A set of Medusa heads in training, in float32, which small updates need."""

    recipe, kind = "train_medusa", "Medusa heads"
    args: MedusaArguments

    def __init__(self, args: MedusaArguments, target: PreTrainedModel, rows: Any):
        super().__init__(args, target, rows)
        matrix = output_matrix(target)
        if args.heads is not None:
            self.heads: Any = cast(Any, load_medusa(args.heads, target).float()).to(matrix.weight.device)
        else:
            shape = {name: getattr(args, name) for name in SHAPE}
            self.heads = MedusaHeads.from_target(target, AutoTokenizer.from_pretrained(args.target), **shape)
        self.depth, self.decay, rank = self.heads.config.num_heads, args.decay, self.heads.config.lora_rank
        self.lora: Any = None
        if rank:
            self.lora = load_lora(matrix, self.depth, args.heads) if args.heads else new_lora(matrix, self.depth, rank)
            for name, parameter in self.lora.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.float()
                    parameter.requires_grad_()

    def draft(self, batch: Batch, states: States) -> Drafts:
        tokens = None
        if self.heads.config.reads_token:
            with torch.no_grad():
                tokens = cast(Any, self.target).get_input_embeddings()(following_tokens(batch, self.heads))
        matrices = self._matrices()
        return Drafts(
            [self.heads.head_state(head, states.hidden, tokens) for head in range(self.depth)],
            [partial(output_logits, self.target, matrix=matrix) for matrix in matrices],
            trained=[parameter for matrix in matrices for parameter in matrix.parameters()],
        )

    def _matrices(self) -> list[nn.Module]:
        """The output matrix of each head."""
        if self.heads.config.own_outputs:
            return list(self.heads.lm_heads)
        if self.lora is not None:
            return list(self.lora.base_model.model.heads)
        return [output_matrix(self.target)] * self.depth

    def settings(self, with_tree: bool) -> dict[str, Any]:
        return {"tree": 32 if with_tree else [(0,) * depth for depth in range(1, self.depth + 1)]}

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.heads).to(self.target.dtype).save_pretrained(folder)
        if self.lora is not None:
            self.lora.save_pretrained(folder / FOLDER)


def new_lora(matrix: nn.Linear, num_heads: int, rank: int) -> Any:
    """A `PeftModel` around `HeadOutputs` with new matrices, whose products are zero."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=r"heads\.\d+")
    return get_peft_model(cast(Any, HeadOutputs(matrix, num_heads)), config)


def following_tokens(batch: Batch, heads: MedusaHeads) -> torch.Tensor:
    """`[positions, tokens]` the tokens after each predicting position, as many as the heads read.

    Those beyond the end of a row are arbitrary: no head that reads them has a token to predict.
    """
    read = max(1, heads.config.tokens_read(heads.config.num_heads - 1))
    ids, predicts = batch["input_ids"], batch["labels"] != IGNORED
    return torch.stack([ids.roll(-after, dims=1)[predicts] for after in range(1, read + 1)], dim=1)


main = partial(run, MedusaDrafter, MedusaArguments, __doc__)

if __name__ == "__main__":
    launch(main)
