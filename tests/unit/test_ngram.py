"""Drafts of `NgramCandidates`, against a slow enumeration of all continuations."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen import NgramCandidates
from hf_specgen.candidates.ngram_chain import grow_chain
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH
from hf_specgen.candidates.ngram_odds import (
    CLASSES,
    CLASSES_BY_LENGTH,
    HISTORY_OUTPUT,
    MAX_CHAIN_CHUNK,
    NEAR,
    OWN,
    MatchOdds,
)
from hf_specgen.candidates.ngram_text import RowText
from hf_specgen.candidates.ngram_tree import Limits, NgramTree, grow_tree
from hf_specgen.candidates.ngram_votes import MAX_VOTERS, Occurrence, frequent_tokens, unanimous, vote
from hf_specgen.state import GenerationState
from hf_specgen.verification import VerificationResult
from tests.helpers import reference
from tests.helpers.calls import AMPLE, make_call, make_state
from tests.helpers.ngram import ngram_draft

thorough = settings(max_examples=200, deadline=None, derandomize=True)
texts = st.lists(st.sampled_from([0, 1, 2**30]), max_size=40)

# Trees


def _occurrences(text: list[int]) -> tuple[dict[int, int], list[Occurrence]]:
    """Where the end of a text occurred before, with match lengths, and the same as voters."""
    index = NgramIndex()
    index.extend(text)
    found = index.occurrences(text, 100)
    return found, [(index.tokens, index.end, position, length, OWN) for position, length in found.items()]


@thorough
@given(texts.filter(len), st.integers(1, 6), st.integers(0, 12))
def test_grow_tree_agrees_with_the_reference(text: list[int], depth: int, nodes: int) -> None:
    """Would catch: a wrong probability, a node that is not among the most probable, a child before its parent."""
    found, occurrences, odds = *_occurrences(text), MatchOdds()
    tree = grow_tree(occurrences, odds, Limits(depth, nodes))
    expected = reference.ngram_nodes(text, found, odds.values, depth, MAX_VOTERS)
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert tree.joint[node] == pytest.approx(expected[paths[-1]])
    assert len(set(paths)) == len(paths) == min(nodes, len(expected))
    assert tree.joint == pytest.approx(sorted(expected.values(), reverse=True)[:nodes])


@thorough
@given(texts.filter(len), st.integers(1, 6), st.integers(1, 12))
def test_grow_chain_agrees_with_the_reference(text: list[int], depth: int, nodes: int) -> None:
    """Would catch: a token that is not the most probable one after the path so far, or a wrong probability of it."""
    found, occurrences, odds = *_occurrences(text), MatchOdds()
    tree = grow_chain(occurrences, odds, Limits(depth, nodes))
    expected = reference.ngram_nodes(text, found, odds.values, depth, MAX_VOTERS)
    path: tuple[int, ...] = ()
    for token, joint in zip(tree.tokens, tree.joint, strict=True):
        children = [value for other, value in expected.items() if other[:-1] == path]
        path = (*path, token)
        assert joint == pytest.approx(expected[path]) == pytest.approx(max(children))
    assert tree.parents == [*range(-1, len(path) - 1)]
    assert len(path) == min(depth, nodes) or not any(other[:-1] == path for other in expected)


@thorough
@given(texts.filter(len), st.floats(0.01, 20.0), st.floats(0.01, 1.0))
def test_grow_chain_begins_with_the_most_probable_token_frequent_ones_included(
    text: list[int], factor: float, share: float
) -> None:
    """Would catch: a frequent token passed over although it is the most probable one; 5 occurs nowhere."""
    _, occurrences = _occurrences(text)
    odds = MatchOdds((factor,) * CLASSES)
    frequent = [(5, share), (0, share / 2)]
    tree = grow_chain(occurrences, odds, Limits(1, 1), frequent)
    values, _, total = vote(occurrences, 0, odds)
    expected = {token: value / total for token, value in values.items()}
    for token, probability in frequent_tokens(frequent, values, total, odds):
        expected[token] = probability
    assert tree.joint == [max(expected.values())] == [expected[tree.tokens[0]]]


@pytest.mark.parametrize("grow", [grow_tree, grow_chain])
@pytest.mark.parametrize("min_joint", [0.0, 0.3])
def test_grow_where_occurrences_agree_equals_one_token_at_a_time(grow: Any, min_joint: float) -> None:
    """Would catch: wrong probabilities in a chain of several occurrences, one of which ends before it does."""
    odds, text = MatchOdds(), array("i", [*range(90), *range(1, 70), 99, *range(3, 40)])
    occurrences = [(text, len(text), 3, 2, OWN), (text, len(text), 92, 1, NEAR), (text, len(text), 160, 30, OWN)]
    tree = grow(occurrences, odds, Limits(80, 60, min_joint))
    voters, joint = occurrences, 1.0
    for depth, (token, value) in enumerate(zip(tree.tokens, tree.joint, strict=True)):
        values, proposers, total = vote(voters, depth, odds)
        joint *= max(values.values()) / total
        voters = proposers[token]
        assert value == pytest.approx(joint) and value > min_joint
        assert token == max(values, key=values.__getitem__) and tree.voters[depth] == voters
    assert (len(tree.tokens) == 60) == (min_joint == 0)


occurrence = st.tuples(
    st.integers(0, 30), st.integers(0, MAX_MATCH_LENGTH), st.sampled_from([OWN, NEAR, HISTORY_OUTPUT])
)


@thorough
@given(st.lists(occurrence, min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 2 * MAX_CHAIN_CHUNK))
def test_unanimous_agrees_with_votes_on_one_token_after_the_other(
    found: list[tuple[int, int, int]], depth: int, count: int
) -> None:
    """Would catch: tokens after one on which occurrences disagree, after a separator, or after the end of a text."""
    text = array("i", ([7] * 9 + [SEPARATOR] + [7] * 4 + [8]) * 3)
    voters: list[Occurrence] = [(text, 40, position, length, kind) for position, length, kind in found]
    odds = MatchOdds()
    tokens, probabilities = unanimous(voters, depth, count, odds)
    for place, (token, probability) in enumerate(zip(tokens, probabilities, strict=True)):
        values, proposers, total = vote(voters, depth + place, odds)
        assert proposers == {token: voters} and probability == values[token] / total
    _, proposers, _ = vote(voters, depth + len(tokens), odds)
    assert len(tokens) == min(count, MAX_CHAIN_CHUNK) or SEPARATOR in proposers or [*proposers.values()] != [voters]


def test_grow_tree_of_a_chain_longer_than_the_tables_agrees_with_the_reference() -> None:
    """Would catch: a chain that ends where the tables by match length do, or probabilities of another length there."""
    text, odds = [*range(300), *range(40)], MatchOdds()
    tree = grow_tree([(array("i", text), len(text), 40, 40, OWN)], odds, Limits(200, 200))
    assert tree.tokens == [*range(40, 240)] and tree.parents == [*range(-1, 199)]
    expected = reference.ngram_nodes(text, {40: 40}, odds.values, 200, MAX_VOTERS)
    assert tree.joint == pytest.approx(list(expected.values()))


@pytest.mark.parametrize("leaves", [1, 2, 3])
def test_grow_tree_has_at_most_that_many_leaves(leaves: int) -> None:
    text = [5, 6, 7, 5, 6, 1, 5, 8, 9, 5, 6, 7, 5]
    tokens, parents = ngram_draft(NgramCandidates(k=3, branches=leaves), text)
    assert sum(node not in parents for node in range(len(tokens))) == leaves


def test_grow_tree_min_joint_leaves_out_improbable_nodes() -> None:
    text = RowText([5, 6, 7, 5, 6, 1, 5, 8, 9, 5], MatchOdds())
    assert min(text.propose(Limits(5, 50, 0.1)).joint) > 0.1 > min(text.propose(Limits(5, 50)).joint)


def test_grow_tree_frequent_tokens_follow_where_occurrences_leave_doubt() -> None:
    """Would catch: nothing proposed after a token that the text does not contain, or nothing after a frequent one."""
    tree = RowText([5, 6, 5, 6, 5, 7, 9], MatchOdds()).propose(Limits(2, 20))
    assert tree.tokens[0] == 5 and not tree.voters[0]
    assert {tree.tokens[node] for node, parent in enumerate(tree.parents) if parent == 0} == {6, 7}


def test_grow_tree_after_a_frequent_token_copies_without_a_gap() -> None:
    """Would catch: a token left out, or written twice, below a frequent one; 8 does not occur before the end."""
    text = RowText([5, 1, 2, 3, 4, 6, 7, 5, 5, 5, 8], MatchOdds())
    tree = text.propose(Limits(4, 60))
    paths = [
        [tree.tokens[one] for one in reversed(reference.walk_up(tree.parents, node))]
        for node in range(len(tree.tokens))
    ]
    assert [5, 1, 2, 3] in paths


# What is learnt


def test_outcomes_are_of_the_strongest_vote_at_the_depth_of_the_node() -> None:
    """Would catch: the class of another occurrence, or of the length that the match had at another depth."""
    odds, text = MatchOdds(), array("i", [1, 2, 3, 4, 1, 2, 3, 4, 1])
    tree = grow_tree([(text, 9, 1, 3, OWN), (text, 9, 5, 1, OWN)], odds, Limits(2, 2))
    assert tree.tokens == [2, 3]
    own = CLASSES_BY_LENGTH[OWN]
    assert [match_class for match_class, _, _ in tree.outcomes([2, 3, 4], odds)] == [own[3], own[4]]


def test_outcomes_expected_is_the_probability_after_the_parent() -> None:
    odds, tree = MatchOdds(), NgramTree()
    occurrence = (array("i", [1, 2, 3]), 3, 1, 1, OWN)
    tree.add(2, -1, 0.5, [occurrence])
    tree.add(3, 0, 0.2, [occurrence])
    assert [outcome[1:] for outcome in tree.outcomes([2, 9], odds)] == [(0.5, True), (0.4, False)]


def test_outcomes_are_of_children_of_what_the_text_reached() -> None:
    """Would catch: descendants of a rejected node counted as rejected."""
    odds = MatchOdds()
    tree = RowText([1, 2, 3, 4, 5, 6, 1, 2, 3], odds).propose(Limits(3, 3))
    assert tree.tokens == [4, 5, 6]
    assert [accepted for _, _, accepted in tree.outcomes([4, 9], odds)] == [True, False]


def test_observe_rejections_make_the_class_less_likely() -> None:
    """Would catch: odds that do not change, or of another class than the one that was tried."""
    state = make_state([[1, 2, 3, 4, 1, 2, 3]])
    session = NgramCandidates(k=1).start(make_call(state))
    prior = list(session._odds.values)
    session.draft([1])
    [(tried, _, _)] = session._trees[0].outcomes([9], session._odds)
    session.observe(VerificationResult([[]], [[9]], [0]))
    changed = [kind for kind, (new, old) in enumerate(zip(session._odds.values, prior, strict=True)) if new != old]
    assert changed == [tried] and session._odds.values[tried] < prior[tried]


@thorough
@given(st.lists(st.tuples(st.integers(0, CLASSES - 1), st.floats(0.0, 1.0), st.booleans()), max_size=12))
def test_observe_all_agrees_with_one_token_after_the_other(outcomes: list[tuple[int, float, bool]]) -> None:
    """Would catch: tables that are not written for a class, or that miss its later tokens."""
    together, separate = MatchOdds(), MatchOdds()
    together.observe_all(outcomes)
    for outcome in outcomes:
        separate.observe(*outcome)
    rebuilt = together.copy()
    for odds in (separate, rebuilt):
        assert (together.values, together.by_length, together.alone) == (odds.values, odds.by_length, odds.alone)


def test_observe_of_a_session_learns_for_its_model_only() -> None:
    state = make_state([[1, 2, 3, 4, 1, 2, 3]])
    call = make_call(state, candidates=NgramCandidates(k=2))
    session = call.candidates.start(call)
    before = session.draft([1]).joint
    state.append(0, [9])
    session.observe(VerificationResult([[]], [[9]], [0]))
    session.end()
    assert call.candidates.start(make_call(make_state([[1, 2, 3, 4, 1, 2, 3]]))).draft([1]).joint == before


@pytest.mark.parametrize(
    ("edited", "expected"),
    [([1, 2, 3, 4, 99], [6, 7, 8]), ([1, 2, 3, 4, 98, 99], [7, 8, 9]), ([1, 2, 3, 99, 4, 5], [6, 7, 8])],
    ids=["one token replaced", "two tokens replaced", "one token inserted"],
)
def test_draft_after_an_edit_continues_the_text_being_copied(edited: list[int], expected: list[int]) -> None:
    """Would catch: copying that has to wait for a new match after every edit; 98 and 99 occur nowhere else."""
    text = RowText([*range(20), 70, 71], MatchOdds())
    for token in [0, *edited]:
        text.propose(Limits(1, 1))
        text.extend([token])
    assert text.propose(Limits(3, 3, leaves=1)).tokens == expected


# Sessions


@thorough
@given(texts.filter(len), st.lists(texts.filter(len), min_size=2, max_size=4), st.integers(1, 2))
def test_draft_of_growing_text_finds_what_a_new_session_finds(
    prompt: list[int], steps: list[list[int]], branches: int
) -> None:
    """Would catch: generated tokens indexed twice or not at all after steps without a draft (budget 0)."""
    candidates = NgramCandidates(k=4, branches=branches)
    state = make_state([prompt, [1]])
    session = candidates.start(make_call(state, candidates=candidates))
    for number, step in enumerate(steps):
        state.append(0, step)
        tree = session.draft([0 if number % 2 else AMPLE, 0])
        assert tree.parents[1] == ()
        if number % 2:
            assert tree.parents[0] == ()
    text = prompt + state.generated[0]
    row = session._texts[0]
    row.extend(state.generated[0][session._read[0] :])
    assert row.index.tokens[: row.index.end] == text
    found = row.index.occurrences(text[-64:], 10**6, row._known, row._grown)
    assert found == reference.ngram_occurrences(text, text[-64:], len(text))


@pytest.mark.parametrize(("k", "text", "expected"), [(7, [1, 2, 3] * 4, [1, 2, 3, 1, 2, 3, 1]), (5, [4] * 9, [4] * 5)])
def test_draft_of_periodic_text_repeats_the_period(k: int, text: list[int], expected: list[int]) -> None:
    """Would catch: a draft of one period only, because the last occurrence ends where the text ends."""
    assert ngram_draft(NgramCandidates(k=k), text) == (expected, tuple(range(-1, k - 1)))


def test_draft_of_equally_long_matches_follows_the_majority() -> None:
    """Would catch: the most recent of equally long matches taken, although two others agree on another token."""
    assert ngram_draft(NgramCandidates(k=1), [5, 6, 5, 6, 5, 9, 5])[0] == [6]


def test_draft_length_grows_with_the_match() -> None:
    """Would catch: a long match that is trusted no more than a short one."""
    prompt, lengths = list(range(100, 200)), []
    for matched in (1, 3, 8, 30):
        lengths.append(len(ngram_draft(NgramCandidates(k=64), prompt + prompt[:matched])[0]))
    assert lengths == sorted(set(lengths)) and lengths[-1] > 12


def test_draft_of_a_text_being_copied_is_40_tokens_and_more() -> None:
    """Would catch: a draft that a constant cuts short, although dozens of tokens were accepted."""
    text = RowText([*range(100, 200)], MatchOdds())
    for first in range(100, 132, 4):
        text.propose(Limits(64, 64, 0.05))
        text.extend([*range(first, first + 4)])
    assert text.propose(Limits(64, 64, 0.05)).tokens[:40] == [*range(132, 172)]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("budget", [0, 1, 3, 50])
def test_draft_depth_is_limited_by_the_budget(branches: int, budget: int) -> None:
    """Would catch: nodes behind the maximum length, whose scores nobody can use."""
    _, parents = ngram_draft(NgramCandidates(k=9, branches=branches), [1, 2, 3] * 9, budget)
    assert max((reference.depth(parents, node) for node in range(len(parents))), default=0) == min(9, budget)


@pytest.mark.parametrize("tree", [1, 5, 12])
def test_draft_of_a_tree_has_at_most_that_many_nodes(tree: int) -> None:
    assert len(ngram_draft(NgramCandidates(k=9, tree=tree), [5, 6, 7, 5, 6, 1, 5, 8, 9, 5] * 2)[0]) == tree


def test_draft_with_min_ngram_ignores_shorter_matches() -> None:
    """Would catch: a match of one token, or a frequent token, where matches of two are required."""
    assert ngram_draft(NgramCandidates(min_ngram=2), [1, 2, 3, 9, 2]) == ([], ())
    assert ngram_draft(NgramCandidates(k=1, min_ngram=2), [1, 2, 3, 9, 1, 2]) == ([3], (-1,))


def test_draft_with_max_ngram_counts_longer_matches_as_that_long() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6]
    assert len(ngram_draft(NgramCandidates(k=9, max_ngram=1), text)[0]) < len(
        ngram_draft(NgramCandidates(k=9), text)[0]
    )


def test_draft_of_rows_uses_their_own_texts() -> None:
    """Would catch: one index for the batch."""
    state = make_state([[1, 2, 8, 1, 2], [1, 2, 9, 1, 2]])
    assert NgramCandidates(k=1).start(make_call(state)).draft([1, 1]).tokens.tolist() == [[8], [9]]


def test_draft_at_prefill_is_a_chain() -> None:
    state = make_state([[5, 6, 7, 5, 6, 1, 5, 8, 9, 5]])
    tree = NgramCandidates(k=5, branches=3).start(make_call(state)).draft_at_prefill([5])
    assert tree.nodes and tree.parents[0] == tuple(range(-1, tree.nodes - 1))


# Padding


def draft_of_padded(row: list[int], mask: list[int] | None) -> list[int]:
    """The draft for a prompt as `generate` passes it."""
    attention_mask = None if mask is None else torch.tensor([mask])
    state = GenerationState(torch.tensor([row]), attention_mask, (), 100, None)
    return NgramCandidates(k=2, min_ngram=1).start(make_call(state)).draft([2]).tokens[0].tolist()


@pytest.mark.parametrize("mask", [[0, 0, 0, 1, 1, 1, 1], [1] * 7, None], ids=["padded", "full", "none"])
def test_draft_can_contain_the_pad_id_as_a_token(mask: list[int] | None) -> None:
    """Would catch: every token with the pad id removed from the prompt; here 0 really follows 5."""
    assert draft_of_padded([0, 0, 0, 5, 0, 7, 5], mask)[0] == 0


def test_draft_never_matches_left_padding() -> None:
    """The text 3 4 0 contains no earlier 0; with its padding it would contain three, followed by 0 twice."""
    padded = [0, 0, 0, 3, 4, 0]
    assert 0 not in draft_of_padded(padded, [0, 0, 0, 1, 1, 1])[:1]
    assert draft_of_padded(padded, None)[0] == 0
