"""Best-first trees: connected, and no tree of the same size has a higher expected length."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specgen.candidates.acceptance import confidence_by_rank
from hf_specgen.candidates.acceptance_estimator import AcceptanceEstimator
from hf_specgen.candidates.best_first import SearchLimits, best_first
from hf_specgen.candidates.captured_levels import CandidateProposer
from hf_specgen.candidates.one_pass import Ranked, best_combinations
from hf_specgen.candidates.tree_builder import LEVELS_PER_SYNC, TreeBuilder
from hf_specgen.candidates.tree_size import (
    MAX_NODES,
    ChainSizer,
    FastestChainSizer,
    FastestTreeSizer,
    FixedTreeSizer,
    TreeSizer,
)
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.depth.latency import NodeLatency, fastest
from hf_specgen.device_tree import DeviceTree, Frontier
from hf_specgen.targets.cache import padded_tokens
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import perturbed
from hf_specgen.verification.processors import ScoreProcessors
from tests.helpers import reference

probabilities = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3)


def descending(values: list[float]) -> list[float]:
    """Acceptance of children, most preferred first; they exclude each other, so their sum is at most 1."""
    ordered = sorted(values, reverse=True)
    return [value / max(1.0, sum(ordered)) for value in ordered]


def best_expected_length(acceptance: list[list[float]], size: int) -> float:
    """Slow reference: the highest expected length of all trees of at most `size` nodes, by trying every one."""

    def best(places: list[tuple[int, ...]], left: int) -> float:
        """Of what can be added at `places`, paths whose parent is in the tree, or below them."""
        if not places or not left:
            return 0.0
        path, *others = places
        below = [(*path, rank) for rank in range(len(acceptance[len(path)]))] if len(path) < len(acceptance) else []
        probability = float(np.prod([acceptance[depth][rank] for depth, rank in enumerate(path)]))
        return max(best(others, left), probability + best([*others, *below], left - 1))

    return best([(rank,) for rank in range(len(acceptance[0]))], size)


@given(st.lists(probabilities, min_size=1, max_size=3), st.integers(1, 5))
def test_best_combinations_any_size_has_the_highest_expected_length(acceptance: list[list[float]], size: int) -> None:
    """Would catch: a heap that forgets siblings or children, so that likelier nodes are left out."""
    ranks = min(map(len, acceptance))
    acceptance = [descending(values[:ranks]) for values in acceptance]
    values = np.array(acceptance)[:, None]
    ranked = Ranked(np.arange(values.size).reshape(values.shape), values, np.zeros(values.shape, dtype=int))
    tree = best_combinations(ranked, len(acceptance), FixedTreeSizer(size))
    assert sum(tree.probability) == pytest.approx(best_expected_length(acceptance, size), rel=1e-6)


@dataclass
class ReferenceTreeBuilder:
    """Slow reference of `TreeBuilder` for one row: lists, one candidate after the other."""

    limit: int
    depth: int = 0
    candidates: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Token, parent candidate or -1, depth, path probability."""
    expanded: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])

    def add(self, tokens: list[list[int]], acceptance: list[list[float]]) -> None:
        """Add the children of the frontier; nothing below a candidate that cannot be expanded."""
        self.depth += 1
        for parent, row, values in zip(self.frontier, tokens, acceptance, strict=True):
            depth, above = (0, float(self.limit > 0)) if parent < 0 else self.candidates[parent][2:]
            is_node = depth < self.limit
            factor = above if is_node else 0.0
            self.candidates += [(t, parent, depth + 1, factor * a) for t, a in zip(row, values, strict=True)]

    def open(self) -> list[int]:
        """Candidates of the last level that can be expanded, most probable first."""
        candidates = enumerate(self.candidates)
        found = [index for index, (*_, depth, p) in candidates if p > 0 and depth == self.depth < self.limit]
        return sorted(found, key=lambda index: -self.candidates[index][3])

    def best(self, nodes: int) -> set[tuple[int, ...]]:
        """The paths, as candidate indices, of the most probable nodes."""
        ranked = sorted((i for i, c in enumerate(self.candidates) if c[3] > 0), key=lambda i: -self.candidates[i][3])
        return {self.path(index) for index in ranked[:nodes]}

    def path(self, index: int) -> tuple[int, ...]:
        """The tokens from the first draft token to a candidate."""
        token, parent, _, _ = self.candidates[index]
        return (token,) if parent < 0 else (*self.path(parent), token)


