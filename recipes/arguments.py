"""The arguments of a recipe: a dataclass on top of `TrainingArguments`, read from presets, YAML files and flags."""

from __future__ import annotations

import json
import os
import signal
import sys
from _thread import interrupt_main
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import torch
import yaml
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.utils.import_utils import is_torch_bf16_gpu_available as gpu_has_bf16

Config = TypeVar("Config")
PRESETS = Path(__file__).with_name("presets.yaml")
POSITIVE = (
    "max_length", "per_device_train_batch_size", "batch_size", "evaluation_per_domain", "evaluation_tokens",
    "max_new_tokens", "anchors", "depth", "num_heads", "num_layers", "exit_layer", "rank", "limit",
    "loss_vocab_size",
)  # fmt: skip
LEAST = dict.fromkeys(POSITIVE, 1) | dict.fromkeys(("learning_rate", "warmup_steps", "weight_decay", "seed"), 0)
"""Lowest values of the arguments of all recipes."""
option: Any = HfArg
"""A field of an arguments dataclass with a default and a help text."""


class Options(dict[str, Any]):
    """A mapping; on the command line it is written in YAML, such as {r: 16, lora_alpha: 32}."""

    def __init__(self, values: str | Mapping[str, Any] | Iterable[tuple[str, Any]] = ()):
        given = yaml.safe_load(values) if isinstance(values, str) else values
        if isinstance(values, str) and not isinstance(given, dict):
            raise ArgumentTypeError(f"write a mapping such as {{r: 16}}, not {values!r}")
        super().__init__(given)


@dataclass(kw_only=True)
class DataArguments:
    """Where conversations come from and how they are written for the model."""

    preset: str | None = option(default=None, help="defaults by size of the target: 0.5b, 8b or 70b (presets.yaml)")
    data_config: str | None = option(default=None, help="configuration of a dataset of the Hub")
    data_split: str = option(default="train", help="split of a dataset")
    chat_template_kwargs: Options = option(
        default_factory=Options, help="for the chat template, such as {enable_thinking: false}; kept with the result"
    )

    def __post_init__(self) -> None:
        for name, lowest in LEAST.items():
            value = getattr(self, name, None)
            if value is not None and not value >= lowest:  # NaN is refused too
                raise ValueError(f"{name} must be at least {lowest}, got {value}")


