"""Benchmarks of hf_specgen: `python -m benchmarks --help`."""
