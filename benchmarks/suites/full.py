"""Every strategy and its peer in Transformers, by domain and along batch size, temperature and context length."""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

SUITE = Suite(Plan())
