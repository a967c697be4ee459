"""Decodes with the Medusa heads of this repository, by hf_specgen: the same tokens as plain generate(), sooner."""

from functools import lru_cache

HEADS = "benchmarks/assets/medusa-heads"


@lru_cache(maxsize=1)
def candidates():
    """The heads, loaded once."""
    try:
        from hf_specgen import MedusaCandidates
    except ImportError:
        raise ImportError(f"{HEADS} is decoded by hf_specgen, which is not installed: pip install hf_specgen") from None
    return MedusaCandidates.from_pretrained(HEADS)


def generate(model, **arguments):
    """What `model.generate(candidate_generator=...)` returns."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return model.generate(candidate_generator=candidates(), **arguments)
