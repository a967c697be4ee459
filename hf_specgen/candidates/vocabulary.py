"""Checks whether a draft model and its target have the same tokenizer.

The sizes of their embedding tables are no criterion: Qwen models have tables of 151,936 and 152,064 rows for one
tokenizer, since the tables are padded. So the tokenizers are compared, if they can be loaded from where the models
came from.
"""

from __future__ import annotations

import hashlib
import logging
from threading import Lock
from time import monotonic
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedModel

from hf_specgen.heads.checkpoint import first_line

logger = logging.getLogger("hf_specgen")
RETRY_AFTER = 300.0
"""Seconds until a tokenizer that could not be loaded is tried again: a failed attempt over the network takes long."""
MAX_KNOWN = 64
"""Tokenizers whose digests are kept, about 200 bytes each."""


class Vocabulary(NamedTuple):
    """Identifies a vocabulary.

    Args:
        size: number of tokens.
        digest: hash of all pairs of a token and its id.
    """

    size: int
    digest: str


class _Failure(NamedTuple):
    reason: str
    time: float


_known: dict[str, Vocabulary | _Failure] = {}
_lock = Lock()


def have_same_vocabulary(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether the two models have the same tokenizer; embedding tables may be padded to different sizes.

    Args:
        draft, target: loaded models. Their tokenizers are loaded from the same folder or repository.

    Raises:
        ValueError: if the tokenizers cannot be loaded while the sizes of the tables differ.
    """
    if draft is target or draft.name_or_path == target.name_or_path != "":
        return True
    names = str(draft.name_or_path or ""), str(target.name_or_path or "")
    of_draft, of_target = (vocabulary_of(name) for name in names)
    if of_draft is None or of_target is None:
        sizes = [model.config.get_text_config().vocab_size for model in (draft, target)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft has a vocabulary of {sizes[0]}, the target of {sizes[1]}, and their tokenizers could not "
                f"be compared ({_reason(names)}); load both models from folders that hold their tokenizers"
            )
    return of_draft is None or of_target is None or of_draft == of_target


def vocabulary_of(name: str) -> Vocabulary | None:
    """The vocabulary of the tokenizer in a folder or repository; None if there is none, or it cannot be loaded."""
    if not name:
        return None
    with _lock:
        known = _known.get(name)
    if known is None or (isinstance(known, _Failure) and monotonic() - known.time > RETRY_AFTER):
        known = _load(name)
        with _lock:
            if len(_known) >= MAX_KNOWN:
                del _known[next(iter(_known))]
            _known[name] = known
    return known if isinstance(known, Vocabulary) else None


def digest(vocabulary: dict[str, int]) -> Vocabulary:
    """The size and the hash of a vocabulary.

    Example:
        >>> digest({"a": 0, "b": 1}) == digest({"b": 1, "a": 0}), digest({"a": 0}) == digest({"a": 1})
        (True, False)
    """
    text = hashlib.sha256()
    for token, index in sorted(vocabulary.items()):
        text.update(f"{index}:{len(token)}:{token}".encode("utf-8", "surrogatepass"))
    return Vocabulary(len(vocabulary), text.hexdigest())


def _load(name: str) -> Vocabulary | _Failure:
    try:
        return digest(AutoTokenizer.from_pretrained(name).get_vocab())
    except Exception as error:  # damaged files and missing packages raise errors of many types
        reason = f"the tokenizer of {name!r} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        logger.warning("%s; whether its vocabulary is that of the other model is not checked", reason)
        return _Failure(reason, monotonic())


def _reason(names: tuple[str, str]) -> str:
    with _lock:
        failures = [known.reason for name in names if isinstance(known := _known.get(name), _Failure)]
    return "; ".join(failures) or "they were not loaded from a folder or repository"
