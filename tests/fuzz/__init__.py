"""Random tester: speculative against plain `generate()` on random models; see `tests/fuzz/__main__.py`."""
