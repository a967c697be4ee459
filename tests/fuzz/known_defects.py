"""Defects that are known and not yet repaired: what the random tester finds of them does not count as a failure.

An entry is removed together with the defect. A wrong entry hides a failure, so each is as narrow as it can be: the case
and the kind of difference must both fit.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz.cases import Case
from tests.fuzz.checks import Difference


class KnownDefect(NamedTuple):
    """A defect, and which failures are its."""

    name: str
    description: str
    fits: Callable[[Case, Difference], bool]


def known_defect(case: Case, differences: list[Difference]) -> KnownDefect | None:
    """The known defect that all differences of a case belong to, if there is one for each of them."""
    found = [next((d for d in KNOWN_DEFECTS if d.fits(case, difference)), None) for difference in differences]
    return found[0] if found and all(found) else None


KNOWN_DEFECTS: tuple[KnownDefect, ...] = ()
