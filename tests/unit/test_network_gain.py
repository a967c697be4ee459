"""When the network of a combination drafts: its measured gain, against a slow count of accepted tokens."""

from __future__ import annotations

import random

import pytest

from hf_specgen.candidates.network_gain import TRIAL_EVERY, NetworkGain, accepted_tokens, expected_tokens
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult

TARGET, PASS = 1.2, 0.1
"""Seconds of a pass of the target and of the network in these tests."""


def _after(steps: int, expected: float, accepted: float, further: float, seconds: float) -> NetworkGain:
    """After steps that were all alike, in which the network drafted."""
    gain = NetworkGain()
    for _ in range(steps):
        gain.drafts(expected, TARGET, PASS)
        gain.observe(accepted, further, seconds)
    return gain


@pytest.mark.parametrize("expected", [0.2, 2.0, 12.0, 40.0])
@pytest.mark.parametrize("seconds", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("further", [-0.5, 0.0, 0.3, 1.0, 4.0])
def test_network_drafts_where_it_raises_the_tokens_per_second(expected: float, seconds: float, further: float) -> None:
    """Would catch: a comparison of other quantities than tokens per second with and without the network."""
    gain = _after(60, expected, expected, further, seconds)
    faster = (1 + expected + further) / (TARGET + seconds) >= (1 + expected) / TARGET
    assert all(gain.drafts(expected, TARGET, PASS) for _ in range(2)) == faster  # at most one of them is a trial


def test_network_without_gain_drafts_in_one_of_several_steps() -> None:
    gain = _after(20, 12.0, 12.0, 0.0, 0.5)
    drafted = [gain.drafts(12.0, TARGET, PASS) for _ in range(4 * TRIAL_EVERY)]
    assert sum(drafted) == 4


@pytest.mark.parametrize("pass_seconds", [0.01, 0.2])
def test_first_steps_are_drafted_by_the_network_unless_it_is_slow_and_a_long_draft_is_expected(
    pass_seconds: float,
) -> None:
    drafted = [NetworkGain().drafts(expected, TARGET, pass_seconds) for expected in (0.0, 1.0, 5.0, 30.0)]
    assert drafted == [True, True, True, pass_seconds == 0.01]


def test_trials_show_that_a_network_has_become_useful() -> None:
    """Would catch: a network that is left out for good."""
    gain = _after(50, 12.0, 12.0, 0.0, 0.5)
    drafted = []
    for _ in range(10 * TRIAL_EVERY):
        drafted.append(gain.drafts(12.0, TARGET, PASS))
        gain.observe(12.0, 20.0 if drafted[-1] else None, 0.5)
    assert not drafted[0]
    assert all(drafted[-5:])


def test_expectations_that_fail_count_less() -> None:
    """Would catch: a network that is left out of text which is not copied, because long drafts are still expected."""
    gain = _after(50, 12.0, 12.0, 0.0, 0.5)
    assert not gain.drafts(12.0, TARGET, PASS)
    for _ in range(10):
        gain.drafts(12.0, TARGET, PASS)
        gain.observe(0.0, None, 0.0)
    assert gain.drafts(12.0, TARGET, PASS)


def test_copy_learns_on_its_own() -> None:
    gain = _after(20, 12.0, 12.0, 0.0, 0.5)
    copied = gain.copy()
    for _ in range(20):
        copied.observe(12.0, 30.0, 0.5)
    assert not gain.drafts(12.0, TARGET, PASS)


def _random_tree(rng: random.Random) -> DraftTree:
    nodes = rng.randint(0, 8)
    parents = [rng.randint(-1, node - 1) for node in range(nodes)]
    used: dict[int, list[int]] = {}
    tokens = []
    for parent in parents:
        token = rng.choice([one for one in range(12) if one not in used.get(parent, [])])
        used.setdefault(parent, []).append(token)
        tokens.append(token)
    return DraftTree.from_nodes([(tokens, tuple(parents))])


@pytest.mark.parametrize("seed", range(40))
def test_accepted_tokens_is_the_longest_path_that_the_emitted_tokens_follow(seed: int) -> None:
    rng = random.Random(seed)
    tree = _random_tree(rng)
    emitted = [rng.randrange(3) for _ in range(5)]
    longest = 0
    for node in range(tree.nodes):
        path = []
        while node >= 0:
            path.insert(0, int(tree.tokens[0, node]))
            node = tree.parents[0][node]
        if path == emitted[: len(path)]:
            longest = max(longest, len(path))
    assert accepted_tokens(tree, VerificationResult([[]], [emitted], accepted=[0])) == longest


def test_accepted_tokens_averages_the_rows_that_took_part() -> None:
    tree = DraftTree.chains([[5, 6], [5, 6], [5, 6]])
    result = VerificationResult([[0], None, [0, 1]], [[5, 9], [], [5, 6, 7]], accepted=[1, 0, 2])
    assert accepted_tokens(tree, result) == 1.5


def test_expected_tokens_of_no_draft_is_zero() -> None:
    assert expected_tokens(DraftTree.empty(2)) == 0.0
