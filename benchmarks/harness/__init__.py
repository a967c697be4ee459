"""Runs a plan: interleaves all variants on the same prompts and records every measurement."""
