"""Decides whether the network of a combination drafts in a step in which strategies without one have a draft already.

Copied text needs no network: the few tokens that it adds to a long copied draft may take longer than the target takes
for as many. How many it has added is known after each step in which it drafted, as the tokens that followed show what
the draft without it would have reached. They are averaged by the length that was expected of that draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from hf_specgen.depth.calibration import CalibrationMemory
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, judged_nodes

LEVELS = 5
"""Number of levels of expected accepted tokens, each with averages of its own: below 1, 3, 7, 15, and more."""
AVERAGED_STEPS = 10
"""Steps that an average goes back to; with 6 the projected speed is 1 to 3% lower, with 20 it is the same."""
PRIOR_FURTHER = (2.0, 2.0, 2.0, 0.5, 0.5)
"""Number of further tokens assumed in advance, by level: a draft model and an EAGLE-3 head added 1.4 to 3.9 where fewer
than 7 were expected, 0.3 to 0.8 to edits where more were, Medusa heads 1.2 and less."""
PRIOR_STEPS = 3
"""Weight, in steps, of these. Without them, the first two or three steps of a level may leave a network out of text in
which it would have been useful; the projected speed is the same to about 1%."""
TRIAL_EVERY = 8
"""One in this many steps of a level without expected gain is drafted by the network nevertheless."""
RECENT_WEIGHT = 0.2
"""Weight of the newest step in the comparison of expected and accepted tokens: texts differ, and expectations follow
them with a delay. Without the comparison, the projected speed with a draft model and with Medusa heads is 1% lower."""


class Average(NamedTuple):
    """Averages over steps of one level.

    Args:
        steps: in which the network drafted.
        further: accepted tokens of a row beyond those that the draft without the network would have had.
        seconds: latency of the network's drafts; None before the first.
        left_out: steps in which no gain was expected, trials included.
    """

    steps: int
    further: float
    seconds: float | None = None
    left_out: int = 0

    def plus(self, further: float, seconds: float) -> Average:
        """With one more step in which the network drafted."""
        steps = self.steps + 1
        share = 1 / min(steps, AVERAGED_STEPS)
        known = seconds if self.seconds is None else self.seconds
        further = self.further + share * (further - self.further)
        return Average(steps, further, known + share * (seconds - known), self.left_out)


PRIOR = tuple(Average(PRIOR_STEPS, further) for further in PRIOR_FURTHER)
"""The averages of each level before any step."""


class NetworkGain:
    """The further tokens of a network, and the time that they took, in the steps of one or more calls.

    Args:
        averages: of each level.
        expected, accepted: tokens of a row in the newest steps without the network: moving averages.

    Example:
        >>> gain = NetworkGain()
        >>> for _ in range(9):  # copied drafts of 12 tokens; the network adds half of one in a fifth of a target step
        ...     _ = gain.drafts(12.0, target_seconds=1.2, pass_seconds=0.1)
        ...     gain.observe(12.0, further=0.5, seconds=0.2)
        >>> gain.drafts(12.0, target_seconds=1.2, pass_seconds=0.1), gain.drafts(0.5, 1.0, 0.1)
        (False, True)
    """

    def __init__(self, averages: Sequence[Average] = PRIOR, expected: float = 0.0, accepted: float = 0.0):
        self._averages = list(averages)
        self._expected, self._accepted = expected, accepted
        self._level, self._drafted = 0, 0.0  # of the current step

    def drafts(self, expected: float, target_seconds: float, pass_seconds: float) -> bool:
        """Whether the network drafts in this step: tokens per second are expected to rise, or it is a trial.

        Args:
            expected: accepted tokens of a row without the network.
            target_seconds: latency of the target's pass without the network.
            pass_seconds: latency of a draft of the network with a single pass.
        """
        self._drafted = expected
        expected *= (1 + self._accepted) / (1 + self._expected)
        self._level = min(LEVELS - 1, int(log2(1 + expected)))
        average = self._averages[self._level]
        seconds = pass_seconds if average.seconds is None else average.seconds
        if average.further * target_seconds >= (1 + expected) * seconds:
            return True
        left_out = average.left_out + 1
        self._averages[self._level] = average._replace(left_out=left_out)
        return left_out % TRIAL_EVERY == 0

    def observe(self, accepted: float, further: float | None, seconds: float) -> None:
        """Count the step that `drafts` was called for.

        Args:
            accepted: tokens of a row that the draft without the network has had, or would have had.
            further: accepted tokens of a row beyond these; None if the network has not drafted.
            seconds: latency of its draft.
        """
        self._expected += RECENT_WEIGHT * (self._drafted - self._expected)
        self._accepted += RECENT_WEIGHT * (accepted - self._accepted)
        if further is not None:
            self._averages[self._level] = self._averages[self._level].plus(further, seconds)

    def copy(self) -> NetworkGain:
        """One with the same averages, which learns independently."""
        return NetworkGain(self._averages, self._expected, self._accepted)


def expected_tokens(draft: DraftTree) -> float:
    """Expected accepted tokens of a draft, per row that has one; 0 if there is none.

    Example:
        >>> expected_tokens(DraftTree.from_nodes([([5, 6], (-1, 0)), ([], ())], joint=((0.5, 0.25), ())))
        0.75
    """
    rows = [sum(row) for row in draft.joint or () if row]
    return sum(rows) / len(rows) if rows else 0.0


def accepted_tokens(draft: DraftTree, result: VerificationResult) -> float:
    """Tokens of a draft that are, or would have been, accepted in a step: the average of the rows that took part.

    Example:
        >>> accepted_tokens(DraftTree.chains([[5, 7]]), VerificationResult([[0, 1]], [[5, 6, 9]], accepted=[2]))
        1.0
    """
    rows = [row for row, path in enumerate(result.paths) if path is not None]
    tokens = draft.tokens.tolist()
    judged = [pair for row in rows for pair in judged_nodes(tokens[row], draft.parents[row], result.tokens[row])]
    return sum(accepted for _, accepted in judged) / max(1, len(rows))


network_gain_memory = CalibrationMemory(NetworkGain)
