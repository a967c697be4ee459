"""Names that moved to `hf_specgen.counters`."""

from hf_specgen.counters import CallTotals

__all__ = ["CallTotals"]