def acceptance_of(random: np.random.Generator, rows: int, nodes: int, children: int) -> torch.Tensor:
    """`[rows, nodes, children]` descending probabilities whose sum is below 1."""
    drawn = random.dirichlet(np.ones(children + 1), size=(rows, nodes))[..., :children]
    return torch.from_numpy(-np.sort(-drawn, axis=-1)).float().clamp(min=1e-3, max=0.999)


def new_builder(depths: list[int], children: int) -> TreeBuilder:
    return TreeBuilder(depths, children, torch.full((len(depths), 1), 3))


@given(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([(), (1, 2, 3), (3,)]),
)
def test_tree_builder_agrees_with_the_reference(
    seed: int, rows: int, width: int, size: int, expanded_first: bool, structures: tuple[int, ...]
) -> None:
    """Would catch: a node without its parent, a depth limit that is ignored, wrong probabilities or structures.

    Also candidates whose probability is NaN, which are expanded before all others.
    """
    random = np.random.default_rng(seed)
    limits = random.integers(0, 5, rows).tolist()
    limits[0] = 4
    builder, references = new_builder(limits, 4), [ReferenceTreeBuilder(limit) for limit in limits]
    unique, paths = iter(range(10**6)), [[()] for _ in limits]
    for level in range(4):
        nodes = width if level else 1
        if level:
            frontier = builder.select_frontier(width)
            above = frontier.gather_parents(torch.arange(width if level > 1 else 1).expand(rows, -1))
            new = zip(above.tolist(), frontier.tokens.tolist(), strict=True)
            paths = [[(*paths[row][at], one) for at, one in zip(*pair, strict=True)] for row, pair in enumerate(new)]
            for row, slow in enumerate(references):
                opened = slow.open()[:width]
                slow.frontier = opened
                slow.expanded += opened
                assert paths[row][: len(opened)] == [slow.path(index) for index in opened]
            if level in structures:
                _check_last_ancestors(frontier, paths)
        tokens = torch.tensor([[[next(unique) for _ in range(4)] for _ in range(nodes)] for _ in range(rows)])
        acceptance = acceptance_of(random, rows, nodes, 4)
        is_nan = torch.from_numpy(random.random(acceptance.shape) < 0.1)
        builder.add(tokens, acceptance.log().masked_fill(is_nan, torch.nan))
        acceptance = acceptance.masked_fill(is_nan, 0.0)
        for row, slow in enumerate(references):
            used = len(slow.frontier)
            slow.add(tokens[row].tolist()[:used], acceptance[row].tolist()[:used])
    tree = builder.best(size)
    if expanded_first:
        tree, _ = builder.best_with_expanded(max(size, builder.num_expanded), expanded_first)
    _check_structure(tree)
    for row, slow in enumerate(references):
        chosen = {reference.path(tree, row, node) for node, p in enumerate(tree.probability[row]) if p > 1e-20}
        if not expanded_first:
            assert chosen == slow.best(size)
        else:
            assert chosen >= {slow.path(index) for index in slow.expanded}
            assert all(len(path) <= limits[row] for path in chosen)
        known = {slow.path(index): candidate[3] for index, candidate in enumerate(slow.candidates)}
        for node, p in enumerate(tree.probability[row]):
            if p > 1e-20:
                assert p == pytest.approx(known[reference.path(tree, row, node)], rel=1e-4)


@pytest.mark.parametrize("with_expanded", [False, True])
@pytest.mark.parametrize("nodes", range(2, 21))
def test_nodes_that_are_as_likely_as_their_children_precede_them(nodes: int, with_expanded: bool) -> None:
    """Would catch: a child whose probability rounds to 1 before its parent, or without it."""
    builder = new_builder([8], 4)
    certain = torch.tensor([[[0.0, -20.0, -30.0, -torch.inf]]])
    builder.add(torch.tensor([[[1, 2, 3, 4]]]), certain)
    for level in range(1, 8):
        builder.select_frontier(2)
        builder.add(10 * level + torch.arange(8).view(1, 2, 4), certain.expand(1, 2, 4))
    tree = builder.best(nodes)
    if with_expanded:
        tree, _ = builder.best_with_expanded(max(nodes, builder.num_expanded), expanded_first=False)
    _check_structure(tree)
    assert all(parent < node for node, parent in enumerate(tree.parents[0]))
    likely = [1, *(10 * level for level in range(1, 7))]
    assert tree.token_lists()[0][:7] == likely[: tree.nodes]


