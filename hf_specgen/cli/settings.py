"""The options of every command, one dataclass each, and how a dataclass becomes a command. Without heavy imports."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

from hf_specgen.evaluation import DTYPES, setting

DEVICE = "cpu, cuda:1, mps …; auto for several; the accelerator if left out."


def argument(help: str) -> Any:
    """A required positional argument."""
    return field(metadata={"help": help, "argument": True})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A target, and what strategies need."""

    draft: tuple[str, ...] = setting((), "Hub id or folder of a draft model; may be given several times.")
    heads: tuple[str, ...] = setting((), "The same of heads: Medusa, EAGLE, P-EAGLE, DFlash, speculators.")
    adapter: str = setting("", "Hub id or folder of an exit adapter.")
    dtype: str = setting("auto", "Data type of the models; auto for that of the checkpoint.", choices=("auto", *DTYPES))
    device: str = setting("", DEVICE)


@dataclass(frozen=True, kw_only=True)
class DemoSettings(ModelSettings):
    """Compare plain generate and the strategies on two targets, live, in little more than a minute.

    Exit code 1 if a token differs in float32.
    """

    model: str = setting("", "Hub id or folder of the target; the embedded model if left out.")
    prompt: tuple[str, ...] = setting((), "A prompt of your own; may be given several times.")
    prompts: Path | None = setting(None, "JSONL file of rows {prompt, domain}, or a text file with a prompt a line.")
    dtype: str = setting("float32", "Data type of the target.", choices=DTYPES)
    max_new_tokens: int = setting(64, "Tokens per answer; fewer where not enough prompts fit into the time.", min=1)
    every: bool = setting(False, "Measure the embedded Medusa heads, DFlash head and layer skip too.", flags=("--all",))
    wide: int = setting(300, "Size of the second target, in million parameters; 0 for none.", min=0)
    seconds: float = setting(75.0, "Time for everything; at least one prompt on each target.", min=0)

    @property
    def widened(self) -> bool:
        """Whether there is a second target: the embedded model, made wider."""
        return self.wide > 0 and not self.model


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(ModelSettings):
    """Check whether speculation works and is faster here, and recommend a strategy.

    Exit code 1 if a problem has to be solved first.
    """

    model: str = setting("", "Hub id or folder of the target.", argument=True)
    model_option: str = setting("", "The target, in another place.", flags=("--model", "--target"))
    prompt: tuple[str, ...] = setting((), "A prompt like yours; may be given several times.")
    batch_size: int = setting(1, "Prompts per generate call.", min=1)
    length: int = setting(2048, "Tokens per row, prompt included, that must fit into memory.", min=1)
    temperature: float = setting(0.0, "Sampling temperature; 0 for greedy decoding.", min=0)
    max_new_tokens: int = setting(96, "Tokens per answer of the quick benchmark.", min=1)
    rounds: int = setting(3, "Runs of each prompt in the quick benchmark.", min=1)
    run: bool = setting(True, "Measure; without it no weights are loaded.")
    as_json: bool = setting(False, "Print JSON instead of a table.", flags=("--json",))


@dataclass(frozen=True, kw_only=True)
class FindSettings:
    """List draft models and heads for a target: of the Hub by its base_model relation, or of the local cache.

    Exit code 1 if nothing is found.
    """

    model: str = argument("Hub id of the target; a folder too, for the local cache.")
    offline: bool = setting(False, "Look in the local cache, whose checkpoints are checked against the target.")
    limit: int = setting(10, "Checkpoints to list.", min=1)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(ModelSettings):
    """Measure latencies on this machine and write them to a file, by which AdaptiveDepth chooses draft depths."""

    model: str = argument("Hub id or folder of the target.")
    latency: Path = setting(Path("latency.json"), "File to write, for AdaptiveDepth(latency=...).")
    batch_size: tuple[int, ...] = setting((1,), "Rows to measure latencies for; may be given several times.", min=1)
    context: int = setting(256, "Cached tokens per row to measure latencies at.", min=1)


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(ModelSettings):
    """Options of `hf-specgen chat` and `generate`."""

    temperature: float = setting(0.0, "Sampling temperature; 0 for greedy decoding.", min=0)
    pack_weights: bool = setting(False, "Prepack the weights, where that is faster on this CPU.")


