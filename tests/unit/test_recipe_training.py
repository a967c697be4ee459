"""The training loop of the recipes on a tiny module: checkpoints, steps, settings."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import nn

import training
from corpus import LengthGroupedBatches, conversations
from tests.helpers.recipes import fresh_accelerator  # noqa: F401
from training_setup import TrainingSettings, shared_batches, start


def settings(output: Path, **overrides: Any) -> TrainingSettings:
    given = {"steps": 3, "batch_size": 4, "micro_batch_size": 2, "log_every": 1, "warmup_steps": 0, "precision": "no"}
    return TrainingSettings(data="rows", output=str(output), **{**given, **overrides})


def loss_sum(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, labels = module(batch["input_ids"])[:, :-1], batch["input_ids"][:, 1:]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses.view(labels.shape) * batch["predicts"][:, :-1]).sum()


def train(
    given: TrainingSettings, answer_start: int = 2, rows: Dataset | IterableDataset | None = None
) -> tuple[training.Progress, nn.Module]:
    rows = encoded_rows(16, answer_start) if rows is None else rows
    accelerator, module = start(given, "test"), nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    return training.train(accelerator, module, shared_batches(rows, given, 0), loss_sum, given)[0], module


def encoded_rows(count: int, answer_start: int = 2) -> Dataset:
    return Dataset.from_list([{"input_ids": [1, 2, 3, 4], "answer_start": answer_start, "length": 4}] * count)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with the checkpoint of a complete run."""
    train(settings(tmp_path, save_every=1))
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint"]
    return tmp_path


@pytest.mark.parametrize("has_remains", [False, True])
def test_resume_after_an_interrupted_replacement_uses_the_new_checkpoint(
    trained: Path, has_remains: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: a run that starts again at step 0, and one that reads a half deleted checkpoint."""
    (trained / "checkpoint").rename(trained / "checkpoint.new")
    if has_remains:
        (trained / "checkpoint").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint of an earlier run.*--resume"):
        train(settings(trained, save_every=1))
    (trained / "checkpoint").rename(trained / "checkpoint.new")
    if has_remains:
        (trained / "checkpoint").mkdir()
    train(settings(trained, steps=5, save_every=1, resume=True))
    assert "from step 3" in capsys.readouterr().out


@pytest.mark.parametrize("is_deleted", [False, True])
def test_resume_after_a_crash_in_the_replacement_continues_from_the_new_checkpoint(
    trained: Path, is_deleted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(path: Path, ignore_errors: bool) -> None:
        if is_deleted:
            path.rename(path.with_name("deleted"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("training.shutil.rmtree", crash)
        train(settings(trained, steps=4, save_every=1, resume=True))
    train(settings(trained, steps=5, resume=True))
    assert "from step 4" in capsys.readouterr().out


def test_resume_after_an_interrupted_first_write_starts_at_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint.part").mkdir()
    assert train(settings(tmp_path, save_every=1, resume=True))[0].step == 3
    assert "from step 0" in capsys.readouterr().out


def test_step_without_answer_tokens_keeps_weights_finite(tmp_path: Path) -> None:
    _, module = train(settings(tmp_path, steps=1), answer_start=4)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("micro_batch_size", [16, 8, 4])
def test_steps_of_other_micro_batches_have_the_same_conversations(micro_batch_size: int) -> None:
    lengths = torch.randint(10, 500, (2000,), generator=torch.Generator().manual_seed(0)).tolist()

    def steps(size: int) -> list[list[int]]:
        order = list(LengthGroupedBatches(lengths, size, 32 // size, seed=0))
        assert all(len(batch) == size for batch in order)
        return [sorted(chain(*order[first : first + 32 // size])) for first in range(0, len(order), 32 // size)]

    assert steps(micro_batch_size) == steps(32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("warmup_steps", -5),
        ("learning_rate", -1.0),
        ("weight_decay", -0.1),
        ("evaluate_every", -1),
        ("save_every", -2),
        ("seed", -1),
        ("max_grad_norm", 0.0),
        ("learning_rate", float("nan")),
    ],
)
def test_setting_out_of_range_is_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        settings(tmp_path, **{name: value})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_fewer_than_a_step_are_refused(tmp_path: Path, count: int, streaming: bool) -> None:
    """Would catch: streamed rows fewer than a micro-batch, of which every epoch has no batch."""
    rows = encoded_rows(4)
    rows = (rows.to_iterable_dataset() if streaming else rows).take(count)
    with pytest.raises(
        ValueError, match=f"the data have {count} rows to train on, fewer than the 4 of one step.*--batch-size"
    ):
        shared_batches(rows, settings(tmp_path), 0)


def test_streamed_rows_of_one_step_are_read_in_every_epoch(tmp_path: Path) -> None:
    """Three steps of four rows, of which the data have five; the second run resumes at the end of an epoch."""
    rows = encoded_rows(5).to_iterable_dataset()
    train(settings(tmp_path, steps=1, save_every=1), rows=rows)
    progress, _ = train(settings(tmp_path, steps=3, resume=True), rows=rows)
    assert (progress.step, progress.epoch, progress.batches) == (3, 2, 2)


@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_without_rows_are_refused(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """Would catch: a StopIteration without a message."""
    monkeypatch.setattr("corpus.read_rows", lambda *_: [])
    with pytest.raises(ValueError, match="the-source has no rows"):
        conversations(None, "the-source", 10, streaming)  # type: ignore[arg-type]
