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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedModel

from arguments import Arguments, Options, launch, option
from conversations import IGNORED, Batch, collate
from drafter import Drafter, answer_numbers
from hf_specgen.heads.lora import FOLDER, HeadOutputs, load_lora
from hf_specgen.heads.medusa import CONFIDENCE_EDGES, RANKS, Acceptance, MedusaHeads
from hf_specgen.heads.medusa_formats import load_medusa
from hf_specgen.targets.model_parts import decoder, output_logits, output_matrix
from losses import CHUNK, Drafts, Learnt, gradient_at_once, later_pairs
from target import States
from training import run

SHAPE = ("num_heads", "num_layers", "own_outputs", "reads_token", "reads_path", "lora_rank")
ADAPTER = "adapter"


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
        self.heads, self.lora = _make_heads(args, target)
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
        outputs = self._outputs()
        return Drafts(
            [self.heads.head_state(head, states.hidden, tokens) for head in range(count)],
            [partial(self._logits, output) for output in outputs],
            trained=[parameter for output in outputs for parameter in output.parameters()],
        )

    def _logits(self, matrix: nn.Module, state: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        return output_logits(self.target, state, matrix)

    def _outputs(self) -> list[nn.Module]:
        """The output matrix of each head, from hidden state to vocabulary."""
        if self.heads.config.own_outputs:
            return list(self.heads.lm_heads)
        if self.lora is not None:
            return list(self.lora.base_model.model.heads)
        return [output_matrix(self.target)] * self.heads.config.num_heads

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
        return {"tree": 32 if with_tree else [(0,) * depth for depth in range(1, self.depth + 1)]}

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.heads).to(self.target.dtype).save_pretrained(folder)  # type: ignore[arg-type]
        if self.lora is not None:
            self.lora.save_pretrained(folder / FOLDER)
        if self.adapted is not None:
            self.adapted.save_pretrained(folder / ADAPTER)

    @torch.no_grad()
    def tune(self, answers: Callable[[], Any]) -> None:
        """Store acceptance by confidence and rank, by which trees are built, in the heads' config."""
        if self.heads.config.reads_path:
            return  # such heads learn their acceptance while they draft
        count, bins = self.depth, len(CONFIDENCE_EDGES) + 1
        hits, seen = torch.zeros(count, bins, RANKS), torch.zeros(count, bins)
        for row in answers():
            batch = {name: tensor.to(self.target.device) for name, tensor in collate([row]).items()}
            states = self.states(batch)
            drafts, tokens = self.draft(batch, states), batch["labels"][batch["labels"] != IGNORED]
            count_acceptance(drafts, Learnt(states.hidden, tokens, answer_numbers(batch)), hits, seen)
        prior = torch.tensor(Acceptance.untuned(count).table)  # weighs as much as 10 drafts
        rates = (hits + 10.0 * prior) / (seen.unsqueeze(-1) + 10.0)
        self.heads.config.acceptance = rates.sort(dim=-1, descending=True).values.tolist()
        self.save(Path(self.args.output_dir))


def count_acceptance(drafts: Drafts, learnt: Learnt, hits: torch.Tensor, seen: torch.Tensor) -> None:
    """Count how often the generated token is that of each rank of each head, by the head's confidence.

    A head is counted where all heads before it had the generated token among their first `RANKS`: otherwise its token
    could not have been accepted.
    """
    alive = torch.ones(len(learnt.tokens), dtype=torch.bool, device=learnt.tokens.device)
    edges = torch.tensor(CONFIDENCE_EDGES, device=alive.device)
    for head, state in enumerate(drafts.states):
        index, later = later_pairs(learnt.answers, head + 1)
        index, later = index[alive[index]], later[alive[index]]
        confidence, tokens = drafts.logits[head](state[index], index).float().softmax(-1).topk(RANKS)
        bins = torch.bucketize(confidence[:, 0], edges, right=True).cpu()
        found = (tokens == learnt.tokens[later, None]).float()
        seen[head].index_add_(0, bins, torch.ones(len(bins)))
        hits[head].index_add_(0, bins, found.cpu())
        alive = torch.zeros_like(alive).index_fill(0, index[found.any(dim=1)], True)


def _make_heads(args: MedusaArguments, target: PreTrainedModel) -> tuple[MedusaHeads, Any]:
    """Heads and the `PeftModel` of their LoRA matrices (or None), in float32, which small updates need."""
    matrix = output_matrix(target)
    lora: Any = None
    if args.heads is not None:
        heads = cast(Any, load_medusa(args.heads, target).float()).to(matrix.weight.device)
        if heads.config.lora_rank:
            lora = load_lora(matrix, heads.config.num_heads, args.heads)
    else:
        shape = {name: getattr(args, name) for name in SHAPE}
        heads = MedusaHeads.from_target(target, AutoTokenizer.from_pretrained(args.target), **shape)
        if args.lora_rank:
            lora = new_lora(matrix, args.num_heads, args.lora_rank)
    for name, parameter in () if lora is None else lora.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_()
    return heads.train(), lora


def new_lora(matrix: nn.Linear, num_heads: int, rank: int) -> Any:
    """A `PeftModel` around `HeadOutputs` with new matrices, whose products are zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=r"heads\.\d+")
    return get_peft_model(cast(Any, HeadOutputs(matrix, num_heads)), config)


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
