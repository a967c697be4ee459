"""Defects that are known and not yet repaired: what the random tester finds of them does not count as a failure.

An entry is removed together with the defect. A wrong entry hides a failure, so each is as narrow as it can be: the case
and the kind of difference must both fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz.cases import Case
from tests.fuzz.checks import Difference

WRONG_TEXT = {"tokens", "random state", "stream", "scores", "logits"}


class KnownDefect(NamedTuple):
    """A defect, and which failures are its."""

    name: str
    description: str
    fits: Callable[[Case, Difference], bool]


def known_defect(case: Case, differences: list[Difference]) -> KnownDefect | None:
    """The known defect that all differences of a case belong to, if there is one for each of them."""
    found = [next((d for d in KNOWN_DEFECTS if d.fits(case, difference)), None) for difference in differences]
    return found[0] if found and all(found) else None


def _skips(case: Case) -> bool:
    return any(name.startswith("skip") for name in case.strategies())


WRONG_LAYER_SKIP = {"nanochat", "ctrl", "biogpt", "gpt_bigcode", "xglm", "gpt_neo"}
CRASHING_LAYER_SKIP = {"gemma3n_text", "gemma4_unified_text", "openai-gpt"}

KNOWN_DEFECTS: tuple[KnownDefect, ...] = (
    KnownDefect(
        "D1",
        "layer skip: positions or scales are added before the first layer, twice",
        lambda case, d: _skips(case) and case.architecture in WRONG_LAYER_SKIP and d.kind in WRONG_TEXT,
    ),
    KnownDefect(
        "D1",
        "layer skip: layers need more than the state before them",
        lambda case, d: _skips(case) and case.architecture in CRASHING_LAYER_SKIP and d.kind.startswith("crash"),
    ),
    KnownDefect(
        "D2",
        "sampling from scores that are not finite writes token 0 where plain generate raises",
        lambda case, d: case.do_sample and d.kind == "no error" and "probability tensor contains" in d.detail,
    ),
    KnownDefect(
        "D5",
        "moshi beyond its window",
        lambda case, d: case.architecture == "moshi" and d.kind in WRONG_TEXT,
    ),
    KnownDefect(
        "D6",
        "dropout in training mode is not refused",
        lambda case, d: case.training == "dropout" and d.kind in WRONG_TEXT | {"no error"},
    ),
    KnownDefect(
        "D10",
        "scores of ended rows' padding where processors keep rows in lockstep",
        lambda case, d: (
            d.kind == "scores"
            and len(case.lengths) * case.num_return_sequences > 1
            and bool(
                {"allowed_tokens", "guidance"} & set(case.options) or {"prefix", "stateful"} & set(case.processors)
            )
        ),
    ),
    KnownDefect(
        "B8",
        "speculate(streamer=...) does not stream the prompt",
        lambda case, d: case.entry == "custom_streamer" and d.kind == "stream",
    ),
    KnownDefect(
        "B20",
        "an exception leaves the random generator ahead",
        lambda case, d: d.kind == "random state after a fault",
    ),
    KnownDefect(
        "B23",
        "a draft model is put into eval mode",
        lambda case, d: case.training == "draft" and d.kind == "training mode of the draft changed",
    ),
    KnownDefect(
        "N1",
        "a prompt of which the attention mask shows nothing (a lone padding token) is not refused",
        lambda case, d: case.pad_in_prompt and not case.give_mask and 1 in case.lengths,
    ),
    KnownDefect(
        "B4, B6, B21",
        "state shared between threads",
        lambda case, d: case.threads > 1,
    ),
)
