"""Combinations: the merged tree against a slow reference, which members draft, and estimates of the call."""

from collections.abc import Sequence
from math import nan, prod
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specgen import AdaptiveDepth, Candidates, CombinedCandidates, DraftTree, NgramCandidates
from hf_specgen.candidates.base import DraftSession
from hf_specgen.candidates.best_first import SearchLimits, best_first
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.merged_tree import UNPROPOSED_FACTOR, MemberDrafts, UnproposedTokens, merged_children
from hf_specgen.candidates.recycling import RecyclingSession
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.verification import VerificationResult
from tests.helpers.calls import make_batch, make_state
from tests.helpers.reference import node_paths

Path = tuple[int, ...]
some_paths = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
tries = st.dictionaries(some_paths, st.floats(0.05, 0.95), max_size=5)


def draft_of(acceptance: dict[Path, float]) -> tuple[DraftTree, dict[Path, float]]:
    """A draft with these paths and all their beginnings, and the acceptance of the last token of each."""
    paths = sorted({path[:end] for path in acceptance for end in range(1, len(path) + 1)}, key=lambda p: (len(p), p))
    known = {path: acceptance.get(path, 0.5) for path in paths}
    probability = {path: prod(known[path[:end]] for end in range(1, len(path) + 1)) for path in paths}
    parents = tuple(paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths)
    tree = DraftTree.from_nodes([([path[-1] for path in paths], parents)], (tuple(probability.values()),))
    return tree, known


def reference(copied: Sequence[dict[Path, float]], network: dict[Path, float]) -> dict[Path, float]:
    """The path probability of every node that somebody proposes."""
    paths = {path for draft in [*copied, network] for path in draft}
    found: dict[Path, float] = {(): 1.0}
    for path in sorted(paths, key=len):
        siblings = {other for other in paths if other[:-1] == path[:-1]}
        has_network = any(other in network for other in siblings)
        acceptance = {}
        for other in siblings:
            rejected = 1.0
            for draft in copied:
                rejected *= 1 - draft.get(other, 0.0)
            acceptance[other] = (1 - rejected) * (UNPROPOSED_FACTOR if has_network else 1.0)
            if other in network:
                acceptance[other] = 1 - rejected * (1 - network[other])
        scale = max(1.0, sum(acceptance.values()))
        found[path] = found[path[:-1]] * acceptance[path] / scale
    del found[()]
    return found


def test_members_end_if_a_later_one_cannot_start_or_end() -> None:
    """Would catch: a session that stays open, as nobody has it who could end it."""
    ended = []

    class Member(Candidates):
        def __init__(self, fails_to: str = ""):
            super().__init__(k=2)
            self.fails_to = fails_to

        def start(self, batch: DraftBatch) -> DraftSession:
            if self.fails_to == "start":
                raise RuntimeError("a failing start")
            return Session(batch, self)

    class Session(DraftSession):
        def __init__(self, batch: DraftBatch, member: Member):
            super().__init__(batch)
            self.member = member

        def draft(self, max_depths: Sequence[int]) -> DraftTree:
            return DraftTree.empty(len(max_depths))

        def end(self) -> None:
            ended.append(self.member)
            if self.member.fails_to == "end":
                raise RuntimeError("a failing end")

    batch = make_batch(make_state([[5, 6]]))
    for fails_to in ("start", "end"):
        members = [Member(), Member(), Member(fails_to), Member()]
        ended.clear()
        with pytest.raises(RuntimeError, match=f"a failing {fails_to}"):
            CombinedCandidates(members).start(batch).end()
        assert set(ended) == set(members[:2] if fails_to == "start" else members)


@given(tries, tries, tries, st.integers(1, 8))
def test_merged_tree_has_the_most_probable_nodes_of_all_drafts(
    first: dict[Path, float], second: dict[Path, float], third: dict[Path, float], nodes: int
) -> None:
    """Would catch: a path of one draft continued in another's, a network's estimate mixed with that of copied text."""
    drafts, known = zip(*map(draft_of, (first, second, third)), strict=True)
    member_drafts = MemberDrafts(drafts, num_without_pass=2, row=0)
    tree = best_first(
        member_drafts.root(0), merged_children(member_drafts, UNPROPOSED_FACTOR, None), 3, SearchLimits(nodes)
    )
    expected = reference(known[:2], known[2])
    paths = node_paths(tree.tokens, tree.parents)
    assert tree.probability == pytest.approx([expected[path] for path in paths])
    assert tree.probability == pytest.approx(sorted(expected.values(), reverse=True)[:nodes])


