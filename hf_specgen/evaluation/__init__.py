"""Measuring: timing several ways to generate, acceptance and latency, workloads, intervals, memory, provenance."""
