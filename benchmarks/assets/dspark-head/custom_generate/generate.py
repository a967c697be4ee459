"""Speculative decoding with the drafter in this repository; the tokens are those of plain generate()."""

from functools import lru_cache
from typing import Any

DRAFTER = "benchmarks/assets/dspark-head"


@lru_cache(maxsize=1)
def candidates() -> Any:
    """The drafter, loaded once."""
    try:
        from hf_specgen import AutoCandidates
    except ImportError:
        raise ImportError(f"{DRAFTER} needs hf_specgen, which is not installed: pip install hf-specgen") from None
    return AutoCandidates.from_pretrained(DRAFTER)


def generate(model: Any, **arguments: Any) -> Any:
    """What `model.generate(candidate_generator=...)` returns."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return model.generate(candidate_generator=candidates(), **arguments)
