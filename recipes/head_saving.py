"""Runs the training of a draft head, measures the result and writes the output folder: weights, config, card."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from cards import push, write_card
from corpus import Batch, conversations
from distillation import load_target
from head_evaluation import HeadEvaluation, eval_results, evaluation_section
from head_training import DraftPass, HeadSettings, HeadTraining
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.eagle import Eagle3Head
from hf_specgen.heads.export import save_head
from training import train
from training_setup import shared_batches, start

USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specgen import AutoCandidates

target = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Hello", return_tensors="pt")
target.generate(**inputs, candidate_generator=AutoCandidates.from_pretrained("{head}"))
"""
MakeHead = Callable[[Any, PreTrainedModel, Any], DraftHead]


def run(settings: HeadSettings, recipe: str, make_head: MakeHead, draft: DraftPass) -> None:
    """Train a head and save it.

    Args:
        settings: of the recipe.
        recipe: its name.
        make_head: from the settings, the target and the encoded conversations to the head to train, in float32.
        draft: what the head drafts in a training pass.
    """
    accelerator = start(settings, recipe)
    target, tokenizer = load_target(settings.target, accelerator)
    rows = conversations(tokenizer, settings.data, settings.max_length, settings.streaming)
    head = make_head(settings, target, rows)
    loader = shared_batches(rows, settings, tokenizer.pad_token_id or 0)
    attached = [head.bind(target)]

    def loss_sum(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return cast(torch.Tensor, module(batch, attached, target))

    evaluation = HeadEvaluation(settings, attached[0], draft, target, tokenizer) if settings.evaluation else None
    module = HeadTraining(head, draft, settings.decay)
    summary = evaluation.summary if evaluation else None
    progress, weights = train(accelerator, module, loader, loss_sum, settings, evaluate=summary)
    if accelerator.is_main_process:
        head.load_state_dict({name.removeprefix("head."): weights[name] for name in weights})
        save_head(copy.deepcopy(head).to(torch.bfloat16), settings.output)  # before the evaluation, which takes a while
        results = evaluation.measure() if evaluation else {}
        _write_card(settings, recipe, head, results, progress.losses)
    accelerator.end_training()


def _write_card(
    settings: HeadSettings, recipe: str, head: DraftHead, results: dict[str, Any], losses: list[tuple[int, float]]
) -> None:
    folder = Path(settings.output)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    kind = "EAGLE-3 head" if isinstance(head, Eagle3Head) else "block head (DFlash)"
    write_card(
        folder,
        title=f"{folder.name}: {kind}",
        recipe=recipe,
        base_model=settings.target,
        summary=f"{kind[0].upper()}{kind[1:]} of {parameters / 1e6:.1f}M parameters, in the format of speculators, in "
        "bfloat16. The target itself is unchanged.",
        usage=USAGE.format(target=settings.target, head=settings.push_to_hub or settings.output),
        settings=settings,
        measured=evaluation_section(settings.evaluation, results),
        results=eval_results(settings.evaluation, results),
        losses=losses,
    )
    push(folder, settings.push_to_hub)
