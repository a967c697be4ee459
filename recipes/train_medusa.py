"""Trains Medusa heads on a target's own answers; the target is frozen.

    accelerate launch recipes/train_medusa.py --preset 8b --target ID --data answers.jsonl --output my-heads

All heads are trained on the hidden states of one forward pass of the target without gradients.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from arguments import Arguments, launch, option, public
from conversations import IGNORED, Batch
from draft_heads import frequent_tokens
from drafter import Drafter
from hf_specgen.heads import MedusaHeads, load_head, save_head
from hf_specgen.targets.model_parts import output_logits, output_matrix
from losses import Drafts, rows_of_matrix
from target import States
from training import run

SHAPE = ("num_heads", "num_layers", "own_outputs", "reads_path", "lora_rank")
OUTPUTS = ("lm_heads.", "lora_")
"""Parameters that make logits from the heads' states."""


@dataclass(kw_only=True)
class MedusaArguments(Arguments):
    """The heads."""

    heads: str | None = option(default=None, help="folder or Hub id of heads to continue with, instead of new ones")
    num_heads: int = option(default=4, help="of new heads")
    num_layers: int = option(default=1, help="residual blocks in each head")
    own_outputs: bool = option(default=False, help="an output matrix for each head, instead of the target's")
    reads_path: bool = option(default=False, help="each head also reads the tokens before its own (Hydra)")
    lora_rank: int = option(default=0, help="of a LoRA matrix for each head on the shared output matrix; 0: none")
    loss_vocab_size: int | None = option(
        default=None, help="compute the loss over so many of the most frequent tokens of the answers; none: over all"
    )


class MedusaDrafter(Drafter):
    """A set of Medusa heads in training, in float32, which small updates need."""

    recipe, kind = "train_medusa", "Medusa heads"
    args: MedusaArguments

    def __init__(self, args: MedusaArguments, target: PreTrainedModel, rows: Any):
        super().__init__(args, target, rows)
        if args.heads is None:
            heads = MedusaHeads.from_target(target, **{name: getattr(args, name) for name in SHAPE})
            heads.config = replace(heads.config, base_model=public(args.target))
        else:
            heads = cast(MedusaHeads, load_head(args.heads, dtype=torch.float32))
            if not isinstance(heads, MedusaHeads):
                raise ValueError(f"{args.heads!r} is a {type(heads).__name__}, not a set of Medusa heads")
            heads.bind(target)  # raises for heads of another target
        matrix = output_matrix(target)
        self.heads = heads.to(matrix.weight.device).requires_grad_()
        self.depth = heads.config.num_heads
        self.learnt_ids: torch.Tensor | None = None
        if args.loss_vocab_size is not None:
            if heads.config.own_outputs or heads.config.lora_rank:
                raise ValueError("loss_vocab_size is for heads that share the target's output matrix, without LoRA")
            ids = frequent_tokens(rows, args.loss_vocab_size, matrix.out_features)
            self.learnt_ids = ids.to(matrix.weight.device)

    def draft(self, batch: Batch, states: States) -> Drafts:
        tokens = None
        if self.heads.config.reads_path:
            with torch.no_grad():
                tokens = cast(Any, self.target).get_input_embeddings()(following_tokens(batch, self.heads))
        return Drafts(
            [self.heads.head_state(head, states.hidden, tokens) for head in range(self.depth)],
            [partial(self._logits, head) for head in range(self.depth)],
            trained=[parameter for name, parameter in self.heads.named_parameters() if name.startswith(OUTPUTS)],
            drafted_ids=self.learnt_ids,
        )

    def _logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        matrix: Any = output_matrix(self.target)
        if self.learnt_ids is not None:
            matrix = rows_of_matrix(matrix, self.learnt_ids)
        scores = output_logits(self.target, state[..., None, :], lambda one: self.heads.scores([head], one, matrix))
        return scores[..., 0, :]

    def save(self, folder: Path) -> None:
        save_head(copy.deepcopy(self.heads).to(self.target.dtype), folder)


def following_tokens(batch: Batch, heads: MedusaHeads) -> torch.Tensor:
    """`[positions, tokens]` the tokens after each predicting position, as many as the heads read.

    Those beyond the end of a row are arbitrary: no head that reads them has a token to predict.
    """
    ids, predicts = batch["input_ids"], batch["labels"] != IGNORED
    return torch.stack([ids.roll(-after, dims=1)[predicts] for after in range(1, heads.config.num_heads + 1)], dim=1)


# `training.run`: arguments, rows and target; MedusaDrafter.check and its constructor; draft() for each batch of
# the Trainer; save(); real generations by domain; the model card.
main = partial(run, MedusaDrafter, MedusaArguments, __doc__)

if __name__ == "__main__":
    launch(main)
