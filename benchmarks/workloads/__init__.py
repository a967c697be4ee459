"""Prompts by domain, and targets and strategies with known behavior."""
