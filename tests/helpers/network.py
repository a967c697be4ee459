"""A Hub that cannot be reached."""

from collections.abc import Iterator
from contextlib import contextmanager

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
