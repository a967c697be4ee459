"""Fixtures: the embedded model, and tiny random models of every architecture on the list."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specgen  # noqa: F401  (installs the keyword)

pytest_plugins = ["tests.recipe_helpers"]

ROOT = Path(__file__).resolve().parents[1]
REFERENCE_LM = ROOT / "benchmarks" / "assets" / "reference-lm"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def reference_model():
    return AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE_LM)


@pytest.fixture(scope="session")
def edit_prompts() -> list[str]:
    lines = (ROOT / "benchmarks" / "assets" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["prompt"] for row in rows if row["domain"] == "edit"]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A small benchmark run with everything in it."""
    from tests.bench_run import measured

    return measured(tmp_path_factory.mktemp("bench"))