class Table:
    """A stand-in for a recycling session: candidate tokens that do not depend on the token before them."""

    def __init__(self, acceptance: dict[int, float]):
        self.acceptance = acceptance

    def candidate_tokens(self, token: int, is_recycled: bool) -> list[tuple[int, float]]:
        return list(self.acceptance.items())


siblings = st.dictionaries(st.integers(1, 4), st.floats(0.01, 0.24), max_size=4)  # whose sum is below 1


def merged_siblings(copied: dict[int, float], recycled: dict[int, float]) -> dict[int, float]:
    """The first level of the merged tree of a copied draft, which Token Recycling extends."""
    drafts = MemberDrafts([draft_of({(token,): value for token, value in copied.items()})[0]], 1, row=0)
    children = merged_children(drafts, UNPROPOSED_FACTOR, cast(RecyclingSession, Table(recycled)))
    return {token: probability for token, probability, _ in children(drafts.root(0), 0)}


@given(siblings.filter(bool), siblings)
def test_copied_and_recycled_tokens_are_merged_as_proposals_of_which_one_is_accepted(
    copied: dict[int, float], recycled: dict[int, float]
) -> None:
    """Would catch: siblings whose probabilities sum to more than 1, a token of one of the two that is left out."""
    neither = {0: 1 - sum(copied.values())}, {0: 1 - sum(recycled.values())}  # token 0: rejected
    outcomes = {
        (first, second): first_probability * second_probability
        for first, first_probability in (copied | neither[0]).items()
        for second, second_probability in (recycled | neither[1]).items()
        if not (first and second)
    }
    total = sum(outcomes.values())
    expected = {
        token: sum(value for outcome, value in outcomes.items() if token in outcome) / total
        for token in {*copied, *recycled}
    }
    assert merged_siblings(copied, recycled) == pytest.approx(expected)


def test_a_long_copy_is_not_cut_by_recycled_tokens() -> None:
    """Would catch: nearly certain tokens that lose a part to the recycled ones at every level of a copy."""
    recycled = dict.fromkeys(range(10, 18), 0.05)
    assert merged_siblings({1: 0.99}, recycled)[1] > 0.98
    assert merged_siblings({1: 0.99}, {})[1] == pytest.approx(0.99)
    assert merged_siblings({1: 0.01}, {2: 0.4}) == pytest.approx({1: 0.006, 2: 0.397}, abs=1e-3)


@pytest.mark.parametrize("probability", [(0.0, 0.0), (nan, nan), (nan, 0.4)])
def test_drafts_without_estimates_and_with_zeros_are_merged(probability: tuple[float, ...]) -> None:
    """Would catch: a division by zero; NaN, or tokens of a strategy that estimates nothing, taken for certain."""
    unknown = DraftTree.chains([[5, 6]])
    improbable = DraftTree.from_nodes([([7, 8], (-1, 0))], (probability,))
    member_drafts = MemberDrafts([unknown, improbable], num_without_pass=2, row=0)
    tree = best_first(
        member_drafts.root(0), merged_children(member_drafts, UNPROPOSED_FACTOR, None), 9, SearchLimits(9)
    )
    assert (tree.tokens, tree.parents) == ([5, 6], [-1, 0])
    assert tree.probability == pytest.approx([0.6, 0.36])


class Scripted(Candidates):
    """Drafts a chain whose tokens are all accepted with this probability, and records what it is called with."""

    def __init__(self, tokens: list[int], acceptance: float, is_network: bool):
        super().__init__(16)
        self.tokens, self.acceptance, self.negligible_draft_cost = tokens, acceptance, not is_network
        self.depths: list[int] = []
        self.observed: list[Any] = []

    def start(self, batch: DraftBatch) -> DraftSession:
        return _ScriptedSession(self, batch)


class _ScriptedSession(DraftSession):
    def __init__(self, settings: Scripted, batch: DraftBatch):
        super().__init__(batch)
        self._settings = settings

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._settings.depths.append(max_depths[0])
        tokens = self._settings.tokens[: max_depths[0]]
        probability = tuple(self._settings.acceptance ** (depth + 1) for depth in range(len(tokens)))
        return DraftTree.from_nodes([(tokens, tuple(range(-1, len(tokens) - 1)))], (probability,))

    def observe(self, result: VerificationResult) -> None:
        self._settings.observed.append(result.paths[0])