def _check_last_ancestors(frontier: Frontier, paths: list[list[tuple[int, ...]]]) -> None:
    """The ancestors of the last nodes are the tokens of their paths, each at its place among all expanded nodes."""
    depths, ancestors = frontier.structure()
    assert ancestors.shape[2] == depths.shape[1] == 1 + frontier.nodes
    for row, ends in enumerate(paths):
        assert ancestors[row].sum(dim=1).tolist() == [1 + len(path) for path in ends]
        for one, path in enumerate(ends):
            assert depths[row, -len(ends) + one] == len(path) and ancestors[row, one, -len(ends) + one]
            for other, another in enumerate(ends):  # in common they have what their paths have in common, and the root
                differing = (at for at, (a, b) in enumerate(zip(path, another, strict=True)) if a != b)
                common = next(differing, len(path))
                assert (ancestors[row, one] & ancestors[row, other]).sum() == 1 + common


def _check_structure(tree: DeviceTree) -> None:
    """The structure on the device is that of the parents which the host reads."""
    host = DraftTree(tree.tokens, tree.parents).structure()
    for row, parents in enumerate(tree.parents):
        size = len(parents)
        assert torch.equal(tree.structure().depths[row, : 1 + size], host.depths[row, : 1 + size])
        block = slice(None, 1 + size)
        assert torch.equal(tree.structure().ancestors[row, block, block], host.ancestors[row, block, block])


def _grown(
    builder: TreeBuilder, sizer: TreeSizer, chances: list[float], passes: list[int] | None = None
) -> TreeBuilder:
    """Grow a tree whose nodes all have children with these probabilities."""

    def add(width: int) -> None:
        shape = (len(builder.max_depths), width, len(chances))
        log_acceptance = torch.tensor(chances).log().expand(shape)
        builder.add(torch.arange(len(chances)).expand(shape), log_acceptance)

    add(1)
    while (plan := sizer.next_plan(builder, max(builder.max_depths))) is not None:
        sizer.record_passes(plan)
        for width in [plan.expansion_width] * plan.num_passes:
            builder.select_frontier(width)
            add(width)
            if passes is not None:
                passes.append(width)
    return builder


def curve(draft_token: float, slope: float) -> LatencyModel:
    return LatencyModel.from_curves(CostCurve((1, 65), (1.0, 1.0 + 64 * slope), 256, 1), draft_token=draft_token)


@pytest.mark.parametrize(("slope", "draft_token"), [(0.002, 0.05), (0.05, 0.05), (0.2, 0.3)])
def test_fastest_size_no_other_number_of_nodes_is_faster(slope: float, draft_token: float) -> None:
    """Would catch: a tree sized without regard to what a node costs."""
    latency, passes = curve(draft_token, slope).at(1, 100), list[int]()
    sizer = FastestTreeSizer(latency)
    builder = _grown(new_builder([6], 4), sizer, [0.5, 0.2, 0.1, 0.05], passes)
    spent = latency.draft.draft_seconds([1, *passes])
    probability = builder.read_probabilities().probability[0, :64]
    tokens = [1 + probability[:count].sum() for count in range(len(probability) + 1)]
    rates = [one / (latency.target.seconds_of(1.0 + count) + spent) for count, one in enumerate(tokens)]
    assert sizer.num_verified_of_builder(builder) == int(np.argmax(rates))


@pytest.mark.parametrize("probability", [[[0.9, 0.5, 0.2, 0.1]], [[0.6, 0.1], [], [0.9, 0.8, 0.7, 0.02]], [[]]])
@pytest.mark.parametrize(
    ("drafting", "is_padded", "pass_rows", "num_active_rows"),
    [(0.0, False, 0, 0), (0.5, False, 0, 0), (0.0, True, 0, 0), (0.0, True, 16, 0), (0.0, False, 16, 16)],
)
def test_fastest_size_of_grown_trees_no_other_number_of_nodes_is_faster(
    probability: Any, drafting: float, is_padded: bool, pass_rows: int, num_active_rows: int
) -> None:
    """Would catch: rows added up at the wrong nodes, the passes of the drafter forgotten or counted twice; padding.

    And rows that have ended, which a captured pass computes all the same; and rows without a draft, which emit a token
    all the same.
    """
    latency = curve(0.05, 0.1).at(1, 100)
    rates = []
    for count in range(max(map(len, probability)) + 1):
        tokens = max(len(probability), num_active_rows) + sum(sum(row[:count]) for row in probability)
        width = padded_tokens(1 + count) if is_padded else 1 + count
        rows = max(len(probability), pass_rows)
        rates.append(tokens / (latency.target.seconds_of(float(rows * width)) + drafting))
    sizer = FastestTreeSizer(latency, len(probability), pass_rows, num_active_rows, is_padded)
    count = sizer.num_verified_by_probability(probability, drafting)
    assert count == int(np.argmax(rates))


