"""Writes the output folder of Medusa heads: weights, card, and the code that `custom_generate=` runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cards import push, write_card
from custom_generate import write_custom_generate
from hf_specgen.heads.lora import FOLDER
from hf_specgen.heads.medusa import MedusaHeads
from medusa_evaluation import HeadScores, eval_results, evaluation_section

ADAPTER = "adapter"
STAGE_TWO = ("lora", "base_learning_rate", "heads_weight")
"""Settings without effect in stage 1."""
USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specgen import MedusaCandidates

target = AutoModelForCausalLM.from_pretrained("{target}"){adapt}
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Hello", return_tensors="pt")
target.generate(**inputs, candidate_generator=MedusaCandidates.from_pretrained("{heads}"))
"""
ADAPT = """
target.load_adapter("{heads}", adapter_kwargs={{"subfolder": "adapter"}})  # the heads belong to the adapted target"""


@dataclass
class Trained:
    """The result of a run.

    Args:
        heads: the heads.
        lora: the `PeftModel` of their LoRA matrices, or None.
        adapted: the adapted target of stage 2, or None.
        weights: the complete weights of its adapter.
    """

    heads: MedusaHeads
    lora: Any
    adapted: Any
    weights: dict[str, torch.Tensor]


def save_weights(settings: Any, trained: Trained) -> None:
    """Write the files that generation reads."""
    folder, heads = Path(settings.output), trained.heads
    heads.save_pretrained(folder)
    if trained.lora is not None:
        trained.lora.save_pretrained(folder / FOLDER)
    if trained.adapted is not None:
        trained.adapted.save_pretrained(folder / ADAPTER, state_dict=trained.weights)
    write_custom_generate(folder, settings.push_to_hub or settings.output)


def save_card(settings: Any, trained: Trained, results: dict[str, HeadScores], losses: list[tuple[int, float]]) -> None:
    """Write the model card, and upload the folder if requested."""
    folder, heads = Path(settings.output), trained.heads
    name = settings.push_to_hub or settings.output
    config = heads.config
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    write_card(
        folder,
        title=f"{folder.name}: Medusa heads",
        recipe="train_medusa",
        base_model=settings.target,
        summary=f"{config.num_heads} Medusa heads of {config.num_layers} layers, {parameters / 1e6:.1f}M parameters, "
        + ("with output matrices of their own" if config.own_outputs else "that share the target's output matrix")
        + (
            ", trained together with an adapter of the target: **the target is the adapted model** (folder `adapter`)."
            if trained.adapted is not None
            else ". The target itself is unchanged."
        ),
        usage=USAGE.format(
            target=settings.target, heads=name, adapt=ADAPT.format(heads=name) if trained.adapted is not None else ""
        )
        + f'\n# or:\ntarget.generate(**inputs, custom_generate="{name}", trust_remote_code=True)\n',
        settings=settings,
        measured=evaluation_section(settings.evaluation, results),
        results=eval_results(settings.evaluation, results),
        leave_out=() if trained.adapted is not None else STAGE_TWO,
        losses=losses,
    )
    push(folder, settings.push_to_hub)
