"""Pretrains a small chat model like the embedded one.

    accelerate launch recipes/pretrain_reference.py --config recipes/configs/pretrain_reference_1.yaml --data FILE_OR_ID
    accelerate launch recipes/pretrain_reference.py --config recipes/configs/pretrain_reference_2.yaml --data FILE_OR_ID

Two stages, of which the second continues the first: AdamW, then Muon for the matrices of the layers and AdamW for the
other parameters. The data are rows {domain, prompt, response}, packed into blocks in which every token is predicted,
prompts included. The card of the embedded model names the sources of its data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from cards import push, write_card
from common import Options, option, parse_config
from corpus import Batch, packed_blocks
from training import train
from training_setup import TrainingSettings, shared_batches, start

USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{model}")
tokenizer = AutoTokenizer.from_pretrained("{model}")
"""


@dataclass(kw_only=True)
class Settings(TrainingSettings):
    """The shape of the model or the model to continue with, and the optimizer of this stage."""

    tokenizer: str = option(help="Hub id or folder of the tokenizer")
    shape: Options = option(default_factory=Options, help="fields of LlamaConfig")
    start_from: str | None = option(default=None, help="model to continue with, instead of `shape`")
    optimizer: Literal["adamw", "muon"] = option(default="adamw", help="muon: for the matrices of the layers")
    adamw_learning_rate: float = option(default=1e-3, help="with Muon, for embeddings and norms")


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, train, save."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = start(settings, "pretrain_reference")
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    model = make_model(settings, tokenizer)
    blocks = packed_blocks(tokenizer, settings.data, settings.max_length, settings.seed)
    loader = shared_batches(blocks, settings, tokenizer.pad_token_id or 0)
    progress, _ = train(accelerator, model, loader, loss_sum, settings, make_optimizers(settings, model))
    if accelerator.is_main_process:
        save(settings, model, tokenizer, progress.losses)
    accelerator.end_training()


def make_model(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model in float32, from scratch or from an earlier stage."""
    if settings.start_from:
        return AutoModelForCausalLM.from_pretrained(settings.start_from, dtype=torch.float32)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(**{"vocab_size": len(tokenizer), **special, **settings.shape})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_optimizers(settings: Settings, model: PreTrainedModel) -> list[Optimizer]:
    """AdamW for all parameters; or Muon for the matrices of the layers and AdamW for the others."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    chosen = {id(matrix) for matrix in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    adamw: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, **adamw)]
    muon = torch.optim.Muon(
        matrices,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's, so that its learning rates can be used
    )
    return [muon, torch.optim.AdamW(rest, lr=settings.adamw_learning_rate, **adamw)]


def loss_sum(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy, summed over all positions but the last of each block."""
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    predicts = batch["predicts"]
    following = batch["input_ids"].roll(-1, dims=1)
    return cross_entropy(logits[predicts].float(), following[predicts], reduction="sum")


def save(
    settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, losses: list[tuple[int, float]]
) -> None:
    """Write the model in bfloat16, its tokenizer and its card, and upload them if requested."""
    model.to(torch.bfloat16).save_pretrained(settings.output)  # type: ignore[arg-type]
    tokenizer.save_pretrained(settings.output)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    write_card(
        settings.output,
        title=Path(settings.output).name,
        recipe="pretrain_reference",
        base_model=None,
        summary=f"A small chat model of {millions:.1f}M parameters, for measurements of speculative decoding.",
        usage=USAGE.format(model=settings.push_to_hub or settings.output),
        settings=settings,
        measured="Nothing but the training loss, see below.",
        losses=losses,
    )
    push(settings.output, settings.push_to_hub)


if __name__ == "__main__":
    main()