@pytest.mark.parametrize(
    ("acceptance", "drafts", "samples"),
    [(0.95, False, False), (0.95, False, True), (0.5, True, False), (0.5, True, True)],
)
def test_network_is_left_out_where_many_tokens_are_expected_without_it(
    acceptance: float, drafts: bool, samples: bool
) -> None:
    """Would catch: a network that drafts beside long copied text, copied text beside nodes that were drawn."""
    copied = Scripted(list(range(1, 17)), acceptance, is_network=False)
    network = Scripted([40, 41], 0.9, is_network=True)
    batch = make_batch(make_state([[1, 2, 3]]), verification=SimpleNamespace(wants_q=samples))
    session = CombinedCandidates([network, copied], tree=32).start(batch)
    tree = session.draft([16])
    assert network.depths == [16 if drafts else 0]
    assert (40 in tree.tokens[0].tolist()) == drafts and (1 in tree.tokens[0].tolist()) == (not drafts or not samples)
    session.observe(VerificationResult([[0]], [[int(tree.tokens[0, 0]), 9]], [1]))
    assert network.observed == [[0]] if drafts else network.observed == [[]]
    session.draft([0])
    assert network.depths[-1] == copied.depths[-1] == 0


@pytest.mark.parametrize("right", [True, False])
def test_copied_tokens_beside_those_of_a_drafter_get_the_acceptance_of_the_call(right: bool) -> None:
    """Would catch: right copies that a drafter which does not copy keeps out of every tree of a call."""
    copied = DraftTree.chains([[5, 6, 7]])
    network = DraftTree.from_nodes([([8, 9], (-1, -1))], ((0.5, 0.3),))
    estimate = UnproposedTokens()
    assert estimate.factor == UNPROPOSED_FACTOR
    for _ in range(40):
        estimate.observe(MemberDrafts([copied, network], num_without_pass=1, row=0), [5, 6, 1] if right else [8, 5, 6])
    # One token at most is counted a step: after token 5 the drafter proposes nothing. It is expected with 0.6.
    assert (estimate.factor == 1.0) if right else (estimate.factor < UNPROPOSED_FACTOR)


def test_unproposed_tokens_are_compared_with_what_was_expected() -> None:
    """The estimate of the members is multiplied, not replaced: half as many accepted tokens are a factor of a half."""
    copied = DraftTree.from_nodes([([5], (-1,))], ((0.8,),))
    network = DraftTree.from_nodes([([8], (-1,))], ((0.5,),))
    estimate = UnproposedTokens()
    for step in range(1000):
        estimate.observe(MemberDrafts([copied, network], num_without_pass=1, row=0), [5 if step % 5 < 2 else 8])
    assert estimate.factor == pytest.approx(0.5, abs=0.01)


DRAFTING_TAKES_TIME = LatencyModel.from_curves(
    CostCurve((1, 65), (0.010, 0.011), context=256, batch=1), draft_token=0.002
)


@pytest.mark.parametrize("network_is_right", [False, True])
def test_network_pauses_where_it_adds_nothing_and_the_others_go_on(network_is_right: bool) -> None:
    """Would catch: a combination below its best member, since a network takes time, or since its loss pauses all."""
    copied = Scripted([5, 6], 0.6, is_network=False)
    network = Scripted([8, 9], 0.6, is_network=True)
    candidates = CombinedCandidates([copied, network])
    batch = make_batch(make_state([[1, 2, 3]]), candidates=candidates, policy=AdaptiveDepth(DRAFTING_TAKES_TIME))
    session = candidates.start(batch)
    losses = []
    for _ in range(60):
        tree = session.draft([16])
        right = [8, 9] if network_is_right else [5, 6]
        found = [token for token in right if token in tree.tokens[0].tolist()]
        path = [tree.tokens[0].tolist().index(token) for token in found]
        session.observe(VerificationResult([path], [[*found, 1]], [len(found)]))
        losses.append(session.excluded_time_loss)
    drafted = sum(depth > 0 for depth in network.depths)
    assert drafted == 60 if network_is_right else 3 <= drafted <= 8
    assert all(depth > 0 for depth in copied.depths)
    if network_is_right:
        assert sum(losses) == pytest.approx(0.0)
    else:  # the limit, the last draft, 2% of the steps
        assert 0.75 < sum(losses) < 0.75 + 0.41 + 0.02 * 60


@pytest.mark.parametrize("of_call", [None, [1, 2, 3]])
def test_prediction_of_the_call_has_precedence_over_that_of_the_combination(of_call: list[int] | None) -> None:
    """Would catch: `generate(prediction=…)` that is ignored where the strategy has one."""
    batch = make_batch(make_state([[1, 2, 3]])).with_settings(prediction=of_call)
    found = list[Any]()

    def start(member_batch: DraftBatch) -> DraftSession:
        found.append(member_batch.call.settings.prediction)
        return NgramCandidates().start(member_batch)

    CombinedCandidates([NgramCandidates()], prediction=[7, 8]).start_members(batch, [start])
    assert found == [[7, 8] if of_call is None else of_call]