@dataclass(frozen=True, kw_only=True)
class ChatSettings(AnswerSettings):
    """Chat with a model; accepted draft tokens are coloured. /strategy and /plain compare."""

    model: str = argument("Hub id or folder of the target.")
    system: str = setting("", "System prompt.")
    max_new_tokens: int = setting(512, "Tokens per answer.", min=1)
    seed: int = setting(0, "Seed of every answer, so that all strategies give the same one.")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(AnswerSettings):
    """Answer the prompts of a file or dataset: resumable, sharded by `accelerate launch`."""

    model: str = argument("Hub id or folder of the target.")
    source: str = argument("JSONL file of prompts, or the id of a dataset of the Hub.")
    output: Path = argument("JSONL file to write: the rows of the source with their answers.")
    column: str = setting("prompt", "Column of the prompts: texts, or lists of chat messages.")
    answer_column: str = setting("answer", "Column to write.")
    split: str = setting("train", "Split of a dataset.")
    name: str = setting("", "Configuration of a dataset.")
    limit: int = setting(0, "Rows to use; 0 for all.", min=0)
    plain: bool = setting(False, "Generate without a strategy.")
    chat: bool = setting(True, "Put texts into the model's chat format, if it has one.")
    batch_size: int = setting(8, "Prompts that are answered at a time.", min=1)
    max_new_tokens: int = setting(256, "Tokens per answer.", min=1)
    seed: int = setting(0, "Seed; that of each row is its number added to it.")


def command(app: typer.Typer, name: str, settings: type) -> None:
    """Register `hf_specgen.cli.NAME.show(settings)` as a command whose options are the fields of a dataclass.

    The docstring of the dataclass is the command's help. Where `show` returns False, the exit code is 1.
    """

    def run(**options: Any) -> None:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        with errors():
            succeeded = import_module(f"hf_specgen.cli.{name}").show(settings(**values))
        if succeeded is False:
            raise typer.Exit(1)

    hints = get_type_hints(settings)
    parameters = [_parameter(item, hints[item.name]) for item in fields(settings)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=inspect.getdoc(settings))(run)


def _parameter(item: Field[Any], kind: Any) -> inspect.Parameter:
    """A field as a parameter that typer reads."""
    about = item.metadata
    default: Any = inspect.Parameter.empty if item.default is MISSING else item.default
    if get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = list(cast(Any, default))
    if "choices" in about:
        kind = Literal[tuple(about["choices"])]
    limits = {"min": about["min"]} if "min" in about else {}
    if about.get("argument"):
        info = typer.Argument(help=about["help"], **limits)
    else:
        info = typer.Option(*about.get("flags", ()), help=about["help"], **limits)
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


@contextmanager
def errors() -> Iterator[None]:
    """Prints an expected error as one sentence and exits with code 2; without messages of other libraries meanwhile."""
    for name in ("torch.utils._pytree", "torchao", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, ImportError, MemoryError, RuntimeError) as error:
        message, reason = str(error), str(error).split("\n", 1)[0]
        if isinstance(error, MemoryError) or "allocate" in reason or "out of memory" in reason:
            message = f"not enough memory for this; use a smaller batch, length, model or dtype ({reason})"
        elif isinstance(error, RuntimeError):
            raise
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/] {escape(message)}", highlight=False)
        raise typer.Exit(2) from None


def terminal() -> Console:
    """A console for results: not cut at 80 columns where the output is piped."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=200)


def check_writable(file: Path | None) -> None:
    """Raise an `OSError` now if a file that is written at the end cannot be."""
    if file is None:
        return
    if file.is_dir():
        raise IsADirectoryError(f"{str(file)!r} is a folder; name a file")
    folder = file if file.exists() else file.resolve().parent
    if not folder.exists() or not os.access(folder, os.W_OK):
        raise OSError(f"{str(file)!r} cannot be written: there is no folder {str(file.parent)!r} that is writable")