def test_fastest_size_certain_text_grows_deep_and_uncertain_text_wide() -> None:
    """Would catch: one size for all texts. Long certain chains stay thin, uncertain text gets short and wide."""
    depths, widths = [], []
    for first in (0.97, 0.3):
        sizer = FastestTreeSizer(curve(0.05, 0.002).at(1, 100))
        builder = _grown(new_builder([16], 4), sizer, [first, *[(1 - first) / 4] * 3])
        tree = builder.best(sizer.num_verified_of_builder(builder))
        depths.append(max(tree.depths(0)))
        widths.append(tree.nodes / depths[-1])
    assert depths[0] > depths[1] + 3
    assert widths[1] > widths[0]


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
def test_fastest_chain_has_the_depth_with_the_most_tokens_per_second(acceptance: float) -> None:
    """Would catch: chains as deep as they may be, where drafts cannot be trees."""
    latency, passes = curve(0.05, 0.05).at(1, 100), list[int]()
    sizer = FastestChainSizer(latency)
    builder = _grown(new_builder([32], sizer.children), sizer, [acceptance], passes)
    tree = builder.best(sizer.num_verified_of_builder(builder))
    depths = np.arange(33)
    tokens = np.cumsum(acceptance**depths)
    rates = tokens / [latency.target.seconds_of(1.0 + depth) + 0.05 * depth for depth in depths]
    assert tree.is_chain and abs(tree.nodes - int(np.argmax(rates))) <= 1
    assert len(passes) <= tree.nodes + 1 < 32


@pytest.mark.parametrize("may_end_early", [False, True])
def test_chain_of_a_number_of_nodes_makes_no_pass_beyond_them(may_end_early: bool) -> None:
    """Would catch: `tree=3` that is ignored where drafts must be chains."""
    passes = list[int]()
    sizer = ChainSizer(3, may_end_early)
    builder = _grown(new_builder([9], 1), sizer, [0.9], passes)
    assert passes == [1, 1] and builder.best(sizer.num_verified_of_builder(builder)).nodes == 3


def test_best_with_expanded_nodes_leaves_none_of_them_out() -> None:
    """Would catch: samples that are left out because of what follows them, so that others have not the distribution q.

    By probability the siblings of the first node come before the nodes below it.
    """
    builder, tokens = new_builder([4], 3), iter(range(100))
    for level in range(3):
        if level:
            builder.select_frontier(1)
        builder.add(torch.tensor([[[next(tokens) for _ in range(3)]]]), torch.full((1, 1, 3), 0.3).log())
    trees = [builder.best(3), builder.best_with_expanded(3, expanded_first=False)[0]]
    assert {0, 3} <= set(trees[1].token_lists()[0]) and 3 not in trees[0].token_lists()[0]


@pytest.mark.parametrize(("is_cpu", "reads"), [(True, 16), (False, 4)])
def test_fastest_size_on_an_accelerator_reads_rarely(monkeypatch: Any, is_cpu: bool, reads: int) -> None:
    """Would catch: a read for every level, or a first pass only after a read; more passes than the draft is deep."""
    read, to_host, passes = list[Any](), torch.Tensor.cpu, list[int]()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (read.append(tensor), to_host(tensor))[1])
    monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
    builder = new_builder([16], 4)
    sizer = FastestTreeSizer(curve(0.02, 0.002).at(1, 100))
    _grown(builder, sizer, [0.97, 0.01, 0.01, 0.01], passes)
    sizer.num_verified_of_builder(builder)
    assert len(passes) == 15 and len(read) == reads
    assert is_cpu or max(passes[: LEVELS_PER_SYNC - 1]) == 4, "all children, where nothing was read"


