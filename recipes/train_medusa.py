"""Trains Medusa heads on a target's own answers.

    accelerate launch recipes/train_medusa.py --preset 8b --target ID --data answers.jsonl --output my-heads
    accelerate launch recipes/train_medusa.py --stage 2 --heads my-heads --target ID --data … --output my-adapter

Stage 1: the target is frozen; all heads are trained on the hidden states of one forward pass without gradients.
Stage 2: LoRA matrices in the target (PEFT) are trained together with the heads, with the target's own loss and a
learning rate of their own. The result is an adapter and heads that belong together: the target is then the adapted
model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from arguments import Arguments, Options, launch, option
from conversations import IGNORED, Batch
from drafter import Drafter
from hf_specgen.heads import MedusaHeads, load_head, save_head
from hf_specgen.targets.model_parts import decoder, output_logits, output_matrix
from losses import CHUNK, Drafts, gradient_at_once
from target import States
from training import run

SHAPE = ("num_heads", "num_layers", "own_outputs", "reads_token", "reads_path", "lora_rank")
ADAPTER = "adapter"
OUTPUTS = ("lm_heads.", "lora_")
"""Parameters that make logits from the heads' states."""


@dataclass(kw_only=True)
class MedusaArguments(Arguments):
    """The heads and their training.

    Raises:
        ValueError: for fewer than one head or layer, or a negative rank.
    """

    stage: Literal[1, 2] = option(default=1, help="1: heads only; 2: heads and LoRA matrices in the target")
    heads: str | None = option(default=None, help="folder or Hub id of heads to continue with, instead of new ones")
    num_heads: int = option(default=4, help="of new heads")
    num_layers: int = option(default=1, help="residual blocks in each head")
    own_outputs: bool = option(default=False, help="an output matrix for each head, instead of the target's")
    reads_token: bool = option(default=False, help="the heads also read the token that the target has just generated")
    reads_path: bool = option(default=False, help="each head also reads the draft tokens before its own (Hydra)")
    lora_rank: int = option(default=0, help="of a LoRA matrix for each head on the shared output matrix; 0: none")
    decay: float = option(default=0.8, help="weight of each head's loss relative to the one before")
    lora: Options = option(
        default_factory=lambda: Options({"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}),
        help="stage 2: fields of PEFT's LoraConfig",
    )
    base_learning_rate: float = option(default=1e-4, help="stage 2: of the LoRA matrices in the target")
    heads_weight: float = option(default=0.2, help="stage 2: weight of the heads' loss beside the target's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_heads, self.num_layers) < 1 or self.lora_rank < 0:
            raise ValueError(
                f"num_heads and num_layers must be at least 1 and lora_rank at least 0, got {self.num_heads}, "
                f"{self.num_layers} and {self.lora_rank}"
            )
        if self.stage == 2 and (self.features or self.shard_target):
            raise ValueError("stage 2 trains the target, which features and shard_target keep frozen; use neither")


class MedusaDrafter(Drafter):
    """A set of Medusa heads in training; in stage 2 with the adapted target."""

    recipe, kind = "train_medusa", "Medusa heads"
    args: MedusaArguments

    def __init__(self, args: MedusaArguments, target: PreTrainedModel, rows: Any):
        super().__init__(args, target, rows)
        self.heads = _make_heads(args, target)
        self.depth, self.decay = self.heads.config.num_heads, args.decay
        self.adapted: Any = None
        if args.stage == 2:
            from peft import LoraConfig, get_peft_model

            self.adapted = get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", **args.lora))
            self.weight, name = args.heads_weight, args.hub_model_id or args.output_dir
            self.note = "**The target is the adapted model**, with the LoRA matrices in the folder `adapter`."
            self.adapt = f'\ntarget.load_adapter("{name}", adapter_kwargs={{"subfolder": "{ADAPTER}"}})'

    def states(self, batch: Batch) -> States:
        if self.adapted is None:
            return super().states(batch)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        last = cast(Any, decoder(self.target))(**inputs, use_cache=False).last_hidden_state
        return States(last[..., :0], last[batch["labels"] != IGNORED])

    def draft(self, batch: Batch, states: States) -> Drafts:
        tokens, count = None, self.heads.config.num_heads
        if self.heads.config.reads_token:
            with torch.no_grad():
                tokens = cast(Any, self.target).get_input_embeddings()(following_tokens(batch, self.heads))
        return Drafts(
            [self.heads.head_state(head, states.hidden, tokens) for head in range(count)],
            [partial(self._logits, head) for head in range(count)],
            trained=[parameter for name, parameter in self.heads.named_parameters() if name.startswith(OUTPUTS)],
        )

    def _logits(self, head: int, state: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        matrix = output_matrix(self.target)
        scores = output_logits(self.target, state[..., None, :], lambda one: self.heads.scores([head], one, matrix))
        return scores[..., 0, :]

    def further_loss(self, batch: Batch, states: States) -> torch.Tensor | float:
        """Stage 2: the target's own cross-entropy on the answers."""
        if self.adapted is None:
            return 0.0
        tokens = batch["labels"][batch["labels"] != IGNORED]

        def parts(leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
            for first in range(0, len(tokens), CHUNK):
                logits = output_logits(self.target, leaves[0][first : first + CHUNK]).float()
                yield cross_entropy(logits, tokens[first : first + CHUNK], reduction="sum")

        return gradient_at_once(parts, [states.hidden], list(output_matrix(self.target).parameters()))

    def parameter_groups(self) -> list[dict[str, Any]]:
        base = set() if self.adapted is None else {id(parameter) for parameter in self.adapted.parameters()}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [{"params": [parameter for parameter in trained if id(parameter) not in base]}]
        if base:
            adapter = [parameter for parameter in trained if id(parameter) in base]
            groups.append({"params": adapter, "lr": self.args.base_learning_rate})  # type: ignore[dict-item]
        return groups

    def settings(self, with_tree: bool) -> dict[str, Any]:
        return {"tree": 32} if with_tree else {"k": self.depth}

    def save(self, folder: Path) -> None:
        save_head(copy.deepcopy(self.heads).to(self.target.dtype), folder)
        if self.adapted is not None:
            self.adapted.save_pretrained(folder / ADAPTER)


def _make_heads(args: MedusaArguments, target: PreTrainedModel) -> MedusaHeads:
    """Heads in float32, which small updates need."""
    if args.heads is None:
        return MedusaHeads.from_target(target, **{name: getattr(args, name) for name in SHAPE}).train()
    heads = cast(MedusaHeads, load_head(args.heads, dtype=torch.float32))
    heads.bind(target)  # raises for heads of another target
    return heads.to(output_matrix(target).weight.device).requires_grad_().train()


def following_tokens(batch: Batch, heads: MedusaHeads) -> torch.Tensor:
    """`[positions, tokens]` the tokens after each predicting position, as many as the heads read.

    Those beyond the end of a row are arbitrary: no head that reads them has a token to predict.
    """
    read = max(1, heads.config.tokens_read(heads.config.num_heads - 1))
    ids, predicts = batch["input_ids"], batch["labels"] != IGNORED
    return torch.stack([ids.roll(-after, dims=1)[predicts] for after in range(1, read + 1)], dim=1)


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    run(MedusaDrafter, MedusaArguments, __doc__, arguments)


if __name__ == "__main__":
    launch(main)
