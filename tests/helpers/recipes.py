"""Helpers of the recipe tests: a tiny target with a few conversations, short runs, runs as a script."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.helpers.paths import REFERENCE_LM, ROOT

FAST = ["--steps", "2", "--batch-size", "4", "--micro-batch-size", "2", "--max-length", "96", "--bf16", "false"]
FAST += ["--warmup-steps", "0", "--logging-steps", "1", "--save-strategy", "no", "--disable-tqdm", "true"]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state for the whole process; each recipe run is to have its own."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with the embedded model's tokenizer; conversations of three turns, and of one with domains."""
    path = tmp_path_factory.mktemp("recipes")
    save_tiny(LlamaConfig(num_hidden_layers=4, tie_word_embeddings=True, **SIZES), path / "target")
    lines = (ROOT / "benchmarks" / "assets" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[::6]]
    short = [{**row, "prompt": row["prompt"][:30], "response": row["response"][:40]} for row in rows]
    write_rows(path / "data.jsonl", short[::2])
    write_rows(path / "held-out.jsonl", short[:2])
    turns = zip(short[::3], short[1::3], short[2::3], strict=False)
    conversations = [[message for row in some for message in pair(row)] for some in turns]
    write_rows(path / "messages.jsonl", [{"messages": messages} for messages in conversations])
    write_rows(path / "questions.jsonl", [{"messages": pair(row)[:1]} for row in short[:1]])
    return path


VOCABULARY = 1024
"""Tokens of the tiny targets: to load a tokenizer of all 8,192 takes longer than to train with it."""
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": VOCABULARY}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def save_tiny(config: Any, folder: Path) -> None:
    """Save a random model of this config with the first tokens of the embedded model's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(REFERENCE_LM).save_pretrained(folder)
    file = folder / "tokenizer.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    pairs = saved["model"]
    pairs["vocab"] = {text: token for text, token in pairs["vocab"].items() if token < VOCABULARY}
    pairs["merges"] = [pair for pair in pairs["merges"] if "".join(pair) in pairs["vocab"]]
    file.write_text(json.dumps(saved), encoding="utf-8")


def pair(row: dict[str, Any]) -> list[dict[str, str]]:
    """Question and answer of a row as messages."""
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def arguments(folder: Path, output: str, *more: str, data: str = "data.jsonl") -> list[str]:
    given = ["--target", str(folder / "target"), "--data", str(folder / data), "--output", str(folder / output)]
    return [*given, *FAST, *more]


def losses(folder: Path) -> list[float]:
    """The logged losses of the last checkpoint in a folder, one for each step."""
    last = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    return [entry["loss"] for entry in json.loads(last.read_text())["log_history"] if "loss" in entry]


def run_as_script(recipe: str, arguments: list[str]) -> None:
    """In a process of its own: what `python recipes/RECIPE` does, with modules of the folder imported anew."""
    script = ROOT / "recipes" / recipe
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == script.parent:
            del sys.modules[name]
    sys.path[:] = [str(script.parent), *(path for path in sys.path if Path(path) != script.parent)]
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def run_sharded(recipe: str, arguments: list[str], config: str | None) -> None:
    """In a rank: `run_as_script` in the environment that `accelerate launch --config_file` makes.

    Accelerate shards a drafter in groups of accelerators only: the group of CPU processes is declared to be one.
    """
    if config is None:
        return run_as_script(recipe, arguments)
    path = str(ROOT / "recipes" / "configs" / config)
    options = ["--config_file", path, "--num_processes", "2", "--mixed_precision", "no", recipe]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    os.environ |= prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    os.environ |= {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    with mock.patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)):
        run_as_script(recipe, [*arguments, "--use-cpu", "false"])
