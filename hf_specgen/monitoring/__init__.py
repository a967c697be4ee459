"""Watching speculation while it runs: windowed figures, Prometheus counters, plots."""
