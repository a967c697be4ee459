"""Training settings and the training loop shared by all recipes, on top of `accelerate`.

The result does not depend on the number of processes or the size of micro-batches: a step reads the same conversations,
and its loss is a sum divided once by the number of answer tokens in the whole batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_cosine_schedule_with_warmup

from common import option
from corpus import Batch, batches

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


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
    streaming: bool = option(default=False, help="read the data as they are needed")
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
        accumulation(self, 1)


@dataclass
class Progress:
    """Progress of a run; part of every checkpoint."""

    step: int = 0
    epoch: int = 0
    batches: int = 0  # micro-batches of this epoch, in this process
    losses: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For `accelerator.save_state`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For `accelerator.load_state`."""
        self.__dict__.update(state)


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
    """Micro-batches of encoded rows (see `corpus`), in a number that makes whole steps for any number of processes."""
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


def train(
    accelerator: Accelerator,
    module: nn.Module,
    loader: DataLoader,
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor],
    settings: TrainingSettings,
    optimizers: Sequence[Optimizer] | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> tuple[Progress, dict[str, torch.Tensor]]:
    """Train `module` in place for `settings.steps` steps.

    Args:
        accelerator: as from `start`.
        module: its parameters that require a gradient are trained.
        loader: as from `shared_batches`.
        loss_sum: returns the loss of one batch, summed over its predicting positions; it calls the module that it
            receives, which is `module` prepared for several processes.
        settings: steps, learning rate, checkpoints.
        optimizers: one AdamW for all trained parameters if None.
        evaluate: called every `evaluate_every` steps in the main process, unless the weights are sharded; the returned
            values are logged.

    Returns:
        The progress, with the loss per answer token every `log_every` steps; and the complete weights of `module` (in
        the main process), also where they were sharded.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if optimizers is None:
        rate, decay = settings.learning_rate, settings.weight_decay
        optimizers = [torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=decay)]
    warmup, steps = settings.warmup_steps, settings.steps
    schedules = [get_cosine_schedule_with_warmup(optimizer, warmup, steps) for optimizer in optimizers]
    order = loader.batch_sampler
    module, loader, *optimizers = accelerator.prepare(module, loader, *optimizers)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, *schedules)
    checkpoint = Path(settings.output) / "checkpoint"
    if checkpoint.exists() and settings.save_every and not settings.resume:
        raise ValueError(
            f"{checkpoint} is the checkpoint of an earlier run, which this one would replace: continue it with "
            "--resume, or give another --output"
        )
    if settings.resume and checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    stream = _endless(accelerator, loader, order, progress)
    size = accumulation(settings, accelerator.num_processes)
    accelerator.print(
        f"processes: {accelerator.num_processes}, precision: {accelerator.mixed_precision}, "
        f"trained parameters: {sum(parameter.numel() for parameter in trained):,}, from step {progress.step}"
    )
    bar = tqdm(total=settings.steps, initial=progress.step, disable=not accelerator.is_main_process, unit="step")
    module.train()
    since_log: list[torch.Tensor] = []
    while progress.step < settings.steps:
        since_log.append(_step(accelerator, module, list(islice(stream, size)), loss_sum))
        accelerator.clip_grad_norm_(trained, settings.max_grad_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        progress.step += 1
        bar.update()
        if progress.step % settings.log_every == 0 or progress.step == settings.steps:
            _log(accelerator, progress, since_log, schedules[0], bar)
        due = settings.evaluate_every and progress.step % settings.evaluate_every == 0
        if evaluate and due and accelerator.distributed_type not in SHARDED:
            _evaluate(accelerator, evaluate, progress.step)
        if settings.save_every and (progress.step % settings.save_every == 0 or progress.step == settings.steps):
            _save(accelerator, checkpoint)
    bar.close()
    module.eval()
    return progress, accelerator.get_state_dict(module)


def _step(
    accelerator: Accelerator,
    module: nn.Module,
    micro_batches: list[Batch],
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor],
) -> torch.Tensor:
    """Compute the gradients of one step; returns this process's share of the loss."""
    mine = torch.stack([batch["predicts"].sum() for batch in micro_batches]).sum()
    tokens = cast(torch.Tensor, accelerator.reduce(mine, reduction="sum"))
    total = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(micro_batches):
        with accelerator.no_sync(module) if i < len(micro_batches) - 1 else nullcontext():
            loss = loss_sum(module, batch) / tokens
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
        total += loss.detach()
    return total


def _endless(accelerator: Accelerator, loader: Any, order: Any, progress: Progress) -> Iterator[Batch]:
    """Micro-batches of epoch after epoch, each in another order, starting from `progress`."""
    while True:
        if hasattr(order, "epoch"):
            order.epoch = progress.epoch
        elif hasattr(loader, "set_epoch"):
            loader.set_epoch(progress.epoch)
        skipped = accelerator.skip_first_batches(loader, progress.batches) if progress.batches else loader
        for batch in skipped:
            progress.batches += 1
            yield batch
        progress.epoch, progress.batches = progress.epoch + 1, 0


def _log(
    accelerator: Accelerator, progress: Progress, since_log: list[torch.Tensor], schedule: LambdaLR, bar: Any
) -> None:
    """Log the mean loss of the steps since the last call: it varies with the length of answers in a batch."""
    mean = torch.stack(since_log).mean()
    since_log.clear()
    value = float(cast(torch.Tensor, accelerator.reduce(mean, reduction="sum")))
    progress.losses.append((progress.step, value))
    bar.set_postfix(loss=f"{value:.4f}")
    accelerator.log({"loss": value, "learning_rate": schedule.get_last_lr()[0]}, step=progress.step)


def _evaluate(accelerator: Accelerator, evaluate: Callable[[], dict[str, float]], step: int) -> None:
    values = evaluate() if accelerator.is_main_process else {}
    accelerator.wait_for_everyone()
    accelerator.print(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
    accelerator.log(values, step=step)


def _save(accelerator: Accelerator, checkpoint: Path) -> None:
    """Write a new checkpoint and then replace the old one, so that one of them is always complete."""
    fresh = checkpoint.with_name(checkpoint.name + ".new")
    accelerator.save_state(str(fresh))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(checkpoint, ignore_errors=True)
        fresh.rename(checkpoint)
    accelerator.wait_for_everyone()
