"""Estimates the accepted length of further levels of a draft from the probabilities of earlier drafts of the call.

A drafter that is nearly certain of a token is often nearly certain of the next ones too, as in a copied text or the
syntax of JSON. How far such a run goes depends on the text: it is learned in each call as a Markov chain. Its states
are how certain the drafter is of a token: state s if the probability p of the token has 1 - p in (2^-(s+1), 2^-s].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_specgen.depth.adaptive import FORGETTING
from hf_specgen.device_tree import Floats

STATES = 6  # states of tokens; in the last one p is at least 1 - 2^-5
START = STATES  # the state before the first level of a draft


class LevelProbabilities:
    """The acceptance probabilities of the levels of one draft, each given that the level before is accepted.

    Example:
        >>> levels = LevelProbabilities()
        >>> levels.add(1, np.array([[0.5, 0.75]]), np.array([0.9])).tolist()  # of two nodes that could be expanded
        [[0.5, 0.75]]
        >>> levels.expanded_width = 2
        >>> levels.add(2, np.array([[0.375, 0.75]]), np.array([0.75])).tolist()
        [[0.5, 1.0]]
    """

    def __init__(self) -> None:
        # Nodes of each row that were expanded after the last added level, in each pass; set by the caller.
        self.expanded_width = 1
        self._depth = 0
        self._cumulative: Floats = np.ones((1, 1))
        # Of each level `[rows]` the probability of the nodes to expand, and of all expandable candidates.
        self._expanded: list[Floats] = []
        self._candidates: list[Floats] = []

    def add(self, depth: int, cumulative: Floats, total: Floats) -> Floats:
        """Add all levels since the last call, up to this depth.

        Each of these n levels gets the n-th root of the conditional probability over all of them.

        Args:
            cumulative: `[rows, widths]` the probability that one of the first 1, 2, … nodes to expand at this depth is
                accepted.
            total: `[rows]` the probability that one of all expandable candidates at this depth is accepted.

        Returns:
            `[rows, widths]` the n-th roots of the probabilities `cumulative`, given that one of the nodes that were
            expanded after the last added level is accepted.
        """
        # The probability that one of the nodes expanded last is accepted; not 0, so that quotients are finite.
        before = np.maximum(_at_width(self._cumulative, self.expanded_width), 1e-30)
        levels = depth - self._depth  # that are added now; each gets the geometric mean
        conditional = np.minimum(1.0, cumulative / before[:, None]) ** (1 / levels)
        self._expanded += [_at_width(conditional, self.expanded_width)] * levels
        self._candidates += [np.minimum(1.0, total / before) ** (1 / levels)] * levels
        self._depth = depth
        self._cumulative = cumulative
        return conditional

    def rows(self) -> Iterator[tuple[list[float], list[float]]]:
        """For each row the probabilities of its levels, of the nodes to expand and of all expandable candidates."""
        expanded_by_row = zip(*self._expanded, strict=True)
        candidates_by_row = zip(*self._candidates, strict=True)
        for expanded, candidates in zip(expanded_by_row, candidates_by_row, strict=True):
            levels = np.count_nonzero(expanded)  # a row that has reached its maximum depth expands no more
            yield list(expanded[:levels]), list(candidates[:levels])


class AcceptanceEstimator:
    """The expected number of accepted tokens below nodes, by how certain the drafter is of the nodes.

    Example:
        >>> estimator = AcceptanceEstimator()
        >>> [round(float(value), 1) for value in estimator.expected([0.99, 0.4], 8)[0, -1]]  # in up to 8 levels
        [4.2, 2.1]
        >>> draft = LevelProbabilities()
        >>> for level, path in enumerate([0.99, 0.4], start=1):  # a certain token is followed by a doubtful one
        ...     _ = draft.add(level, np.array([[path]]), np.array([path]))
        >>> for _ in range(20):
        ...     estimator.record_levels(draft)
        >>> bool(estimator.expected(0.99, 8)[0, -1] < 1.5)
        True
    """

    def __init__(self) -> None:
        # Before anything is counted, each state is followed by itself, and `START` by the third state.
        following = np.array([*range(STATES), 2])
        middles = 1 - 0.75 * 0.5**following  # of the probabilities of these states
        self._prior = np.zeros((1 + STATES, 1 + STATES))
        self._prior[range(1 + STATES), following] = middles
        self._prior_of_candidates = 1 - (1 - middles) ** 2  # as if the token had two independent candidates
        # By state s and the state t after it: how often t followed s, and the sum of the probabilities of these tokens.
        self._counts = np.zeros_like(self._prior)
        self._sums = np.zeros_like(self._prior)
        self._sums_of_candidates = np.zeros(1 + STATES)  # [s] of the probabilities that one candidate is accepted
        self._expected_by_state: Floats | None = None  # see `_expected_after_states`
        # Accepted draft tokens, and the sum of the path probabilities of all of them; each with a prior of 2.
        self._accepted_tokens = 2.0
        self._expected_tokens = 2.0

    def scaled(self, probability: Floats) -> Floats:
        """Path probabilities times the ratio of accepted to expected draft tokens, at most 1.

        Corrects a drafter whose probabilities are too high or too low.
        """
        return np.minimum(self._accepted_tokens / self._expected_tokens * probability, 1.0)

    def record_outcome(self, accepted: float, expected: float) -> None:
        """Record how many draft tokens were accepted, and the sum of their path probabilities."""
        self._accepted_tokens = 2 + FORGETTING * (self._accepted_tokens - 2) + accepted
        self._expected_tokens = 2 + FORGETTING * (self._expected_tokens - 2) + expected

    def record_levels(self, levels: LevelProbabilities) -> None:
        """Record the levels of a draft; without levels, earlier drafts keep their weight."""
        rows = [row for row in levels.rows() if row[0]]
        if not rows:
            return
        self._counts *= FORGETTING
        self._sums *= FORGETTING
        self._sums_of_candidates *= FORGETTING
        for expanded, candidates in rows:
            states = [START, *_states(expanded)]
            np.add.at(self._counts, (states[:-1], states[1:]), 1.0)
            np.add.at(self._sums, (states[:-1], states[1:]), expanded)
            np.add.at(self._sums_of_candidates, states[:-1], candidates)
        self._expected_by_state = None

    def expected(self, probability: ArrayLike, levels: int) -> Floats:
        """`[2, levels, …]` expected accepted tokens in up to 1, 2, … levels below nodes of these probabilities.

        First if of each level only the nodes to expand are verified, then if all candidates are.
        """
        return self._expected_after_states(levels)[:, :levels, _states(probability)]

    def expected_of_draft(self, levels: int) -> Floats:
        """`[levels]` expected accepted tokens in the first 1, 2, … levels of a draft, of all candidates."""
        return self._expected_after_states(levels)[1, :levels, START]

    @property
    def transitions(self) -> Floats:
        """`[s, t]` the probability that the token after one of state s is of state t, and is accepted."""
        return self._means(self._prior, self._sums)

    def _means(self, prior: Floats, sums: Floats) -> Floats:
        """`[1 + STATES, …]` means over the tokens after each state: those that were counted, and one assumed token.

        The values of the assumed token are half the prior, half the mean over the first tokens of drafts: what follows
        a doubtful token is never counted where drafts end at it.
        """
        weights = 1 + self._counts.sum(axis=1)
        start = (prior[START] + sums[START]) / weights[START]
        prior_mean = 0.5 * (prior + start)
        prior_mean[START] = prior[START]
        return ((prior_mean + sums).T / weights).T

    def _expected_after_states(self, levels: int) -> Floats:
        """`[2, levels or more, 1 + STATES]` as `expected`, below each state; kept until levels are recorded."""
        if self._expected_by_state is not None and self._expected_by_state.shape[1] >= levels:
            return self._expected_by_state
        power = self.transitions  # to the power of `accepted.shape[1]`, the number of levels so far
        candidates = self._means(self._prior_of_candidates, self._sums_of_candidates)
        # [2, n - 1, s] the probability that the n-th token after state s is accepted
        accepted = np.stack([power.sum(axis=1), candidates])[:, None]
        while accepted.shape[1] < levels:  # twice as many levels in each round
            accepted = np.concatenate([accepted, accepted @ power.T], axis=1)
            power = power @ power
        self._expected_by_state = accepted.cumsum(axis=1)
        return self._expected_by_state


def _at_width(values: Floats, width: int) -> Floats:
    """`[rows]` of `[rows, widths]` values those of this width, or of the largest one."""
    return values[:, min(width, values.shape[1]) - 1]


def _states(probability: ArrayLike) -> NDArray[np.integer[Any]]:
    """The state of each probability."""
    uncertainty = np.maximum(1 - np.asarray(probability, dtype=float), 0.5**STATES)
    return np.minimum(-np.log2(uncertainty), STATES - 1).astype(int)
