"""The options of every command, one dataclass each, and how errors are printed. Without heavy imports."""

# Annotations are evaluated here: typer reads the options from the signature of each dataclass.
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

Drafts = Annotated[
    list[str],
    Option("--draft", "--heads", "--adapter", help="Hub id (ID@REVISION for a revision) or folder of what drafts: a "
        "draft model, heads of any format, an exit adapter; may be given several times."),
]  # fmt: skip
Revision = Annotated[str, Option(help="Branch, tag or commit of the target.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run code of the models' own repositories.")]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Temperature = Annotated[float, Option(help="Sampling temperature; 0 for greedy decoding.", min=0)]
BatchSize = Annotated[int, Option(help="Prompts that are answered at a time.", min=1)]
NewTokens = Annotated[int, Option(help="Tokens per answer.", min=1)]
Device = Annotated[str, Option(help="cpu, cuda:1, mps …; auto for several; the accelerator if left out.")]
History = Annotated[
    Path | None,
    Option(help="File of earlier answers: drafts copy from it, and new answers are added; made if there is none."),
]
NONE: Any = ()
ONE_ROW: Any = (1,)
"""Defaults of options that may be given several times."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """A target, in the terms of `from_pretrained`."""

    model: Annotated[str, Argument(help="Hub id or folder of the target.")]
    revision: Revision = ""
    trust_remote_code: TrustRemoteCode = False

    @property
    def target(self) -> Any:
        """Where the target lies."""
        from hf_specgen.evaluation.workloads import checkpoint

        return checkpoint(self.model, self.revision, self.trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(TargetSettings):
    """A target, and what drafts for it."""

    draft: Drafts = NONE
    dtype: Annotated[Dtype, Option(help="Data type of the models; auto for that of the checkpoint.")] = "auto"
    device: Device = ""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Five everyday tasks for a published model, answered by plain generate and the strategies, in about a minute.

    The model is SmolLM2-135M-Instruct, of the Hub or of the package index, or the bundled one if neither can be
    reached. Exit code 1 if a token differs in float32. For models of your own there is doctor.
    """

    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="Data type of the target.")] = "float32"
    device: Device = ""
    max_new_tokens: Annotated[int, Option(help="Tokens per answer, fewer if the time is short.", min=1)] = 64
    bundled: Annotated[bool, Option("--bundled", help="The bundled model of 16M parameters, with its drafts.")] = False
    seconds: Annotated[float, Option(help="Time for everything but a download; at least one task.", min=0)] = 75.0


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(ModelSettings):
    """Check whether speculation works and is faster here, and recommend a strategy.

    Exit code 1 if a problem has to be solved first.
    """

    prompt: Annotated[list[str], Option(help="A prompt like yours; may be given several times.")] = NONE
    batch_size: BatchSize = 1
    temperature: Temperature = 0.0
    max_new_tokens: NewTokens = 96
    rounds: Annotated[int, Option(help="Runs of each prompt in the quick benchmark.", min=1)] = 3
    run: Annotated[bool, Option(help="Measure; without it no weights are loaded.")] = True
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False


@dataclass(frozen=True, kw_only=True)
class FindSettings(TargetSettings):
    """List draft models and heads for a target: on the Hub, or in the local cache where that cannot be reached.

    Exit code 1 if nothing is found.
    """

    limit: Annotated[int, Option(help="Checkpoints to list.", min=1)] = 10


@dataclass(frozen=True, kw_only=True)
class TuneSettings(ModelSettings):
    """Measure latencies on this machine and write them to a file, by which AdaptiveDepth chooses draft depths."""

    latency: Annotated[Path, Option(help="File to write, for AdaptiveDepth(latency=...).")] = Path("latency.json")
    batch_size: Annotated[list[int], Option(help="Rows; may be given several times.", min=1)] = ONE_ROW
    context: Annotated[int, Option(help="Cached tokens per row.", min=1)] = 256


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(ModelSettings):
    """Options of `hf-specgen chat` and `generate`."""

    temperature: Temperature = 0.0


