"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK_ASSETS = ROOT / "benchmarks" / "assets"
REFERENCE_LM = BENCHMARK_ASSETS / "reference-lm"
DRAFT_LM = BENCHMARK_ASSETS / "draft-lm"
TINY_ARCHITECTURES = ROOT / "tests" / "assets" / "tiny_architectures.json"
HEAD_FIXTURES = ROOT / "tests" / "assets" / "fixtures"
