"""Suites: a plan and the tables that it is made for. `python -m benchmarks suite NAME`."""

from benchmarks.harness.plan import Suite
from benchmarks.suites import batches, domains, drafting, full, heads, memory, projected

SUITES: dict[str, Suite] = {
    "full": full.SUITE,
    "domains": domains.SUITE,
    "batches": batches.SUITE,
    "drafting": drafting.SUITE,
    "heads": heads.SUITE,
    "memory": memory.SUITE,
    "projected": projected.SUITE,
}