@dataclass(frozen=True, kw_only=True)
class ChatSettings(AnswerSettings):
    """Chat with a model; accepted draft tokens are coloured. /strategy and /plain compare."""

    system: Annotated[str, Option(help="System prompt.")] = ""
    max_new_tokens: NewTokens = 512


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(AnswerSettings):
    """Answer the prompts of a file or dataset: resumable, sharded by `accelerate launch`."""

    source: Annotated[
        str,
        Argument(help="JSONL file of prompts, also .jsonl.gz; .txt with one in each line; or a dataset of the Hub."),
    ]
    output: Annotated[Path, Argument(help="JSONL file to write: the rows of the source with their answers.")]
    column: Annotated[str, Option(help="Column of the prompts: texts, or lists of chat messages.")] = "prompt"
    answer_column: Annotated[str, Option(help="Column to write.")] = "answer"
    split: Annotated[str, Option(help="Split of a dataset.")] = "train"
    name: Annotated[str, Option(help="Configuration of a dataset.")] = ""
    limit: Annotated[int, Option(help="Rows to use; 0 for all.", min=0)] = 0
    plain: Annotated[bool, Option(help="Generate without a strategy.")] = False
    history: History = None
    chat: Annotated[bool, Option(help="Put texts into the model's chat format, if it has one.")] = True
    batch_size: BatchSize = 8
    max_new_tokens: NewTokens = 256
    seed: Annotated[int, Option(help="Seed; that of each row is its number added to it.")] = 0


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Train a drafter, in a clone of the repository: answers of the target, training, evaluation.

    The same command continues a stopped run. It runs the scripts of the folder recipes/, which an installed package
    does not have, with the libraries of the extra "train".

    What follows -- are arguments of the recipe.
    """

    model: Annotated[str, Argument(help="Hub id or folder of the target.")]
    recipe_arguments: Annotated[list[str], Argument(help="Arguments of the recipe, after --.")] = NONE
    data: Annotated[
        str,
        Option(help="Prompts: a .jsonl, .jsonl.gz, .json, .csv or .parquet file, a folder, or a dataset of the Hub."),
    ]
    kind: Annotated[
        Literal["eagle3", "medusa", "dflash", "dspark", "draft", "layer-skip"], Option(help="What to train.")
    ] = "eagle3"
    hours: Annotated[float, Option(help="Time for everything: fewer answers and steps if it is short.", min=0.01)] = 8.0
    output: Annotated[Path | None, Option(help="Folder for the result; MODEL-KIND if left out.")] = None
    max_new_tokens: NewTokens = 256
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan with its times, and stop.")] = False


@contextmanager
def errors() -> Iterator[None]:
    """Prints an expected error as one sentence and exits with code 2; without messages of other libraries meanwhile."""
    for name in ("torch.utils._pytree", "torchao", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, ImportError, MemoryError, RuntimeError, IndexError) as error:
        message = str(error)
        reason = str(error).split("\n", 1)[0]
        if isinstance(error, MemoryError) or "allocate" in reason or "out of memory" in reason:
            message = f"not enough memory for this; use a smaller batch, length, model or dtype ({reason})"
        elif isinstance(error, IndexError) and "index out of range in self" in reason:  # of an embedding
            message = f"a text has more tokens than the model has positions; give shorter ones ({reason})"
        elif isinstance(error, RuntimeError | IndexError):
            raise
        elif isinstance(error, OSError) and error.strerror and error.filename:
            message = f"cannot use {str(error.filename)!r}: {error.strerror}; name another file or folder"
        elif "custom code" in message or "trust_remote_code" in message:
            message = f"{reason}; --trust-remote-code runs the code of the repository"
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/] {escape(message)}", highlight=False)
        raise typer.Exit(2) from None


def terminal() -> Console:
    """A console for results: not cut at 80 columns where the output is piped."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=200)