@dataclass(kw_only=True)
class Arguments(DataArguments, TrainingArguments):
    """Arguments of every recipe that trains, beside those of Transformers' `TrainingArguments`.

    The defaults of most are in `presets.yaml`.
    """

    target: str = option(help="Hub id or folder of the target")
    data: str = option(
        help="conversations: a .jsonl, .jsonl.gz, .json, .csv or .parquet file, a folder, or a dataset of the Hub"
    )
    output_dir: str = option(aliases=["--output"], help="folder for the result")
    target_kwargs: Options = option(
        default_factory=Options, help="for the target's from_pretrained, such as {device_map: auto}"
    )
    shard_target: bool = option(default=False, help="shard the frozen target's layers over all processes (FSDP2)")
    features: str | None = option(default=None, help="folder to keep the target's hidden states in, computed once")
    max_length: int = option(default=2048, help="tokens of a conversation; what is beyond is cut off")
    packing: bool = option(default=False, help="fill each row of max_length tokens with several conversations")
    streaming: bool = option(default=False, help="read the data as they are needed, without storing them")
    batch_size: int | None = option(default=None, help="rows in a step, over all processes; sets the accumulation")
    loss: Options = option(
        default_factory=Options,
        help="weights of kl, ce, tv, lk, for DSpark of confidence too: {ce: 0.1, tv: 1.8, confidence: 1.0}",
    )
    decay: float = option(default=1.0, help="weight of each draft token's loss relative to the one before")
    evaluation: str | None = option(default=None, help="held-out prompts, in the same formats as data")
    evaluation_per_domain: int = option(default=20, help="evaluated prompts of each value of the column domain")
    evaluation_tokens: int = option(default=128, help="tokens of each answer in the evaluation")
    generation: Options = option(
        default_factory=Options, help="arguments of generate in the evaluation, by domain; default: for others"
    )
    dry_run: bool = option(default=False, help="measure three steps, print memory, steps and time, and stop")
    simulate: bool = option(default=False, help="print the accepted length on the held-out answers, without training")
    resume: bool = option(default=False, help="continue from the last checkpoint in output_dir, if there is one")
    overwrite: bool = option(default=False, help="replace an earlier result in output_dir")
    max_steps: int = option(default=-1, aliases=["--steps"], help="optimizer steps; -1: num_train_epochs decides")
    per_device_train_batch_size: int = option(
        default=8, aliases=["--micro_batch_size", "--micro-batch-size"], help="rows in a pass of one process"
    )
    bf16: bool = option(default=gpu_has_bf16(), help="compute in bfloat16; default: where the GPU has it")
    use_cpu: bool = option(default=not torch.accelerator.is_available(), help="even if there is an accelerator")

    def __post_init__(self) -> None:
        DataArguments.__post_init__(self)
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f"max_steps must be at least 1, or -1 for num_train_epochs, got {self.max_steps}")
        if not self.loss or not set(self.loss) <= {"kl", "ce", "tv", "lk", "confidence"}:
            raise ValueError(f"loss must weigh some of kl, ce, tv and lk, got {dict(self.loss)}")
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub needs hub_model_id, the id of the repository, such as user/name")
        if self.eval_strategy != "no" and self.evaluation is None:
            raise ValueError(f"eval_strategy={self.eval_strategy} needs evaluation, a file of held-out prompts")
        TrainingArguments.__post_init__(self)
        if self.batch_size is not None:
            rows = self.per_device_train_batch_size * self.world_size
            self.gradient_accumulation_steps, rest = divmod(self.batch_size, rows)
            if rest or not self.gradient_accumulation_steps:
                raise ValueError(
                    f"batch_size {self.batch_size} must be a multiple of per_device_train_batch_size "
                    f"{self.per_device_train_batch_size} times the number of processes, {self.world_size}"
                )

    @property
    def rows_per_step(self) -> int:
        """Rows in an optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    def own_values(self) -> dict[str, Any]:
        """The values that decide the result, for the card and to recognise the run that is resumed."""
        ours = {field.name for field in fields(type(self))} - {field.name for field in fields(TrainingArguments)}
        shared = {"learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_steps", "num_train_epochs"}
        shared |= {"seed", "optim", "bf16", "per_device_train_batch_size", "gradient_accumulation_steps"}
        unrelated = {"resume", "overwrite", "dry_run", "simulate", "features", "shard_target", "preset"}
        names = sorted((ours | shared) - unrelated)
        return dict(json.loads(json.dumps({name: getattr(self, name) for name in names}, default=str)))


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The values that have changed, as they were and as they are; empty if there are none."""
    changed = [name for name in now if name in earlier and earlier[name] != now[name]]
    return ", ".join(f"{name} {earlier[name]!r:.60} (now {now[name]!r:.60})" for name in changed)


def parse(config_class: type[Config], documentation: str | None, arguments: Sequence[str] | None = None) -> Config:
    """The arguments of a recipe: `--preset NAME`, then `--config FILE`, then flags, each overriding those before."""
    parser = HfArgumentParser(
        config_class,  # type: ignore[arg-type]
        usage="%(prog)s [--preset NAME] [--config FILE] [--option value ...]; --help lists all options",
        description=documentation,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file, such as those of recipes/configs")
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    finder.add_argument("--preset", default="")
    files = finder.parse_known_args(arguments)[0]
    try:
        _set_defaults(parser, preset(files.preset, config_class.__name__), None)
        if files.config is not None:
            _set_defaults(parser, yaml.safe_load(files.config.read_text(encoding="utf-8")), files.config)
        found = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True, look_for_args_file=False)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    if found[-1]:
        parser.error(f"unknown option {found[-1][0]}; --help lists all options")
    return found[0]


