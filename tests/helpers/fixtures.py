"""Fixtures: the embedded model, a seed for every test, and one test for each folder of head fixtures."""

import json
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specgen  # noqa: F401  (installs the keyword)
from hf_specgen.targets import attention
from hf_specgen.targets.attention import grouped_sdpa
from tests.helpers import shared_draft, tiny_model
from tests.helpers.comparison import seed
from tests.helpers.encoder_decoder import encoder_decoder
from tests.helpers.head_fixtures import find_fixtures, target_of
from tests.helpers.models import SHARED, stateful_model
from tests.helpers.multimodal import multimodal_model
from tests.helpers.paths import BENCHMARK_ASSETS, REFERENCE_LM
from tests.helpers.strategies import medusa_heads

pytest_plugins = ["tests.helpers.recipes"]
settings.register_profile("tests", max_examples=200, deadline=None, derandomize=True)  # the same in every run
settings.load_profile("tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every draft-head fixture in the folder."""
    if "head_fixture" in metafunc.fixturenames:
        found = find_fixtures(metafunc.config.getoption("head_fixtures"))
        if not found:
            raise pytest.UsageError(f"no expected.json in {metafunc.config.getoption('head_fixtures')}")
        metafunc.parametrize("head_fixture", found, ids=lambda fixture: fixture.folder.name)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files of examples that `tempfile` makes lie in pytest's folder, which pytest removes."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed(0)


@pytest.fixture(scope="module", autouse=True)
def _models_of_the_file() -> Iterator[None]:
    """The tests of a file share their tiny models; what calls remember of a model never reaches another file."""
    yield
    models = (tiny_model, shared_draft, stateful_model, multimodal_model, encoder_decoder, target_of)
    for build in (*models, medusa_heads):
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


@pytest.fixture
def folded_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which `grouped_sdpa` was called."""
    calls: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(threading.get_ident())
        return grouped_sdpa(*args)

    monkeypatch.setattr(attention, "grouped_sdpa", counted)
    return calls