@pytest.mark.parametrize(("is_cpu", "first"), [(True, 0.97), (False, 0.97), (False, 0.3)])
def test_expanded_nodes_that_are_all_verified_fill_one_pass_at_most(
    monkeypatch: Any, is_cpu: bool, first: float
) -> None:
    """Would catch: a pass of the target over more than 64 tokens, since four passes of the drafter follow a read."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
    builder = new_builder([32], 8)
    sizer = FastestTreeSizer(curve(0.001, 0.0001).at(1, 100), verifies_expanded=True)
    _grown(builder, sizer, [first, *[0.1 * (1 - first)] * 7])
    assert builder.num_expanded <= MAX_NODES
    assert is_cpu or first < 0.9 or builder.num_expanded > MAX_NODES - 8


@pytest.mark.parametrize("draft_token", [0.02, 0.25, 0.5, 0.7])
def test_fastest_size_passes_before_the_first_read_are_the_fastest_number(monkeypatch: Any, draft_token: float) -> None:
    """Would catch: the draft token of level 1, which needs no further pass, counted as if it needed one.

    Before any draft, a level's tokens are assumed as in `AcceptanceEstimator`; more than two passes are all.
    """
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    tokens = [1 + float(accepted) for accepted in AcceptanceEstimator().expected_of_draft(1 + LEVELS_PER_SYNC)]
    seconds = [1 + 0.05 * (1 + passes) + draft_token * (1 + passes) for passes in range(1 + LEVELS_PER_SYNC)]
    best = int(np.argmax(np.array(tokens) / seconds))
    plan = FastestTreeSizer(curve(draft_token, 0.05).at(1, 100)).plan_without_sync(new_builder([16], 4), 16)
    assert (0 if plan is None else plan.num_passes) == (LEVELS_PER_SYNC if best > 2 else best)


@pytest.mark.parametrize(("is_cpu", "count"), [(True, 1), (False, LEVELS_PER_SYNC - 1)])
def test_fixed_size_reads_after_some_levels_and_stops_when_no_better_node_can_come(
    monkeypatch: Any, is_cpu: bool, count: int
) -> None:
    """Would catch: passes of the drafter that cannot change the tree."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
    passes: list[int] = []
    _grown(new_builder([64], 3), FixedTreeSizer(4), [0.3, 0.2, 0.1], passes)
    assert len(passes) == count
    passes.clear()
    _grown(new_builder([3], 3), FixedTreeSizer(40), [0.5, 0.3, 0.1], passes)
    assert len(passes) == 2, "as deep as the draft may be"
    chain = new_builder([9], 1)
    assert ChainSizer().num_verified_of_builder(chain) == 9


def test_chains_of_rows_with_different_limits_are_cut_to_them() -> None:
    """Would catch: a token beyond the depth of its row, whose position the model may not have."""
    builder = _grown(new_builder([3, 0, 1], 1), ChainSizer(), [0.5])
    tree, source = builder.best_with_expanded(3, expanded_first=False)
    assert tree.is_chain and tree.parents == ((-1, 0, 1), (), (-1,)) and source.tolist() == [[0, 1, 2]] * 3
    assert tree.token_lists() == [[0, 0, 0], [-1, -1, -1], [0, -1, -1]], "-1 is never the token of the target"
    assert tree.probability[0] == pytest.approx((0.5, 0.25, 0.125))


@pytest.mark.filterwarnings("error::RuntimeWarning")  # values of padding that are no integers
@pytest.mark.parametrize(("children", "expanded_first"), [(1, False), (3, False), (3, True)])
def test_padded_tree_has_the_same_nodes_and_tokens_that_a_model_has(children: int, expanded_first: bool) -> None:
    """Would catch: padding that is no token, which the target cannot embed; padding that counts as nodes."""
    builder = _grown(new_builder([2], children), FixedTreeSizer(4, children), [0.5, 0.3, 0.1][:children])
    tree = builder.best_with_expanded(4, expanded_first)[0] if expanded_first else builder.best(4)
    padded = tree.padded(9)
    inputs = padded.step_tokens([3], torch.device("cpu"))
    assert inputs.tolist() == [[3, *tree.tokens[0].tolist(), *[0] * (9 - tree.nodes)]]
    assert padded.nodes == 9 and padded.parents[0][:4] == tree.parents[0]
    assert padded.probability[0][:4] == tree.probability[0]
    assert padded.parents[0][4:] == ((-1,) * 5 if expanded_first else ())


# Best-first search, and drafts for rows cut to one size


