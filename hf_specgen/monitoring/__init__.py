"""Monitors of running calls: statistics over a window, Prometheus counters, plots."""
