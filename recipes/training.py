"""The training loop shared by all recipes, on top of `accelerate`.

Up to rounding, the result does not depend on the number of processes or the size of micro-batches: a step reads the
same conversations, and its loss is a sum divided once by the number of answer tokens in the whole batch. Streaming is
an exception after the first epoch, at whose end the rows that do not fill a micro-batch are left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_cosine_schedule_with_warmup

from corpus import Batch
from training_setup import TrainingSettings, accumulation

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


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
    optimizers = optimizers or [_adamw(trained, settings)]
    warmup, steps = settings.warmup_steps, settings.steps
    schedules = [get_cosine_schedule_with_warmup(optimizer, warmup, steps) for optimizer in optimizers]
    order = loader.batch_sampler
    module, loader, *optimizers = accelerator.prepare(module, loader, *optimizers)
    progress, checkpoint = Progress(), Path(settings.output) / "checkpoint"
    accelerator.register_for_checkpointing(progress, *schedules)
    _resume(accelerator, checkpoint, settings)
    stream = _endless(accelerator, loader, order, progress)
    bar = _progress_bar(accelerator, trained, progress, steps)
    module.train()
    since_log: list[torch.Tensor] = []
    while progress.step < steps:
        micro_batches = list(islice(stream, accumulation(settings, accelerator.num_processes)))
        since_log.append(_gradients(accelerator, module, micro_batches, loss_sum))
        accelerator.clip_grad_norm_(trained, settings.max_grad_norm)
        _update(optimizers, schedules)
        progress.step += 1
        bar.update()
        if _is_due(settings.log_every, progress.step, steps):
            _log(accelerator, progress, since_log, schedules[0], bar)
        if evaluate and settings.evaluate_every and progress.step % settings.evaluate_every == 0:
            _evaluate(accelerator, evaluate, progress.step)
        if _is_due(settings.save_every, progress.step, steps):
            _save(accelerator, checkpoint)
    bar.close()
    module.eval()
    return progress, accelerator.get_state_dict(module)


def _progress_bar(accelerator: Accelerator, trained: list[nn.Parameter], progress: Progress, steps: int) -> Any:
    """Print what is trained, and start the progress bar of the main process."""
    accelerator.print(
        f"processes: {accelerator.num_processes}, precision: {accelerator.mixed_precision}, "
        f"trained parameters: {sum(parameter.numel() for parameter in trained):,}, from step {progress.step}"
    )
    return tqdm(total=steps, initial=progress.step, disable=not accelerator.is_main_process, unit="step")


def _adamw(trained: list[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    rate, decay = settings.learning_rate, settings.weight_decay
    return torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=decay)


def _resume(accelerator: Accelerator, checkpoint: Path, settings: TrainingSettings) -> None:
    """Load the checkpoint of an earlier run if the settings say so.

    Raises:
        ValueError: if this run would replace it otherwise.
    """
    _replace_by_new(accelerator, checkpoint)
    if not checkpoint.exists():
        return
    if settings.resume:
        accelerator.load_state(str(checkpoint))
    elif settings.save_every:
        raise ValueError(
            f"{checkpoint} is the checkpoint of an earlier run, which this one would replace: continue it with "
            "--resume, or give another --output"
        )


def _update(optimizers: Sequence[Optimizer], schedules: Sequence[LambdaLR]) -> None:
    """Change the weights by the gradients, and the learning rates of the next step."""
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _is_due(every: int, step: int, steps: int) -> bool:
    """Whether something that is done every so many steps (0: never), and after the last one, is done now."""
    return every > 0 and (step % every == 0 or step == steps)


def _gradients(
    accelerator: Accelerator,
    module: nn.Module,
    micro_batches: list[Batch],
    loss_sum: Callable[[nn.Module, Batch], torch.Tensor],
) -> torch.Tensor:
    """Compute the gradients of one step; returns this process's share of the loss."""
    mine = torch.stack([batch["predicts"].sum() for batch in micro_batches]).sum()
    tokens = cast(torch.Tensor, accelerator.reduce(mine, reduction="sum")).clamp(min=1)
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
    """Log the mean loss since the last log; a single step's loss is noisy, as it depends on the answers' lengths."""
    mean = torch.stack(since_log).mean()
    since_log.clear()
    value = float(cast(torch.Tensor, accelerator.reduce(mean, reduction="sum")))
    progress.losses.append((progress.step, value))
    bar.set_postfix(loss=f"{value:.4f}")
    accelerator.log({"loss": value, "learning_rate": schedule.get_last_lr()[0]}, step=progress.step)


def _evaluate(accelerator: Accelerator, evaluate: Callable[[], dict[str, float]], step: int) -> None:
    """Evaluate in the main process and log the values; not where the weights are sharded."""
    if accelerator.distributed_type in SHARDED:
        return
    values = evaluate() if accelerator.is_main_process else {}
    accelerator.wait_for_everyone()
    accelerator.print(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
    accelerator.log(values, step=step)


def _save(accelerator: Accelerator, checkpoint: Path) -> None:
    """Write a new checkpoint and then replace the old one, so that one of them is always complete.

    It is written to `checkpoint.part`, and renamed to `checkpoint.new` once it is complete. A run that is interrupted
    in the replacement leaves `checkpoint.new`, and the next run completes it.
    """
    part = _beside(checkpoint, ".part")
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.rename(_beside(checkpoint, ".new"))
    _replace_by_new(accelerator, checkpoint)


def _replace_by_new(accelerator: Accelerator, checkpoint: Path) -> None:
    """Replace the checkpoint by `checkpoint.new`, which is complete and newer, if there is one."""
    new = _beside(checkpoint, ".new")
    if accelerator.is_main_process and new.exists():
        shutil.rmtree(checkpoint, ignore_errors=True)
        new.rename(checkpoint)
    accelerator.wait_for_everyone()


def _beside(checkpoint: Path, suffix: str) -> Path:
    return checkpoint.with_name(checkpoint.name + suffix)
