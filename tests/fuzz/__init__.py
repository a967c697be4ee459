"""Random tester: speculative against plain `generate()` on random models, strategies and settings.

Run `python -m tests.fuzz --minutes 5 --seed 1`; see `tests/fuzz/__main__.py`.
"""
