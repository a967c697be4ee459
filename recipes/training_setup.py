"""Settings of a training run, and the accelerator and the micro-batches that are made from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from common import option
from corpus import batches


@dataclass(kw_only=True)
class TrainingSettings:
    """Settings of every recipe that trains.

    Raises:
        ValueError: if a number is out of range, or `batch_size` is no multiple of `micro_batch_size`.
    """

    data: str = option(help="rows {domain, prompt, response}: a JSONL file or the id of a dataset of the Hub")
    output: str = option(help="folder for the result")
    steps: int = option(help="optimizer steps")
    batch_size: int = option(default=32, help="conversations in a step, over all processes")
    micro_batch_size: int = option(default=8, help="conversations in one forward pass of one process")
    max_length: int = option(default=512, help="tokens of a conversation")
    learning_rate: float = option(default=1e-3, help="maximum, after the warm-up; decays to 0 along a cosine")
    warmup_steps: int = option(default=20, help="steps of linear warm-up")
    weight_decay: float = option(default=0.0, help="of AdamW")
    max_grad_norm: float = option(default=1.0, help="gradients are clipped to this norm")
    precision: Literal["auto", "bf16", "no"] = option(default="auto", help="auto: bf16 where the hardware has it")
    streaming: bool = option(default=False, help="stream the dataset")
    seed: int = option(default=0, help="of the order of the data and of new weights")
    log_every: int = option(default=10, help="steps between logged losses")
    evaluate_every: int = option(default=0, help="steps between evaluations, where a recipe has them; 0: none")
    save_every: int = option(default=0, help="steps between checkpoints in OUTPUT/checkpoint; 0: none")
    resume: bool = option(default=False, help="continue from OUTPUT/checkpoint, if there is one")
    report_to: Literal["none", "tensorboard", "wandb"] = option(default="none", help="tracker of accelerate")
    push_to_hub: str | None = option(default=None, help="id of a repository for the result")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batch_size", "max_length", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "warmup_steps", "weight_decay", "seed", "evaluate_every", "save_every"):
            if not getattr(self, name) >= 0:  # NaN is refused too
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be greater than 0, got {self.max_grad_norm}")
        accumulation(self, 1)


def start(settings: TrainingSettings, recipe: str) -> Accelerator:
    """Create the accelerator and seed every random generator. Call it before any data are read.

    Args:
        settings: precision, tracker, seed.
        recipe: name of the run in the tracker.

    Raises:
        ValueError: if the batch cannot be divided evenly among the processes.
    """
    machine_has_bf16 = torch.cuda.is_bf16_supported() if torch.cuda.is_available() else _cpu_has_bf16()
    precision = ("bf16" if machine_has_bf16 else "no") if settings.precision == "auto" else settings.precision
    tracker = None if settings.report_to == "none" else settings.report_to
    accelerator = Accelerator(mixed_precision=precision, log_with=tracker, project_dir=settings.output)
    accumulation(settings, accelerator.num_processes)
    if tracker:
        plain = {name: value for name, value in asdict(settings).items() if isinstance(value, (int, float, str))}
        accelerator.init_trackers(recipe, config=plain)
    set_seed(settings.seed)
    return accelerator


def _cpu_has_bf16() -> bool:
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def shared_batches(rows: Any, settings: TrainingSettings, pad_token_id: int) -> DataLoader:
    """Micro-batches of encoded rows (see `corpus`).

    An epoch consists of whole steps for any number of processes. Streamed rows are not counted in advance: there, a
    step can begin with the last micro-batches of an epoch and end with the first of the next.

    Raises:
        ValueError: if the rows do not fill one step.
    """
    group = settings.batch_size // settings.micro_batch_size
    return batches(rows, settings.micro_batch_size, group=group, seed=settings.seed, pad_token_id=pad_token_id)


def accumulation(settings: TrainingSettings, processes: int) -> int:
    """Number of micro-batches that a process computes per step.

    Raises:
        ValueError: if the batch cannot be divided evenly.
    """
    count, rest = divmod(settings.batch_size, settings.micro_batch_size * processes)
    if rest or not count:
        raise ValueError(
            f"batch_size {settings.batch_size} must be a multiple of micro_batch_size {settings.micro_batch_size} "
            f"times the number of processes, {processes}"
        )
    return count
