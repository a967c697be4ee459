"""Measuring: timing several ways to generate, acceptance statistics, workloads, intervals, memory, provenance."""
