"""Measurements of generation variants: workloads, times, T(q)."""
