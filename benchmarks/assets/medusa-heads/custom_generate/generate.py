"""Speculative decoding with the Medusa heads in this repository; the tokens are those of plain generate()."""

from functools import lru_cache
from typing import Any

HEADS = "benchmarks/assets/medusa-heads"


@lru_cache(maxsize=1)
def candidates() -> Any:
    """The heads, loaded once."""
    try:
        from hf_specgen import MedusaCandidates
    except ImportError:
        raise ImportError(f"{HEADS} needs hf_specgen, which is not installed: pip install hf-specgen") from None
    return MedusaCandidates.from_pretrained(HEADS)


def generate(model: Any, **arguments: Any) -> Any:
    """What `model.generate(candidate_generator=...)` returns."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return model.generate(candidate_generator=candidates(), **arguments)
