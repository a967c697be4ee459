"""A warning, once for a target and a draft model with another tokenizer, that drafting is slower than plain decoding.

It is issued from what the depth policy has observed: the tokens of the steps with a draft, and their time by the
latency model. Nothing is measured for it.
"""

from __future__ import annotations

import warnings
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hf_specgen import compat
from hf_specgen.candidates.base import DraftCall
from hf_specgen.depth.policy import DraftingSpeed

MIN_DRAFTED_STEPS = 32
"""Steps with a draft, over all calls, before a warning: the standard error of their mean number of tokens is then about
5%."""
WARN_BELOW_SPEEDUP = 0.95
"""Speed relative to plain decoding below which the warning is issued: 1 less the standard error above."""

_observed: WeakKeyDictionary[Any, dict[str, DraftingSpeed | None]] = WeakKeyDictionary()
_lock = Lock()


class DraftTranslation(NamedTuple):
    """A draft model and how its drafts are translated.

    Args:
        draft: its name.
        method: how drafts are translated, as a part of a sentence.
        shared: fraction of the prompt's tokens that both vocabularies have.
    """

    draft: str
    method: str
    shared: float


def warn_if_slower(call: DraftCall, translation: DraftTranslation) -> None:
    """Count what the call has observed, and warn, once for each target and draft, if drafting is slower.

    Args:
        call: a call that ends.
        translation: of its drafts.
    """
    speed = None if call.depth is None else call.depth.drafting_speed
    if call.model is None or speed is None:
        return
    with _lock:
        pairs = _observed.setdefault(call.model, {})
        before = pairs.get(translation.draft, DraftingSpeed())
        if before is None:  # the warning has been issued
            return
        total = before.plus(speed)
        slower = total.steps >= MIN_DRAFTED_STEPS and total.tokens < WARN_BELOW_SPEEDUP * total.cost
        pairs[translation.draft] = None if slower else total
    if slower:
        warnings.warn(
            f"the draft model {translation.draft!r}, which has another tokenizer than the target, makes generation "
            f"slower here: its {total.steps} drafts gave {total.tokens / total.steps:.2f} tokens per step, and a step "
            f"with a draft takes {total.cost / total.steps:.2f} times as long as a plain one (drafts are translated by "
            f"{translation.method}; {translation.shared:.0%} of the prompt's tokens are in both vocabularies). Most "
            "steps are therefore plain. Use a draft model with the target's tokenizer, or candidate_generator='auto'.",
            stacklevel=compat.stacklevel_of_user(),
        )
