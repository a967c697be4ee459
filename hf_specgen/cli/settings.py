"""The options of every command: one dataclass each, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specgen.evaluation.settings import DTYPES, WorkloadSettings, setting

DEVICE = "cpu, cuda, cuda:1, mps …"


def argument(help: str) -> Any:
    """A required positional argument."""
    return field(metadata={"help": help, "argument": True})


def required(help: str, **more: Any) -> Any:
    """A required option; `more` as for `setting`."""
    return field(metadata={"help": help, **more})


@dataclass(frozen=True)
class DemoSettings(WorkloadSettings):
    """Options of `hf-specgen demo`."""

    max_new_tokens: int = setting(64, "Tokens per answer; fewer where not enough prompts fit into the time.", min=1)
    every: bool = setting(False, "Measure the embedded Medusa heads, DFlash head and layer skip too.", flag="--all")
    wide: int = setting(300, "Size of the second target, in million parameters; 0 for none.", min=0)
    seconds: float = setting(80.0, "Seconds to measure, over both targets; at least one prompt on each.", min=0)
    json_file: Path | None = setting(None, "Write the results to this file.", flag="--json")

    @property
    def widened(self) -> bool:
        """Whether there is a second target: the embedded model, made wider."""
        return self.wide > 0 and not self.model


@dataclass(frozen=True)
class DoctorSettings:
    """Options of `hf-specgen doctor`."""

    model: str = required("Hub id or folder of the target.", flags=("--model", "--target"))
    draft: str = setting("", "Hub id or folder of a draft model.")
    heads: str = setting("", "Hub id or folder of heads: Medusa, EAGLE, P-EAGLE, DFlash, speculators.")
    prompt: tuple[str, ...] = setting((), "A prompt like yours; may be given several times.")
    batch_size: int = setting(1, "Prompts per generate call.", min=1)
    length: int = setting(2048, "Tokens per row, prompt included, that must fit into memory.", min=1)
    temperature: float = setting(0.0, "Sampling temperature; 0 for greedy decoding.", min=0)
    max_new_tokens: int = setting(96, "Tokens per answer of the quick benchmark.", min=1)
    rounds: int = setting(3, "Runs of each prompt in the quick benchmark.", min=1)
    dtype: str = setting("auto", "Data type of the models; auto for that of the checkpoint.", choices=("auto", *DTYPES))
    device: str = setting("cpu", DEVICE)
    run: bool = setting(True, "Measure; without it no weights are loaded.")
    as_json: bool = setting(False, "Print JSON instead of a table.", flag="--json")


@dataclass(frozen=True)
class TuneSettings:
    """Options of `hf-specgen tune`."""

    model: str = argument("Hub id or folder of the target.")
    draft: str = setting("", "Hub id or folder of a draft model.")
    heads: str = setting("", "Hub id or folder of heads: Medusa, EAGLE, P-EAGLE, DFlash, speculators.")
    adapter: str = setting("", "Hub id or folder of an exit adapter.")
    output: Path | None = setting(None, "Measure the heads' acceptance too, and write them to this folder.")
    prompts: Path | None = setting(None, "JSONL rows {prompt, domain} for acceptance; the embedded ones if left out.")
    prompts_per_domain: int = setting(10, "Prompts from each domain.", min=1)
    max_new_tokens: int = setting(128, "Tokens per answer.", min=1)
    batch_size: tuple[int, ...] = setting((1,), "Rows to measure latencies for; may be given several times.", min=1)
    context: int = setting(256, "Cached tokens per row to measure latencies at.", min=1)
    dtype: str = setting("auto", "Data type of the target; auto for that of the checkpoint.", choices=("auto", *DTYPES))
    device: str = setting("cpu", DEVICE)
    target: str = setting("", "Earlier form: the target, with the heads as the first argument.")


@dataclass(frozen=True)
class ExportSettings:
    """Options of `hf-specgen export`."""

    heads: str = argument("Hub id or folder of heads: Medusa, EAGLE, P-EAGLE, DFlash.")
    to: str = required(
        "Program that reads them: medusa, tgi or vllm for Medusa heads; eagle, sglang or vllm for others."
    )
    output: Path = required("Folder to write to.")
    target: str = setting("", "Hub id or folder of the target, where its output matrix is needed (Medusa).")


@dataclass(frozen=True)
class ChatSettings:
    """Options of `hf-specgen chat`."""

    model: str = argument("Hub id or folder of the target.")
    draft: str = setting("", "Hub id or folder of a draft model.")
    heads: str = setting("", "Hub id or folder of draft heads of any format.")
    adapter: str = setting("", "Hub id or folder of an exit adapter.")
    system: str = setting("", "System prompt.")
    max_new_tokens: int = setting(512, "Tokens per answer.", min=1)
    temperature: float = setting(0.0, "Sampling temperature; 0 for greedy decoding.", min=0)
    seed: int = setting(0, "Seed of every answer, so that all strategies give the same one.")
    dtype: str = setting("auto", "Data type of the target; auto for that of the checkpoint.", choices=("auto", *DTYPES))
    device: str = setting("cpu", DEVICE)
    pack_weights: bool | None = setting(None, "Packed weights on a CPU; by default up to 1 GiB of them.")


@dataclass(frozen=True)
class GenerateSettings:
    """Options of `hf-specgen generate`."""

    model: str = argument("Hub id or folder of the target.")
    source: str = argument("JSONL file of prompts, or the id of a dataset of the Hub.")
    output: Path = argument("JSONL file to write: the rows of the source with their answers.")
    column: str = setting("prompt", "Column of the prompts: texts, or lists of chat messages.")
    answer_column: str = setting("answer", "Column to write.")
    split: str = setting("train", "Split of a dataset.")
    name: str = setting("", "Configuration of a dataset.")
    limit: int = setting(0, "Rows to use; 0 for all.", min=0)
    draft: str = setting("", "Hub id or folder of a draft model.")
    heads: str = setting("", "Hub id or folder of draft heads of any format.")
    adapter: str = setting("", "Hub id or folder of an exit adapter.")
    plain: bool = setting(False, "Generate without a strategy.")
    chat: bool = setting(True, "Put texts into the model's chat format, if it has one.")
    batch_size: int = setting(8, "Prompts per generate call, of similar length.", min=1)
    max_new_tokens: int = setting(256, "Tokens per answer.", min=1)
    temperature: float = setting(0.0, "Sampling temperature; 0 for greedy decoding.", min=0)
    seed: int = setting(0, "Seed; each batch has its own, derived from it.")
    dtype: str = setting("auto", "Data type of the target; auto for that of the checkpoint.", choices=("auto", *DTYPES))
    device: str = setting("", "cpu, cuda:1 …; the process's own if left out.")
    pack_weights: bool | None = setting(None, "Packed weights on a CPU; by default up to 1 GiB of them.")
