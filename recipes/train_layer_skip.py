"""Trains exit adapters, which predict the target's next token from the hidden state after an early layer.

    accelerate launch recipes/train_layer_skip.py --config recipes/configs/exit_reference.yaml
    accelerate launch recipes/train_layer_skip.py --config recipes/configs/exit_reference.yaml --exit-layers 2 3 4

An adapter is a copy of the target's final norm and a LoRA matrix on its output matrix (PEFT). The target is frozen; one
forward pass of it serves all exit layers. With several exit layers, OUTPUT/layer-E has the adapter of layer E, and
`--push-to-hub user/name` uploads each to user/name-layer-E.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agreement import Agreement, Predictor, agreement_section, eval_results, measure_agreement
from cards import push, write_card
from common import option, parse_config
from corpus import Batch
from distillation import DistillationSettings, answers, kl_sum, load_target, target_states
from hf_specgen.heads.exit_head import ExitHead, save_exit_head
from training import train
from training_setup import start

USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specgen import LayerSkipCandidates

target = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Hello", return_tensors="pt")
target.generate(**inputs, candidate_generator=LayerSkipCandidates(exit_layer={exit_layer}, adapter="{adapter}"))
"""


@dataclass(kw_only=True)
class Settings(DistillationSettings):
    """Exit layers and the size of an adapter.

    Raises:
        ValueError: for a layer or rank below 1.
    """

    exit_layers: list[int] = option(help="numbers of the target's layers that run before the exits")
    rank: int = option(default=64, help="of the LoRA matrix")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.exit_layers) < 1 or self.rank < 1:
            raise ValueError(f"exit layers and rank must be at least 1, got {self.exit_layers} and {self.rank}")


class Exits(nn.Module):
    """All exit heads as one module, whose forward pass is called once per batch, as data-parallel training requires."""

    def __init__(self, target: PreTrainedModel, exit_layers: list[int], rank: int):
        super().__init__()
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=["head"], modules_to_save=["norm"])
        heads = {str(layer): ExitHead.from_target(target, layer) for layer in exit_layers}
        self.adapters = nn.ModuleDict({name: get_peft_model(cast(Any, head), lora) for name, head in heads.items()})
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # bfloat16 is too coarse for small updates

    def forward(
        self, states: dict[int, torch.Tensor], target: list[PreTrainedModel], target_hidden: torch.Tensor
    ) -> torch.Tensor:
        """Sum over the answers' positions and the exits of KL(target || exit); the list hides the target from DDP."""
        sums = [
            kl_sum(target[0], target_hidden, state, self.adapters[str(exit_layer)])
            for exit_layer, state in states.items()
        ]
        return torch.stack(sums).sum()


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = start(settings, "train_layer_skip")
    target, tokenizer = load_target(settings.target, accelerator)
    exits = Exits(target, settings.exit_layers, settings.rank).to(accelerator.device)
    loader = answers(settings, tokenizer)

    def loss_sum(module: nn.Module, batch: Batch) -> torch.Tensor:
        last, states = target_states(target, batch, tuple(settings.exit_layers))
        return cast(torch.Tensor, module(states, [target], last))

    progress, _ = train(accelerator, exits, loader, loss_sum, settings)
    if accelerator.is_main_process:
        save(settings, exits, target, tokenizer, progress.losses)
    accelerator.end_training()


def save(
    settings: Settings,
    exits: Exits,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    losses: list[tuple[int, float]],
) -> None:
    """Evaluate the exits, write a folder with adapter and card for each, and upload them if requested."""
    exits = exits.to(target.dtype).eval()
    results = evaluate(settings, exits, target, tokenizer) if settings.evaluation else {}
    output = Path(settings.output)
    several = len(exits.adapters) > 1
    for name, adapter in exits.adapters.items():
        folder = output / f"layer-{name}" if several else output
        repository = settings.push_to_hub and settings.push_to_hub + (f"-layer-{name}" if several else "")
        measured = agreement_section(settings.evaluation, results.get(name))
        save_exit_head(adapter, folder, target, settings.target)
        write_card(
            folder,
            title=f"{folder.name}: an exit adapter",
            recipe="train_layer_skip",
            base_model=settings.target,
            summary=f"Predicts the target's next token from the hidden state after its first {name} layers: a norm and "
            f"a LoRA matrix of rank {settings.rank} on the target's output matrix. The target itself is unchanged.",
            results=eval_results(settings.evaluation, results.get(name)),
            usage=USAGE.format(target=settings.target, exit_layer=name, adapter=repository or folder),
            settings=settings,
            measured=measured + untrained_note(results.get(f"{name} untrained")),
            losses=[] if several else losses,  # the loss is a sum over all exits
            library="peft",
        )
        push(folder, repository)


def evaluate(
    settings: Settings, exits: Exits, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, Agreement]]:
    """Agreement of each exit with the target, with its adapter and ("untrained") without."""

    def reads(exit_layer: int, head: nn.Module) -> Predictor:
        return lambda batch: head(target_states(target, batch, (exit_layer,))[1][exit_layer])

    predictors: dict[str, Predictor] = {}
    for name, adapter in exits.adapters.items():
        predictors[name] = reads(int(name), adapter)
        predictors[f"{name} untrained"] = reads(int(name), ExitHead.from_target(target))
    assert settings.evaluation is not None
    return measure_agreement(
        target, tokenizer, predictors, settings.evaluation, settings.evaluation_per_domain, settings.generation
    )


def untrained_note(results: dict[str, Agreement] | None) -> str:
    """Agreement of the same exit without the adapter, as a sentence for the card."""
    if not results:
        return ""
    shares = ", ".join(f"{domain} {result.top1:.1%}" for domain, result in results.items())
    return f"\n\nWithout the adapter (the target's own final norm and output matrix), the same top-1 token: {shares}."


if __name__ == "__main__":
    main()
