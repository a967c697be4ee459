"""Compares speculation with plain `generate()` through the class of every published checkpoint; see `__main__`."""
