"""Distillation from a frozen target: settings, data, hidden states, and the loss KL(p || q) in chunks of positions.

p is the target, q the draft. The mean of KL(p || q) over the target's own text bounds the rejection rate of draft
tokens: 1 - sum_v min(p_v, q_v) <= sqrt(KL(p || q) / 2) (Pinsker; Leviathan et al., arXiv 2211.17192, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from answers import DEFAULT_GENERATION
from common import Options, option
from corpus import Batch, conversations
from hf_specgen.targets.model_parts import decoder, decoder_layers, output_logits
from training_setup import TrainingSettings, shared_batches

Logits = Callable[[torch.Tensor], torch.Tensor]
CHUNK = 1024
"""Positions whose logits `[positions, vocab]` are in memory at once."""


@dataclass(kw_only=True)
class DistillationSettings(TrainingSettings):
    """Settings of every recipe with a frozen target."""

    target: str = option(help="Hub id or folder of the target")
    evaluation: str | None = option(default=None, help="held-out prompts, rows {domain, prompt}; none: no evaluation")
    evaluation_per_domain: int = option(default=20, help="evaluated prompts of each domain")
    generation: Options = option(
        default_factory=lambda: Options(DEFAULT_GENERATION), help="arguments of generate by domain; default: for others"
    )


def load_target(name: str, accelerator: Accelerator) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, in the dtype of its checkpoint if this run computes in bf16, otherwise in float32."""
    dtype = "auto" if accelerator.mixed_precision == "bf16" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(accelerator.device)
    return target.requires_grad_(False).eval(), AutoTokenizer.from_pretrained(name)


def answers(settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase) -> DataLoader:
    """The training data: batches of conversations with the answers marked."""
    rows = conversations(tokenizer, settings.data, settings.max_length, settings.streaming)
    return shared_batches(rows, settings, tokenizer.pad_token_id or 0)


@contextmanager
def layer_outputs(model: PreTrainedModel, exits: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Collects the states `[batch, length, hidden]` after the first E layers, for each E of `exits`, in each pass."""
    states: dict[int, torch.Tensor] = {}
    layers = decoder_layers(model)

    def keep(exit_layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            states[exit_layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[exit_layer - 1].register_forward_hook(keep(exit_layer)) for exit_layer in exits]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def target_states(
    target: PreTrainedModel, batch: Batch, exits: tuple[int, ...] = ()
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """One forward pass of the frozen target.

    Args:
        target: the target.
        batch: as from `collate`.
        exits: layers E after which the state is returned as well.

    Returns:
        `[positions, hidden]` the input of the output matrix at the predicting positions, and the hidden state after the
        first E layers for each E of `exits`.
    """
    with layer_outputs(target, exits) as states:
        last = _read(target, batch)
    return last, {exit_layer: state[batch["predicts"]] for exit_layer, state in states.items()}


def draft_states(draft: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """`[positions, hidden]` inputs of a draft model's output matrix at the predicting positions, with gradients."""
    return _read(draft, batch)


def _read(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    states = cast(Any, decoder(model))(**inputs, use_cache=False).last_hidden_state
    return cast(torch.Tensor, states[batch["predicts"]])


def kl_sum(
    target: PreTrainedModel, target_hidden: torch.Tensor, student_hidden: torch.Tensor, student_logits: Logits
) -> torch.Tensor:
    """Sum over positions of KL(p || q).

    With more than one chunk, logits are recomputed for the backward pass instead of kept.

    Args:
        target: for p.
        target_hidden: `[positions, hidden]` as from `target_states`.
        student_hidden: `[positions, width]`.
        student_logits: from `[n, width]` to `[n, vocab]`.
    """

    def chunk_kl(p_hidden: torch.Tensor, q_hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p_logits = output_logits(target, p_hidden)
        q_logits = student_logits(q_hidden)
        width = min(p_logits.shape[-1], q_logits.shape[-1])  # the vocabulary of one of them may be padded
        p, q = (log_softmax(logits[:, :width].float(), dim=-1) for logits in (p_logits, q_logits))
        return kl_div(q, p, reduction="sum", log_target=True)

    if len(target_hidden) <= CHUNK:
        return chunk_kl(target_hidden, student_hidden)
    chunks = zip(target_hidden.split(CHUNK), student_hidden.split(CHUNK), strict=True)
    sums = [checkpoint(chunk_kl, p, q, use_reentrant=False) for p, q in chunks]
    return torch.stack(cast(list[torch.Tensor], sums)).sum()
