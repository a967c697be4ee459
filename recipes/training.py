"""The training loop that the recipes share, on top of `accelerate`.

A step sees the same conversations and weighs every answer token the same, whatever the number of processes and
however the batch is cut: losses are sums, divided once by the number of answer tokens in the whole batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from corpus import Batch, batches

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


@dataclass(kw_only=True)
class TrainingSettings:
    """What every recipe that trains can be told."""

    data: str  # rows {domain, prompt, response}: a JSONL file or the id of a dataset of the Hub
    output: str
    steps: int
    batch_size: int = 32  # conversations in a step, over all processes
    micro_batch_size: int = 8  # conversations in one forward pass of one process
    max_length: int = 512
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    precision: str = "auto"  # "bf16", "no", or "auto": bf16 where the machine computes in it
    streaming: bool = False
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0  # steps between evaluations on the way, where a recipe has them; 0: none
    save_every: int = 0  # steps between checkpoints, which lie in OUTPUT/checkpoint; 0: none
    resume: bool = False  # go on from OUTPUT/checkpoint, if there is one
    report_to: str = "none"  # "tensorboard", "wandb" or "none"
    push_to_hub: str | None = None  # the id of a repository


@dataclass
class Progress:
    """How far a run has come; a part of every checkpoint."""

    step: int = 0
    epoch: int = 0
    batches: int = 0  # of this epoch, in this process
    losses: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For `accelerator.save_state`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For `accelerator.load_state`."""
        self.__dict__.update(state)


def start(settings: TrainingSettings, recipe: str) -> Accelerator:
    """An accelerator with the settings' precision and tracker; seeds every random generator."""
    machine_has_bf16 = torch.cuda.is_bf16_supported() if torch.cuda.is_available() else _cpu_has_bf16()
    precision = ("bf16" if machine_has_bf16 else "no") if settings.precision == "auto" else settings.precision
    tracker = None if settings.report_to == "none" else settings.report_to
    accelerator = Accelerator(mixed_precision=precision, log_with=tracker, project_dir=settings.output)
    if tracker:
        plain = {name: value for name, value in asdict(settings).items() if isinstance(value, (int, float, str))}
        accelerator.init_trackers(recipe, config=plain)
    set_seed(settings.seed)
    return accelerator


def _cpu_has_bf16() -> bool:
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def shared_batches(rows: Any, settings: TrainingSettings, accelerator: Accelerator, pad_token_id: int) -> DataLoader:
    """Micro-batches of encoded rows (see `corpus`), in whole steps."""
    group = settings.batch_size // settings.micro_batch_size
    accumulation(settings, accelerator.num_processes)  # complains before the data are read
    return batches(rows, settings.micro_batch_size, group=group, seed=settings.seed, pad_token_id=pad_token_id)


def accumulation(settings: TrainingSettings, processes: int) -> int:
    """How many micro-batches a process computes for a step.

    Raises:
        ValueError: if the batch cannot be shared out evenly.
    """
    count, rest = divmod(settings.batch_size, settings.micro_batch_size * processes)
    if rest or not count:
        raise ValueError(
            f"batch_size {settings.batch_size} must be a multiple of micro_batch_size {settings.micro_batch_size} "
            f"times the number of processes, {processes}."
        )
    return count


def train(
    accelerator: Accelerator,
    module: nn.Module,
    loader: DataLoader,
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor],
    settings: TrainingSettings,
    optimizers: Sequence[Optimizer] | None = None,
    name: str = "checkpoint",
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> tuple[Progress, dict[str, torch.Tensor]]:
    """Train `module` in place for `settings.steps` steps.

    Args:
        module: its parameters that require a gradient are trained.
        loader: as from `shared_batches`.
        loss_sum: the loss of one batch, summed over the positions that it predicts; it calls the module that it is
            given, which is `module` as prepared for several processes.
        optimizers: AdamW over everything if None.
        name: of the checkpoint.
        evaluate: called every `evaluate_every` steps in the main process; what it returns goes to the trackers. Not
            where the launcher has sharded the weights.

    Returns:
        the progress, with the loss per answer token every `log_every` steps; and the weights of `module`, whole (in the
        main process) wherever they were sharded.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if optimizers is None:
        rate, decay = settings.learning_rate, settings.weight_decay
        optimizers = [torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=decay)]
    schedules = [LambdaLR(optimizer, lambda step: _cosine(step, settings)) for optimizer in optimizers]
    order = loader.batch_sampler
    module, loader, *optimizers = accelerator.prepare(module, loader, *optimizers)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, *schedules)
    checkpoint = Path(settings.output) / name
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
    accelerator._custom_objects.clear()  # a recipe with several stages registers each stage's own
    return progress, accelerator.get_state_dict(module)


def _step(
    accelerator: Accelerator,
    module: nn.Module,
    micro_batches: list[Batch],
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor],
) -> torch.Tensor:
    """The gradients of one step; returns this process's share of its loss."""
    mine = torch.stack([batch["predicts"].sum() for batch in micro_batches]).sum()
    tokens = cast(torch.Tensor, accelerator.reduce(mine, reduction="sum"))
    total = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(micro_batches):
        with accelerator.no_sync(module) if i < len(micro_batches) - 1 else nullcontext():
            loss = loss_sum(module, batch) / tokens
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
        total += loss.detach()
    return total


def _cosine(step: int, settings: TrainingSettings) -> float:
    """Share of the learning rate: up linearly, then down by half a cosine to zero."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.5 * (1 + cos(pi * min(1.0, done)))


def _endless(accelerator: Accelerator, loader: Any, order: Any, progress: Progress) -> Iterator[Batch]:
    """Epoch after epoch, each in its own order, from where `progress` stands."""
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
    """The mean over the steps since the last time: batches of long and of short answers differ much."""
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
    """Write next to the old checkpoint, then take its place: an interruption leaves one of them whole."""
    fresh = checkpoint.with_name(checkpoint.name + ".new")
    accelerator.save_state(str(fresh))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(checkpoint, ignore_errors=True)
        fresh.rename(checkpoint)
    accelerator.wait_for_everyone()
