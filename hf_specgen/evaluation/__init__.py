"""Measurements of generation variants, and the settings of a workload. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class WorkloadSettings:
    """A target, and the prompts that strategies are compared on.

    Args:
        model: Hub id or folder of the target; the embedded model if empty.
        prompt: the user's own prompts.
        prompts: JSONL file of rows {prompt, domain}, or a text file with a prompt a line; the embedded ones if None.
        prompts_per_domain: prompts from each domain.
        dtype, device: of the target.
    """

    model: str = ""
    prompt: Sequence[str] = ()
    prompts: Path | None = None
    prompts_per_domain: int = 5
    dtype: str = "float32"
    device: str = "cpu"