def preset(name: str, recipe: str) -> dict[str, Any]:
    """The defaults of all runs and those for a size of target; of each, those of one recipe override the others."""
    presets = dict(_all_presets())
    defaults, own = presets.pop("defaults"), recipe.removesuffix("Arguments").lower()
    if name and name not in presets:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(presets)}")
    chosen = presets.get(name, {})
    return {key: value for part in (defaults, chosen) for of in ("all", own) for key, value in part.get(of, {}).items()}


@cache
def _all_presets() -> dict[str, Any]:
    """The file of presets; reading it takes a tenth of a second, and `hf-specgen train` asks for them five times."""
    presets: dict[str, Any] = yaml.safe_load(PRESETS.read_text(encoding="utf-8"))
    return presets


def _set_defaults(parser: ArgumentParser, values: Any, file: Path | None) -> None:
    """Make values the defaults of the options with their names; keys of a file must be such names."""
    if not isinstance(values, dict):
        raise ValueError(f"{file} must consist of `key: value` lines")
    for name, value in values.items():
        option = parser._option_string_actions.get(f"--{name}")
        if option is not None:
            # Strings are read by argparse like those of flags.
            option.default = json.dumps(value) if isinstance(value, dict) else value
            option.required = False
        elif file is not None:
            raise ValueError(f"{file}: unknown key {name!r}; --help lists all keys")


def public(value: Any) -> Any:
    """A value of an argument for others to read: of a path on this machine the last part alone."""
    return Path(value).name if isinstance(value, str) and value and Path(value).exists() else value


SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = "stopped; what was finished is kept, and the same command goes on"
FULL_DISK = ("No space left on device", "PytorchStreamWriter failed writing", "inline_container")
"""What Python and safetensors, and PyTorch, say when a file cannot be written."""


@contextmanager
def calling_at_signals(act: Callable[[], None]) -> Iterator[None]:
    """Call a function at the first SIGINT or SIGTERM; the next one raises `KeyboardInterrupt`, as SIGINT does else."""

    def handle(*_: Any) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.default_int_handler)
        act()

    before = {one: signal.signal(one, handle) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Raise `KeyboardInterrupt` at the end of the block, not inside it; the value is a function to raise it earlier.

    Datasets computes digests of arguments in `try` blocks that catch every exception, `KeyboardInterrupt` too.
    """
    received: list[bool] = []

    def raise_if_received() -> None:
        if received:
            raise KeyboardInterrupt

    with calling_at_signals(lambda: received.append(True)):
        yield raise_if_received
    raise_if_received()


@contextmanager
def _repeated_interrupts() -> Iterator[None]:
    """Raise a `KeyboardInterrupt` again that Python dropped because a weak reference's callback was running.

    Python reports an exception of a callback or of `__del__` to `sys.unraisablehook`, and the program goes on.
    """
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        # Raised in this function it would be dropped again. SIGINT may be ignored, SIGTERM is not.
        Timer(0.01, interrupt_main, (signal.SIGTERM,)).start()

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def expected_errors() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt`, and a full disk an `OSError` that says so, whatever was being written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _repeated_interrupts():
            yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not any(text in str(error) for text in FULL_DISK):
            raise
        raise OSError("the disk is full; free some space and start again, with --resume true in training") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def launch(main: Callable[[], Any]) -> None:
    """Run the script; a signal or an expected error ends it with one sentence instead of a traceback."""
    name = Path(sys.argv[0]).name
    try:
        with expected_errors():
            _check_processes()
            main()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt as stop:
        print(f"{name}: {stop.args[0] if stop.args else STOPPED}", file=sys.stderr)
        sys.exit(130)


def _check_processes() -> None:
    """Raise where `accelerate launch --cpu --num_processes 2` has started one process alone, as Accelerate 1 does."""
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if asked and "WORLD_SIZE" not in os.environ and PartialState(cpu=True).num_processes == 1:
        raise ValueError(
            "accelerate launch --cpu starts one process, whatever --num_processes says; for several processes on CPUs "
            "use torchrun --nproc_per_node 2 instead of it"
        )
