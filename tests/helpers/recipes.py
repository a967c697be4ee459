"""Helpers of the recipe tests: a tiny target with a few conversations, short runs, runs as a script."""

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
from tests.helpers.processes import started

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
    """In a process of its own: what `python recipes/RECIPE` does, or `accelerate launch` in each rank.

    Modules of the folder are imported anew, from the folder as Python would put it into the path.
    """
    script = ROOT / "recipes" / recipe
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == script.parent:
            del sys.modules[name]
    sys.path[:] = [str(script.parent), *(path for path in sys.path if Path(path) != script.parent)]
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


class LaunchedScript:
    """Stands for `subprocess.Popen` in a launcher: forks instead of importing PyTorch and Transformers once more.

    Args:
        command: interpreter, recipe and its arguments.
        env: of the new process.
    """

    returncode: int | None = None

    def __init__(self, command: list[str], env: dict[str, str]):
        interpreter, script, *given = command
        assert interpreter == sys.executable and Path(script).parent == ROOT / "recipes"
        self._process = started(run_as_script, Path(script).name, given, environment=env)

    def wait(self) -> None:
        self._process.join()
        self.returncode = self._process.exitcode


def stop_at(step: int) -> Any:
    def log(accelerator, progress, *others):
        if progress.step == step:
            raise KeyboardInterrupt

    return log
