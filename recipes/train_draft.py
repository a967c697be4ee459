"""Distills a small draft model from a target, on the target's own answers.

    accelerate launch recipes/train_draft.py --config recipes/configs/draft_reference.yaml
    accelerate launch recipes/train_draft.py --config recipes/configs/draft_lora.yaml --target ID --draft SMALLER_ID
    accelerate launch recipes/train_draft.py --config recipes/configs/draft_reference.yaml --resume true

Either `layers` initializes the draft with some of the target's layers, its embeddings and its output matrix (weights
whose shape is changed by `shape` are new), or `draft` names an existing small model with the same tokenizer, in which
PEFT trains LoRA matrices that are merged in the end. The result is a plain model either way. The answers are those of
build_distillation_set.py; the target's distribution is computed during training, for answers only.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agreement import Agreement, agreement_section, eval_results, measure_agreement
from cards import push, write_card
from common import Options, option, parse_config
from corpus import Batch
from distillation import DistillationSettings, answers, draft_states, kl_sum, load_target, target_states
from hf_specgen.targets.model_parts import output_logits
from training import train
from training_setup import start

DEFAULT_LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specgen import DraftModelCandidates

target = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Hello", return_tensors="pt")
target.generate(**inputs, candidate_generator=DraftModelCandidates("{draft}", k=4))
"""


@dataclass(kw_only=True)
class Settings(DistillationSettings):
    """The draft model.

    Raises:
        ValueError: if neither or both of `layers` and `draft` are given.
    """

    layers: list[int] | None = option(default=None, help="layers of the target that initialize those of the draft")
    shape: Options = option(default_factory=Options, help="fields of the config that differ from the target's")
    draft: str | None = option(default=None, help="existing small model, instead of `layers`")
    lora: Options | None = option(default=None, help="fields of PEFT's LoraConfig, for an existing model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.layers is None) == (self.draft is None):
            raise ValueError("give either `layers` of the target, or `draft`, an existing small model")


class Distiller(nn.Module):
    """The draft as one module, whose forward pass is called once per batch, as data-parallel training requires."""

    def __init__(self, draft: PreTrainedModel):
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, target: list[PreTrainedModel], target_hidden: torch.Tensor) -> torch.Tensor:
        """Sum over the answers' positions of KL(target || draft); the list hides the target from DDP."""
        states = draft_states(self.draft, batch)
        return kl_sum(target[0], target_hidden, states, lambda hidden: output_logits(self.draft, hidden))


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = start(settings, "train_draft")
    target, tokenizer = load_target(settings.target, accelerator)
    draft, adapted = make_draft(settings, target, tokenizer)
    loader = answers(settings, tokenizer)

    def loss_sum(module: nn.Module, batch: Batch) -> torch.Tensor:
        return cast(torch.Tensor, module(batch, [target], target_states(target, batch)[0]))

    progress, _ = train(accelerator, Distiller(draft), loader, loss_sum, settings)
    if accelerator.is_main_process:
        plain: Any = adapted.merge_and_unload() if adapted else draft
        save(settings, plain.to(target.device, target.dtype).eval(), target, tokenizer, progress.losses)
    accelerator.end_training()


def make_draft(
    settings: Settings, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, Any]:
    """The draft in float32, and the `PeftModel` around it if it is trained with LoRA.

    Raises:
        ValueError: if the tokenizers of draft and target differ.
    """
    if settings.draft is None:
        return from_layers(target, cast(list[int], settings.layers), settings.shape), None
    from peft import LoraConfig, get_peft_model

    if AutoTokenizer.from_pretrained(settings.draft).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{settings.draft} and {settings.target} have different tokenizers; choose another draft")
    draft = AutoModelForCausalLM.from_pretrained(settings.draft, dtype=torch.float32)
    return draft, get_peft_model(draft, LoraConfig(task_type="CAUSAL_LM", **(settings.lora or DEFAULT_LORA)))


def from_layers(target: PreTrainedModel, layers: list[int], changes: dict[str, Any]) -> PreTrainedModel:
    """A model with one layer for each of `layers`, with the target's weights wherever shapes are equal.

    Args:
        target: the target.
        layers: indices of the target's layers; the i-th initializes layer i of the draft.
        changes: fields of the config that differ from the target's.

    Raises:
        ValueError: if the target has no such layer.
    """
    count = target.config.get_text_config().num_hidden_layers
    if not layers or not all(0 <= layer < count for layer in layers):
        raise ValueError(f"layers must be indices of the target's layers, 0 to {count - 1}, got {layers}")
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    for name, value in ({"num_hidden_layers": len(layers)} | changes).items():
        setattr(text, name, value)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own, given = draft.state_dict(), target.state_dict()
    for name, tensor in own.items():
        source = _source_name(name, layers)
        if source in given and given[source].shape == tensor.shape:
            tensor.copy_(given[source])
    draft.generation_config = copy.deepcopy(target.generation_config)
    return cast(PreTrainedModel, draft)


def _source_name(name: str, layers: list[int]) -> str:
    """The target's name of a weight: with layers [0, 7], `model.layers.1.mlp.weight` is `model.layers.7.mlp.weight`."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)  # later numbers belong to experts
    if index is not None:
        parts[index] = str(layers[int(parts[index])])
    return ".".join(parts)


def save(
    settings: Settings,
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    losses: list[tuple[int, float]],
) -> None:
    """Evaluate the draft, write it with its tokenizer and its card, and upload them if requested."""
    draft.save_pretrained(settings.output)
    tokenizer.save_pretrained(settings.output)
    results: dict[str, Agreement] | None = None
    if settings.evaluation:
        results = measure_agreement(
            target,
            tokenizer,
            {"draft": lambda batch: output_logits(draft, draft_states(draft, batch))},
            settings.evaluation,
            settings.evaluation_per_domain,
            settings.generation,
        )["draft"]
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    layers = draft.config.get_text_config().num_hidden_layers
    write_card(
        settings.output,
        title=f"{Path(settings.output).name}: a draft model",
        recipe="train_draft",
        base_model=settings.target,
        summary=f"A draft model for speculative decoding: {layers} layers, {parameters / 1e6:.1f}M parameters, "
        f"{str(draft.dtype).removeprefix('torch.')}, distilled from its target on the target's own answers.",
        results=eval_results(settings.evaluation, results),
        usage=USAGE.format(target=settings.target, draft=settings.push_to_hub or settings.output),
        settings=settings,
        measured=agreement_section(settings.evaluation, results),
        losses=losses,
    )
    push(settings.output, settings.push_to_hub)


if __name__ == "__main__":
    main()
