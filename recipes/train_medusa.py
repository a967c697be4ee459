"""Trains Medusa heads on a target's own answers.

    accelerate launch recipes/train_medusa.py --config recipes/configs/medusa_reference.yaml
    accelerate launch recipes/train_medusa.py --config recipes/configs/medusa_reference.yaml --stage 2 --heads HEADS

Stage 1: the target is frozen; all heads are trained on the hidden states of one forward pass without gradients.
Stage 2: LoRA matrices in the target (PEFT) are trained together with the heads, with the target's own loss and a
learning rate of their own. The result is an adapter and heads that belong together: the target is then the adapted
model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from common import Options, option, parse_config
from corpus import Batch
from distillation import DistillationSettings, answers, draft_states, load_target, target_states
from hf_specgen.heads.lora import load_lora
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.medusa_formats import load_medusa
from hf_specgen.targets.model_parts import output_matrix
from medusa_evaluation import Evaluation
from medusa_lora import new_lora, output_of
from medusa_loss import answer_loss, following_tokens, medusa_loss
from medusa_saving import Trained, save_card, save_weights
from training import train
from training_setup import start

SHAPE = ("num_heads", "num_layers", "own_outputs", "reads_token", "reads_path", "lora_rank")
DEFAULT_LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(kw_only=True)
class Settings(DistillationSettings):
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
    lora: Options = option(default_factory=lambda: Options(DEFAULT_LORA), help="stage 2: fields of PEFT's LoraConfig")
    base_learning_rate: float = option(default=1e-4, help="stage 2: of the LoRA matrices in the target")
    heads_weight: float = option(default=0.2, help="stage 2: weight of the heads' loss beside the target's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_heads, self.num_layers) < 1 or self.lora_rank < 0:
            raise ValueError(
                f"num_heads and num_layers must be at least 1 and lora_rank at least 0, got {self.num_heads}, "
                f"{self.num_layers} and {self.lora_rank}"
            )


class HeadsTraining(nn.Module):
    """Stage 1, as one module whose forward pass is called once per batch, as data-parallel training requires."""

    def __init__(self, heads: MedusaHeads, lora: Any):
        super().__init__()
        self.heads, self.lora = heads, lora

    def forward(self, batch: Batch, target: list[PreTrainedModel], hidden: torch.Tensor) -> torch.Tensor:
        """The heads' loss over a batch; `hidden` as from `target_states`. The list hides the target from DDP."""
        tokens = None
        if self.heads.config.reads_token:
            with torch.no_grad():
                tokens = cast(Any, target[0]).get_input_embeddings()(following_tokens(batch, self.heads))
        rows = batch["predicts"].nonzero()[:, 0]
        return medusa_loss(target[0], self.heads, self.outputs(target[0]), hidden, tokens, rows)

    def outputs(self, target: PreTrainedModel) -> list[nn.Module]:
        """The output matrix of each head."""
        count = range(self.heads.config.num_heads)
        if self.heads.config.own_outputs:
            return list(self.heads.lm_heads)
        return [output_of(self.lora, head) if self.lora else output_matrix(target) for head in count]


class JointTraining(HeadsTraining):
    """Stage 2: the adapted target (a `PeftModel`) is trained as well."""

    def __init__(self, heads: MedusaHeads, lora: Any, adapted: Any, heads_weight: float):
        super().__init__(heads, lora)
        self.adapted, self.heads_weight = adapted, heads_weight

    def forward(self, batch: Batch, *_: Any) -> torch.Tensor:
        """The target's cross-entropy on the answers and the heads' loss, whose gradient reaches the target as well."""
        target = self.adapted.get_base_model()
        hidden = draft_states(target, batch)
        following = batch["input_ids"].roll(-1, dims=1)[batch["predicts"]]
        own = answer_loss(target, hidden, following)
        return own + self.heads_weight * super().forward(batch, [target], hidden)


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = start(settings, "train_medusa")
    target, tokenizer = load_target(settings.target, accelerator)
    heads, lora = make_heads(settings, target, tokenizer)
    settings = replace(settings, **{name: getattr(heads.config, name) for name in SHAPE})  # of loaded heads
    loader = answers(settings, tokenizer)
    module, optimizers = prepare(settings, target, heads, lora)

    def loss_sum(module: nn.Module, batch: Batch) -> torch.Tensor:
        states = target_states(target, batch)[0] if settings.stage == 1 else None
        return cast(torch.Tensor, module(batch, [target], states))

    evaluation = Evaluation(settings, heads, lora, target, tokenizer) if settings.evaluation else None
    summary = evaluation.summary if evaluation else None
    progress, weights = train(accelerator, module, loader, loss_sum, settings, optimizers, evaluate=summary)
    if accelerator.is_main_process:
        heads, lora = make_heads(settings, target, tokenizer)  # the trained ones may be wrapped or sharded
        HeadsTraining(heads, lora).load_state_dict(weights, strict=False)
        adapter = {name.removeprefix("adapted."): weights[name] for name in weights if name.startswith("adapted.")}
        adapted = module.adapted if isinstance(module, JointTraining) else None
        trained = Trained(cast(Any, copy.deepcopy(heads)).to(target.dtype), lora, adapted, adapter)
        save_weights(settings, trained)  # before the evaluation, which takes a while
        results = {}
        if settings.evaluation:
            final = Evaluation(settings, heads, lora, target, tokenizer)
            if not heads.config.reads_path:
                final.tune()
            results = final.measure()
            trained.heads.config = heads.config  # with the acceptance that was measured
            save_weights(settings, trained)
        save_card(settings, trained, results, progress.losses)
    accelerator.end_training()


def make_heads(settings: Settings, target: PreTrainedModel, tokenizer: Any) -> tuple[MedusaHeads, Any]:
    """Heads and the `PeftModel` of their LoRA matrices (or None), in float32, which small updates need."""
    matrix = output_matrix(target)
    if settings.heads is not None:
        heads = load_medusa(settings.heads, target).float().to(matrix.weight.device)
        count, rank = heads.config.num_heads, heads.config.lora_rank
        lora = load_lora(matrix, count, settings.heads) if rank else None
    else:
        shape = {name: getattr(settings, name) for name in SHAPE}
        heads = MedusaHeads.from_target(target, tokenizer, **shape)
        lora = new_lora(matrix, settings.num_heads, settings.lora_rank) if settings.lora_rank else None
    if lora is not None:
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                parameter.requires_grad_()
    return heads.train(), lora


def prepare(settings: Settings, target: PreTrainedModel, heads: MedusaHeads, lora: Any) -> tuple[Any, Any]:
    """The module of the stage, and its optimizers; None for one AdamW for all parameters."""
    if settings.stage == 1:
        return HeadsTraining(heads, lora), None
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", **settings.lora))
    module = JointTraining(heads, lora, adapted, settings.heads_weight)
    decay = settings.weight_decay
    base = {id(parameter) for parameter in adapted.parameters()}
    groups = [
        ([p for p in module.parameters() if p.requires_grad and id(p) not in base], settings.learning_rate),
        ([p for p in adapted.parameters() if p.requires_grad], settings.base_learning_rate),
    ]
    return module, [torch.optim.AdamW(group, lr=rate, betas=(0.9, 0.95), weight_decay=decay) for group, rate in groups]


if __name__ == "__main__":
    main()
