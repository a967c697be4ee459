"""The embedded heads on the embedded model: the same tokens in every mode, with drafts of which most are accepted."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import AdaptiveDepth, AutoCandidates, CombinedCandidates, NgramCandidates
from hf_specgen.evaluation.workloads import EMBEDDED_DSPARK, EMBEDDED_EAGLE
from tests.helpers import SAMPLING, assert_same_tokens

HEADS = [folder for folder in (EMBEDDED_EAGLE, EMBEDDED_DSPARK) if folder.exists()]
PROMPTS = ("def add(x, y):", "Once upon a time, in a small town", "1, 2, 3,")
GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"k": 4},
    "tree": {"k": 5, "tree": 16},
    "auto": {"policy": AdaptiveDepth(GPU_LIKE)},
}
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def strategy(folder: Path, shape: str) -> AutoCandidates:
    """The head of a folder with the settings of a shape, loaded once for all tests."""
    return AutoCandidates.from_pretrained(folder, **SHAPES[shape])


def inputs(tokenizer: Any, batch: int) -> dict[str, torch.Tensor]:
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        return dict(tokenizer(list(PROMPTS[:batch]), return_tensors="pt", padding=True))
    finally:
        tokenizer.padding_side = side


@pytest.mark.parametrize(
    ("shape", "sampling", "batch"),
    [("chain", "sampled", 3), ("tree", "greedy", 1), ("tree", "sampled", 3), ("auto", "sampled", 1)],
)
@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_trained_head_same_tokens(
    folder: Path, shape: str, sampling: str, batch: int, reference_model: Any, tokenizer: Any
) -> None:
    candidates = strategy(folder, shape)
    statistics = assert_same_tokens(
        reference_model, inputs(tokenizer, batch), candidates, max_new_tokens=10, **SAMPLING[sampling]
    )
    assert statistics.accepted > 0


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_trained_head_with_ngrams_same_tokens(folder: Path, reference_model: Any, tokenizer: Any) -> None:
    candidates = CombinedCandidates([NgramCandidates(), AutoCandidates.from_pretrained(folder)])
    assert_same_tokens(reference_model, inputs(tokenizer, 3), candidates, max_new_tokens=16)
