"""Measurements: throughput of generation variants, acceptance, latency, workloads, intervals, memory, provenance."""