@given(
    st.lists(probabilities, min_size=1, max_size=4),
    st.lists(st.floats(-0.2, 1.0), min_size=12, max_size=12),
    st.floats(0.0, 2.0),
)
def test_search_that_ends_early_verifies_the_same_nodes_as_a_complete_one(
    acceptance: list[list[float]], increases: list[float], draft_seconds: float
) -> None:
    """Would catch: a search that ends although a further node raises the tokens per second, as after a jump of T(q)."""
    levels = [descending(values) for values in acceptance]
    seconds = np.maximum.accumulate(np.cumsum([1.0, *increases])) + draft_seconds  # flat and steep parts
    seconds[1:4] += 0.5  # and a size after which passes are faster again

    def children(path: tuple[int, ...], level: int) -> list[tuple[int, float, tuple[int, ...]]]:
        return [(rank, value, (*path, rank)) for rank, value in enumerate(levels[level])]

    def fastest_tree(limits: SearchLimits) -> list[tuple[int, ...]]:
        tree = best_first((), children, len(levels), limits)
        tokens = np.cumsum([1.0, *tree.probability])
        return tree.tags[: fastest(tokens, seconds[: len(tokens)])]

    latency = NodeLatency.of_seconds(seconds)
    assert fastest_tree(SearchLimits(12, latency=latency)) == fastest_tree(SearchLimits(12))


def test_search_with_a_latency_expands_only_nodes_that_may_be_verified() -> None:
    """Would catch: a search that goes on to the maximum size where the first node is too improbable."""
    latency = NodeLatency.of_seconds(1.0 + 0.5 * np.arange(10))
    tree = best_first(0, lambda tag, level: [(1, 0.9, 1), (2, 0.08, 2)], 9, SearchLimits(9, latency=latency))
    # The fourth one, at 0.656, adds fewer tokens than 0.5 s at (1 + 0.9 + 0.81 + 0.729) / 2.5 tokens per second.
    assert tree.tokens == [1, 1, 1]


def test_best_first_pulls_the_next_sibling_only_after_the_one_before_is_added() -> None:
    """Would catch: all children of a node computed although few are reached; they may be expensive to look up."""
    pulled = []

    def children(tag: int, depth: int):  # type: ignore[no-untyped-def]
        for token, probability in ((5, 0.5), (6, 0.3), (7, 0.1), (8, 0.05)):
            pulled.append(token)
            yield token, probability, token

    tree = best_first(0, children, 1, SearchLimits(2))
    assert tree.tokens == [5, 6] and tree.probability == [0.5, 0.3] and pulled == [5, 6, 7]


@pytest.mark.parametrize("wants_q", [False, True])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_proposals_of_a_draft_vocabulary_are_those_of_the_whole_one(is_sampled: bool, wants_q: bool) -> None:
    """Would catch: draft ids for ids of the target, noise of other tokens, a confidence that is not their share."""
    torch.manual_seed(0)
    ids, vocab, logits = torch.tensor([7, 2, 9, 4, 11, 0]), 12, 3 * torch.randn(2, 3, 6)
    whole = torch.full((2, 3, vocab), -torch.inf).index_copy(-1, ids, logits)
    noise = torch.rand(2, 1, vocab) if is_sampled else torch.ones(2, 1, vocab)
    weights = whole.softmax(dim=-1) / noise
    best = weights.topk(4, dim=-1)
    confidence = best.values / weights.sum(dim=-1, keepdim=True)
    if wants_q:
        confidence = confidence_by_rank(whole.softmax(dim=-1).amax(dim=-1), 4)
    expected = confidence.log() - 1e-4 * torch.arange(4) * wants_q

    propose = CandidateProposer(4, vocab, 0.1, ScoreProcessors.of([]), ids, wants_q)
    tokens, acceptance, expandable, q = propose(propose.scores(logits), perturbed(logits, noise[..., ids]))
    assert torch.equal(tokens, best.indices) and expandable is not None
    torch.testing.assert_close(acceptance, expected)
    # In rejection sampling a later sibling in place of an earlier one would leave this out because of its token.
    probability = whole.softmax(dim=-1).gather(-1, tokens)
    assert torch.equal(expandable, (confidence if wants_q else probability) >= 0.1)
    if wants_q:
        assert bool((expandable[..., 1:] <= expandable[..., :-1]).all())
        torch.testing.assert_close(q, whole.softmax(dim=-1))
