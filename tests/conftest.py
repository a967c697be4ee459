"""Fixtures: the embedded model, a profile directory of its own for every test, and markers by folder."""

from __future__ import annotations

import gc
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specgen  # noqa: F401  (installs the keyword)
from tests.helpers import shared_draft, tiny_model
from tests.helpers.comparison import seed
from tests.helpers.encoder_decoder import encoder_decoder
from tests.helpers.head_fixtures import find_fixtures, target_of
from tests.helpers.models import SHARED
from tests.helpers.multimodal import multimodal_model
from tests.helpers.paths import BENCHMARK_ASSETS, REFERENCE_LM
from tests.helpers.stateful import stateful_model

pytest_plugins = ["tests.helpers.recipes"]

TIERS = ("unit", "integration", "integrations", "slow")
LONGEST_FIRST = ("slow", "integrations", "integration")
_profile_directories = itertools.count()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with the name of its folder; doctests count as unit tests.

    The full matrix of architectures runs only if asked for. Folders with long files come first: the last files are
    those with quick tests, so that several workers end at about the same time.
    """
    if not config.getoption("all_architectures"):
        left_out = [item for item in items if item.get_closest_marker("all_architectures")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("all_architectures")]
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.unit)
        for tier in TIERS:
            if Path(__file__).parent / tier in item.path.parents:
                item.add_marker(getattr(pytest.mark, tier))
    items.sort(key=lambda item: next((place for place, tier in enumerate(LONGEST_FIRST) if tier in item.keywords), 9))


def pytest_collection_finish() -> None:
    """Exempt all that is loaded by now from garbage collection, which would traverse it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


HEAD_FIXTURES = Path(__file__).parent / "assets" / "fixtures"


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
    group.addoption(
        "--all-architectures", action="store_true", help="run every strategy on every architecture, which takes an hour"
    )
    group.addoption("--thread-seconds", type=float, default=8, help="how long the threads of tests/slow run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every draft-head fixture in the folder."""
    if "head_fixture" in metafunc.fixturenames:
        found = find_fixtures(metafunc.config.getoption("head_fixtures"))
        if not found:
            raise pytest.UsageError(f"no expected.json in {metafunc.config.getoption('head_fixtures')}")
        metafunc.parametrize("head_fixture", found, ids=lambda fixture: fixture.folder.name)


@pytest.fixture(autouse=True)
def _isolated(_profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed seed, and no latency profile of the user or of another test."""
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(_profiles / str(next(_profile_directories))))
    seed(0)


@pytest.fixture(scope="module", autouse=True)
def _models_of_the_file() -> Iterator[None]:
    """The tests of a file share their tiny models; what calls remember of a model never reaches another file."""
    yield
    for build in (tiny_model, shared_draft, stateful_model, multimodal_model, encoder_decoder, target_of):
        build.cache_clear()


@pytest.fixture(scope="session")
def reference_model():
    model = AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32).eval()
    SHARED.add(model)
    return model


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE_LM)


@pytest.fixture(scope="session")
def edit_prompts() -> list[str]:
    lines = (BENCHMARK_ASSETS / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["prompt"] for row in rows if row["domain"] == "edit"]
