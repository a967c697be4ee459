"""A Hub that cannot be reached, and a cache of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

CLOSED = "http://127.0.0.1:9"
"""An address at which nothing listens."""


@contextmanager
def unreachable_hub() -> Iterator[None]:
    """Connections to the Hub are refused in this block, although `HF_HUB_OFFLINE` is not set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, CLOSED)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", CLOSED)
        yield


def cached(cache: Path, name: str, files: Path, revision: str = "main") -> None:
    """Add a checkpoint to a cache of the Hub."""
    folder, commit = cache / f"models--org--{name}", "0123456789" * 4
    (folder / "snapshots").mkdir(parents=True)
    (folder / "snapshots" / commit).symlink_to(files)
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(commit)


def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the Hub's client read this cache."""
    for module in ("constants", "utils._cache_manager"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(cache))
