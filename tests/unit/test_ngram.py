"""Drafts of `NgramCandidates`, against a slow enumeration of all paths."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.variants import ours
from benchmarks.micro.trace_replay import TRACES, load_scripts, tokens_per_forward
from hf_specgen import NgramCandidates
from hf_specgen.batching.shared_steps import cut_to_fastest_size
from hf_specgen.candidates.best_first import SearchLimits, SearchSession, SearchTree, best_first
from hf_specgen.candidates.ngram import FREQUENT, PRIOR_ODDS, MatchOdds, RowText, match_class, outcomes, vote
from hf_specgen.candidates.ngram_history import HISTORY_OUTPUT, NEAR, OWN, Occurrence
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.depth import AdaptiveDepth, CostCurve, LatencyModel
from hf_specgen.verification import VerificationResult
from tests.helpers import reference
from tests.helpers.calls import AMPLE, make_batch, make_state, ngram_draft

texts = st.lists(st.sampled_from([0, 1, 2**30]), max_size=40)
CHAIN = SearchLimits(64, is_chain=True)

# Trees


def tree_of(text: list[int], depth: int, limits: SearchLimits) -> tuple[SearchTree[Any], dict[tuple[int, ...], float]]:
    """The tree that all occurrences of the end of a text propose, and every path by the reference."""
    index, odds = NgramIndex(text), MatchOdds()
    matches = index.occurrences(text, 100)
    occurrences: list[Occurrence] = [(text, len(text), at, length, OWN) for at, length in matches.items()]
    tree = best_first(occurrences, lambda voters, depth: vote(voters, depth, odds), depth, limits)
    return tree, reference.ngram_nodes(text, matches, odds.values, depth)


@given(texts.filter(len), st.integers(0, 6), st.integers(0, 12), st.sampled_from([0.0, 0.1]))
def test_best_first_of_votes_is_that_of_the_reference(text: Any, depth: int, nodes: int, min_probability: Any) -> None:
    """Would catch: a wrong probability, a node that is not among the most probable, a child before its parent."""
    tree, expected = tree_of(text, depth, SearchLimits(nodes, min_probability))
    paths = reference.node_paths(tree.tokens, tree.parents)
    assert tree.probability == pytest.approx([expected[path] for path in paths])
    probable = [value for value in sorted(expected.values(), reverse=True) if value > min_probability]
    assert len(set(paths)) == len(paths) == min(nodes, len(probable))
    assert tree.probability == pytest.approx(probable[:nodes])


@given(texts.filter(len), st.integers(1, 6))
def test_best_first_chain_agrees_with_the_reference(text: list[int], depth: int) -> None:
    """Would catch: a token that is not the most probable one after the path so far, or a wrong probability of it."""
    tree, expected = tree_of(text, depth, CHAIN)
    paths = reference.node_paths(tree.tokens, tree.parents)
    for path, value in zip(paths, tree.probability, strict=True):
        siblings = [other for one, other in expected.items() if one[:-1] == path[:-1]]
        assert value == pytest.approx(expected[path]) == pytest.approx(max(siblings))
    assert tree.parents == [*range(-1, len(paths) - 1)]
    assert len(paths) == depth or not any(one[:-1] == (paths[-1] if paths else ()) for one in expected)


def test_vote_by_occurrences_of_several_kinds_agrees_with_their_odds() -> None:
    """Would catch: odds of another length or kind, a separator or the token after the end of a text proposed."""
    odds, text = MatchOdds(), [7, 8, 9, SEPARATOR, 8, 5, 7]
    kinds = [(0, 3, NEAR), (1, 60, OWN), (4, 70, HISTORY_OUTPUT), (3, 9, OWN), (6, 9, OWN)]
    votes = vote([(text, 6, at, length, kind) for at, length, kind in kinds], 1, odds)
    values = {token: odds.values[place] for token, place in ((8, match_class(NEAR, 4)), (9, match_class(OWN, 61)))}
    values[5] = odds.values[match_class(HISTORY_OUTPUT, 64)]
    values[8] += odds.values[match_class(OWN, 10)]
    total = sum(values.values()) + 0.84 + 0.66 * 3
    assert {token: probability for token, probability, _ in votes} == pytest.approx(
        {token: value / total for token, value in values.items()}
    )
    assert [probability for _, probability, _ in votes] == sorted(value / total for value in values.values())[::-1]


def test_draft_of_a_tree_frequent_tokens_follow_where_occurrences_leave_doubt() -> None:
    """Would catch: nothing proposed after a token that the text does not contain, or a token proposed twice."""
    tree = RowText([5, 6, 5, 6, 5, 7, 9], MatchOdds()).propose(2, SearchLimits(20))
    assert tree.tokens[0] == 5 and outcomes(tree, [5], MatchOdds())[0][0] == FREQUENT
    assert tree.parents == [-1] * 4 and sorted(tree.tokens) == [5, 6, 7, 9]
    assert tree.probability == sorted(tree.probability, reverse=True)


# What is learnt


def test_outcomes_are_of_the_strongest_vote_at_the_depth_of_the_node() -> None:
    """Would catch: the class of another occurrence, or of the length that the match had at another depth."""
    odds, text = MatchOdds(), [1, 2, 3, 4, 1, 2, 3, 4, 1]
    occurrences: list[Occurrence] = [(text, 9, 1, 3, OWN), (text, 9, 5, 1, OWN)]
    tree = best_first(occurrences, lambda voters, depth: vote(voters, depth, odds), 2, CHAIN)
    assert tree.tokens == [2, 3]
    found = outcomes(tree, [2, 3, 4], odds)
    assert [place for place, _, _ in found] == [match_class(OWN, 3), match_class(OWN, 4)]


def test_observe_rejections_make_the_class_less_likely() -> None:
    """Would catch: odds that do not change, or of another class than the one that was tried."""
    state = make_state([[1, 2, 3, 4, 1, 2, 3]])
    session = NgramCandidates(k=1).start(make_batch(state))
    session.draft([1])
    [(tried, _, _)] = outcomes(session._trees[0], [9], session._odds)
    session.observe(VerificationResult([[]], [[9]], [0]))
    assert session._odds.new_token_factor > 1 == session._odds.for_later_call().new_token_factor, (
        "in this call alone other tokens are more likely"
    )
    odds = zip(session._odds.values, PRIOR_ODDS, strict=True)
    changed = [place for place, (new, old) in enumerate(odds) if new != old]
    assert changed == [tried] and session._odds.values[tried] < PRIOR_ODDS[tried]


@pytest.mark.parametrize("accepted", [True, False])
def test_observe_of_equal_outcomes_keeps_odds_within_a_factor_of_the_prior(accepted: bool) -> None:
    """Would catch: odds that run away, so that a class of matches never drafts again."""
    odds, place = MatchOdds(), match_class(OWN, 3)
    odds.observe([(place, 0.5, accepted)] * 1000)
    assert odds.values[place] == pytest.approx(PRIOR_ODDS[place] * (20 if accepted else 1 / 20))
    assert odds.for_later_call().values == odds.values


class ThreeTokens(SearchSession[None]):
    """Finds the same chain in every step."""

    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[None]:
        return SearchTree([5, 6, 7], [-1, 0, 1], [0.9, 0.6, 0.4], [None] * 3)


def three_tokens(seconds: float = 2.0) -> ThreeTokens:
    """A session whose target takes `seconds` for five tokens, and one second for one token."""
    curve = LatencyModel.from_curves(CostCurve((1, 5), (1.0, seconds), 256, 1))
    return ThreeTokens(make_batch(make_state([[1]]), policy=AdaptiveDepth(curve)), 3, "auto")


@pytest.mark.parametrize(("accepted", "shorter"), [(0, True), (3, False)])
def test_size_of_drafts_follows_what_the_call_has_accepted_of_what_was_expected(accepted: int, shorter: bool) -> None:
    """Would catch: estimates that fit all texts, in a call whose drafts are all rejected."""
    session = three_tokens()
    sizes = []
    for _ in range(8):
        sizes.append(session.draft([3]).nodes)
        session.observe(VerificationResult([[]], [[9]], [accepted]))
    assert sizes[0] == 2 and sizes[-1] == (0 if shorter else 2)


def test_probability_of_drafts_follows_what_the_row_has_accepted() -> None:
    """Would catch: a common cut by estimates that earlier drafts of a row have refuted, or a ratio squared."""
    session = three_tokens(seconds=1.01)
    before = session.draft([3]).probability
    assert before == ((0.9, 0.6, 0.4),)
    session.observe(VerificationResult([[]], [[9]], [0], num_in_pass=[1]))
    assert session.draft([3]).probability == (pytest.approx([value * 2 / 2.9 for value in before[0]]),)
    session.observe(VerificationResult([[]], [[9]], [0], num_in_pass=[1]))
    assert session.draft([3]).probability == (pytest.approx([value * 2 / 3.8 for value in before[0]]),)


def test_cut_of_several_drafts_counts_what_each_row_has_accepted() -> None:
    """Would catch: a row that accepts nothing, whose draft enlarges the pass for all rows."""
    sessions = [three_tokens(seconds=1.2) for _ in range(2)]
    latency = LatencyModel.from_curves(CostCurve((1, 2, 4), (1.0, 1.6, 2.8), 256, 2)).at(2, 256)
    sizes = []
    for _ in range(4):
        trees = cut_to_fastest_size([session.draft([3]) for session in sessions], latency)
        sizes.append(max(tree.nodes for tree in trees))
        for session in sessions:
            session.observe(VerificationResult([[]], [[9]], [0], num_in_pass=[sizes[-1]]))
    assert sizes[0] > 0 and 0 in sizes


def test_observe_of_a_session_learns_for_its_model_only() -> None:
    """Would catch: odds of one model that change the drafts of another."""
    state = make_state([[1, 2, 3, 4, 1, 2, 3]])
    candidates = NgramCandidates(k=2)
    session = candidates.start(make_batch(state, candidates=candidates))
    before = session.draft([1]).probability
    state.append(0, [9])
    session.observe(VerificationResult([[]], [[9]], [0]))
    session.end()
    assert candidates.start(make_batch(make_state([[1, 2, 3, 4, 1, 2, 3]]))).draft([1]).probability == before


@pytest.mark.parametrize(
    ("edited", "expected"),
    [([1, 2, 3, 4, 99], [6, 7, 8]), ([1, 2, 3, 4, 98, 99], [7, 8, 9]), ([1, 2, 3, 99, 4, 5], [6, 7, 8])],
    ids=["one token replaced", "two tokens replaced", "one token inserted"],
)
def test_draft_after_an_edit_continues_the_text_being_copied(edited: list[int], expected: list[int]) -> None:
    """Would catch: copying that has to wait for a new match after every edit; 98 and 99 occur nowhere else."""
    text = RowText([*range(20), 70, 71], MatchOdds())
    for token in [0, *edited]:
        text.propose(1, CHAIN)
        text.extend([token])
    assert text.propose(3, CHAIN).tokens == expected


# Sessions


@given(texts.filter(len), st.lists(texts.filter(len), min_size=2, max_size=4), st.sampled_from([None, 8]))
def test_draft_of_growing_text_equals_a_new_session(prompt: list[int], steps: Any, tree_size: Any) -> None:
    """Would catch: generated tokens indexed twice or not at all after steps without a draft (budget 0)."""
    candidates = NgramCandidates(k=4, tree=tree_size)
    state = make_state([prompt, [1]])
    session = candidates.start(make_batch(state, candidates=candidates))
    for number, step in enumerate(steps):
        state.append(0, step)
        tree = session.draft([0 if number % 2 else AMPLE, 0])
        assert tree.parents[1] == ()
        if number % 2:
            assert tree.parents[0] == ()
    text = prompt + state.generated[0]
    session.draft([1, 0])
    index = session._texts[0].index
    assert index.tokens.tolist() == text
    assert index.occurrences(text, 10**6) == reference.ngram_occurrences(text, text[-64:])


DRAFTS: list[tuple[dict[str, Any], list[int], list[int]]] = [
    # Two matches of two tokens counted more than one of three.
    ({"k": 1}, [1, 2, 3, 7, 9, 2, 3, 8, 4, 2, 3, 8, 1, 2, 3], [7]),
    # A draft of one period only, because the last occurrence ends where the text ends.
    ({"k": 7}, [1, 2, 3] * 4, [1, 2, 3, 1, 2, 3, 1]),
    ({"k": 5}, [4] * 9, [4] * 5),
    # A match of one token, or a frequent token, where matches of two are required.
    ({"min_ngram": 2}, [1, 2, 3, 9, 2], []),
    ({"k": 1, "min_ngram": 2}, [1, 2, 3, 9, 1, 2], [3]),
]


@pytest.mark.parametrize(("settings", "text", "expected"), DRAFTS)
def test_draft_of_a_chain_after_a_text(settings: dict[str, Any], text: list[int], expected: list[int]) -> None:
    """Would catch: see the comments in `DRAFTS`."""
    assert ngram_draft(NgramCandidates(**settings), text) == (expected, tuple(range(-1, len(expected) - 1)))


def test_draft_of_a_text_being_copied_is_40_tokens_and_more() -> None:
    """Would catch: a draft that a constant cuts short, although dozens of tokens were accepted."""
    text = RowText([*range(100, 200)], MatchOdds())
    for first in range(100, 132, 4):
        text.propose(64, SearchLimits(64, 0.05))
        text.extend([*range(first, first + 4)])
    assert text.propose(64, SearchLimits(64, 0.05)).tokens[:40] == [*range(132, 172)]


@pytest.mark.parametrize("tree", [None, 27])
@pytest.mark.parametrize("budget", [0, 1, 3, 50])
def test_draft_depth_is_limited_by_the_budget(tree: int | None, budget: int) -> None:
    """Would catch: nodes behind the maximum length, whose scores nobody can use."""
    _, parents = ngram_draft(NgramCandidates(k=9, tree=tree), [1, 2, 3] * 9, budget)
    assert max((reference.depth(parents, node) for node in range(len(parents))), default=0) == min(9, budget)


def test_propose_with_max_ngram_counts_longer_matches_as_that_long() -> None:
    """Would catch: a limit that hides long matches in place of trusting them less."""
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6]
    short, long = (RowText(text, MatchOdds(), max_ngram=most).propose(1, CHAIN) for most in (1, 64))
    assert short.tokens == long.tokens == [7] and short.probability < long.probability


# Recorded answers


@pytest.mark.parametrize(("file", "first"), [("traces/hagrid.jsonl", 0), ("validation.jsonl", 200)])
def test_chain_of_fixed_k_takes_fewer_steps_than_prompt_lookup(file: str, first: int, tokenizer: Any) -> None:
    """Would catch: votes worse than the first match, or chains that stop where acceptance is unlikely."""
    scripts = load_scripts(TRACES.parent / file, tokenizer)[first : first + 10]  # answers from documents; edits
    lookup = partial(dict, prompt_lookup_num_tokens=10, max_matching_ngram_size=2)
    mine, theirs = (tokens_per_forward(scripts, len(tokenizer), one) for one in (ours(NgramCandidates(k=10)), lookup))
    assert mine > theirs
