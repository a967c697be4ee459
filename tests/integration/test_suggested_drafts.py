"""A draft model that reads the drafts of n-grams in its first pass: the same logits, fewer passes, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import AdaptiveDepth, CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.candidates.draft_model import _DraftModelSession
from hf_specgen.tree import DraftTree
from tests.helpers.generation import plain_and_ours

GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
TEXT = "one two three four five six seven eight nine ten, and again: one two three four five six"
PROMPTS = [TEXT, "def f(a, b):\n    return a + b\n\ndef g(a, b):\n    return"]


def _strategy(draft: Any) -> CombinedCandidates:
    return CombinedCandidates([NgramCandidates(), DraftModelCandidates(draft)], policy=AdaptiveDepth(GPU_LIKE))
