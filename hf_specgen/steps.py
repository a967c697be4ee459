"""Names that moved to `hf_specgen.counters`."""

from hf_specgen.counters import RowStep, StepPasses

__all__ = ["RowStep", "StepPasses"]
