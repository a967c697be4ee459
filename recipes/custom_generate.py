"""The code in a repository of Medusa heads that `generate(custom_generate=...)` runs."""

from __future__ import annotations

from pathlib import Path

CUSTOM_GENERATE = '''\
"""Speculative decoding with the Medusa heads in this repository; the tokens are those of plain generate()."""

from functools import lru_cache
from typing import Any

HEADS = {heads!r}


@lru_cache(maxsize=1)
def candidates() -> Any:
    """The heads, loaded once."""
    try:
        from hf_specgen import MedusaCandidates
    except ImportError:
        raise ImportError(f"{{HEADS}} needs hf_specgen, which is not installed: pip install hf-specgen") from None
    return MedusaCandidates.from_pretrained(HEADS)


def generate(model: Any, **arguments: Any) -> Any:
    """What `model.generate(candidate_generator=...)` returns."""
    arguments = {{name: value for name, value in arguments.items() if value is not None}}
    return model.generate(candidate_generator=candidates(), **arguments)
'''


def write_custom_generate(folder: str | Path, heads: str) -> None:
    """Write `custom_generate/generate.py` into a folder of heads."""
    path = Path(folder) / "custom_generate" / "generate.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CUSTOM_GENERATE.format(heads=heads), encoding="utf-8")
