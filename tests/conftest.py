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
from tests.head_fixtures import find_fixtures

pytest_plugins = ["tests.recipe_helpers"]

ROOT = Path(__file__).resolve().parents[1]
REFERENCE_LM = ROOT / "benchmarks" / "assets" / "reference-lm"


HEAD_FIXTURES = ROOT / "tests" / "assets" / "fixtures"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_specgen")
    # pytest has a flag of this name that lists its own fixtures; here only its alias --funcargs does.
    if hasattr(group, "_arggroup"):  # pytest 9
        group._arggroup.conflict_handler = "resolve"
    else:
        for option in (option for other in parser._groups for option in other.options):
            option._long_opts = [name for name in option._long_opts if name != "--fixtures"]
    group.addoption(
        "--fixtures",
        dest="head_fixtures",
        metavar="DIR",
        type=Path,
        default=HEAD_FIXTURES,
        help="folder of draft-head fixtures, with their targets in DIR/targets",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every draft-head fixture in the folder."""
    if "head_fixture" in metafunc.fixturenames:
        found = find_fixtures(metafunc.config.getoption("head_fixtures"))
        if not found:
            raise pytest.UsageError(f"no expected.json in {metafunc.config.getoption('head_fixtures')}")
        metafunc.parametrize("head_fixture", found, ids=lambda fixture: fixture.folder.name)


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
