"""Fixtures of the tests with other libraries: a model that may be changed, and prompts that repeat themselves."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.paths import REFERENCE_LM

CODE = "def add(x, y):\n    return x + y\n\ndef multiply(x, y):\n"


@pytest.fixture
def model() -> Any:
    """The embedded model, loaded for one test."""
    return AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32).eval()


@pytest.fixture
def prompt() -> str:
    """A prompt whose continuation n-grams can draft."""
    return CODE


@pytest.fixture(autouse=True)
def no_compilation() -> Iterator[None]:
    """Grammar libraries compile their mask kernels, which takes longer than all tests together."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def no_fall_back() -> Iterator[None]:
    """A call that falls back to plain generation is an error here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("error", message="a strategy is attached")
        yield
