"""Speculative decoding by hf_specgen for `model.generate(custom_generate=…)`: the tokens of plain `generate`."""

import importlib
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY, REVISION = "OWNER/hf-specgen", "main"
"""Where the package is fetched from if it is not installed; a release writes its tag in place of the branch."""


@cache
def package() -> Any:
    """The package hf_specgen: the installed one, or else this repository's, fetched once into the cache of the Hub."""
    try:
        return importlib.import_module("hf_specgen")
    except ModuleNotFoundError as error:
        if error.name != "hf_specgen":  # a library that it needs
            raise
    logging.getLogger(__name__).warning("hf_specgen is not installed: using that of %s at %s", REPOSITORY, REVISION)
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(REPOSITORY, revision=REVISION, allow_patterns="hf_specgen/**")
    except Exception as error:  # no network, no such repository, a cache that cannot be written
        raise ImportError(
            f"hf_specgen is not installed and could not be fetched from {REPOSITORY} at {REVISION} "
            f"({type(error).__name__}: {error}); install it: pip install hf-specgen"
        ) from error
    sys.path.append(str(Path(folder)))
    return importlib.import_module("hf_specgen")


@cache
def drafter(draft: str) -> Any:
    """The strategy of a checkpoint, loaded once."""
    return package().AutoCandidates.from_pretrained(draft)


def generate(model: Any, draft: str | None = None, **arguments: Any) -> Any:
    """What `model.generate(candidate_generator=…)` returns.

    Args:
        model: the target.
        draft: id or folder of a draft model or draft head; None drafts from the text ("auto").
        arguments: those of `generate`, and the keywords of hf_specgen but `candidate_generator`.
    """
    package()
    given = {name: value for name, value in arguments.items() if value is not None}
    return model.generate(candidate_generator=drafter(draft) if draft else "auto", **given)
