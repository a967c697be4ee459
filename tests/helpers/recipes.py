"""Helpers of the recipe tests: a tiny target with a few conversations, short runs, runs as a script."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.helpers.paths import REFERENCE_LM, ROOT

FAST = ["--steps", "2", "--batch-size", "4", "--micro-batch-size", "2", "--max-length", "64", "--precision", "no"]
FAST += ["--warmup-steps", "0"]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state for the whole process; each recipe run is to have its own."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with the embedded model's tokenizer, and a few conversations."""
    path = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 8192}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(num_hidden_layers=4, tie_word_embeddings=True, **sizes, **special)
    AutoModelForCausalLM.from_config(config).save_pretrained(path / "target")
    AutoTokenizer.from_pretrained(REFERENCE_LM).save_pretrained(path / "target")
    lines = (ROOT / "benchmarks" / "assets" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[::12]]
    short = [{**row, "prompt": row["prompt"][:60], "response": row["response"][:60]} for row in rows]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short), encoding="utf-8")
    (path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short[:2]), encoding="utf-8")
    return path


def arguments(folder: Path, output: str, *more: str) -> list[str]:
    data = ["--target", str(folder / "target"), "--data", str(folder / "data.jsonl"), "--output", str(folder / output)]
    return [*data, *FAST, *more]


def run_as_script(recipe: str, arguments: list[str]) -> None:
    """In a process of its own: what `python recipes/RECIPE` does, or `accelerate launch` in each rank."""
    sys.argv = [recipe, *arguments]
    runpy.run_path(str(ROOT / "recipes" / recipe), run_name="__main__")


def stop_at(step: int) -> Any:
    def log(accelerator, progress, *others):
        if progress.step == step:
            raise KeyboardInterrupt

    return log
