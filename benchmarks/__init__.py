"""Benchmarks of hf_specgen."""
