"""Measurements of generation variants, and the settings of a workload.

The command line builds its options from these dataclasses, so this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
VERIFICATIONS = ("exact", "rejection", "typical")


def setting(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field with a help text, and maybe `min`, `choices`, or its `flags` on the command line."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class WorkloadSettings:
    """A target, the drafters that are compared on it, and the prompts."""

    model: str = setting("", "Hub id or folder of the target; the embedded model if left out.")
    prompt: tuple[str, ...] = setting((), "A prompt of your own; may be given several times.")
    prompts: Path | None = setting(None, "JSONL file of rows {prompt, domain}, or a text file with a prompt a line.")
    prompts_per_domain: int = setting(5, "Prompts from each domain.", min=1)
    k: int = setting(16, "Maximum draft depth of n-grams, in tokens.", min=1)
    draft: str = setting("", "Hub id or folder of a draft model.")
    adapter: str = setting("", "Hub id or folder of an exit adapter.")
    heads: str = setting("", "Hub id or folder of heads: Medusa, EAGLE, P-EAGLE, DFlash, speculators.")
    batch_size: int = setting(1, "Prompts per generate call.", min=1)
    max_new_tokens: int = setting(128, "Tokens per answer.", min=1)
    dtype: str = setting("float32", "Data type of the target.", choices=DTYPES)
    device: str = setting("cpu", "cpu, cuda, cuda:1, mps …")
    seed: int = setting(0, "Seed of the sampled domains.")
    verification: str = setting("exact", "How draft tokens are verified; typical is lossy.", choices=VERIFICATIONS)
