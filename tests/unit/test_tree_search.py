"""Best-first trees: connected, and no tree of the same size has a higher expected length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first
from hf_specgen.candidates.tree_search import Proposals, TreeBuilder, TreeSize, draft_rows
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.tree import DraftTree
from tests.helpers.calls import make_call, make_state

probabilities = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3)


def descending(values: list[float]) -> list[float]:
    """Acceptance of children, most preferred first; they exclude each other, so their sum is at most 1."""
    ordered = sorted(values, reverse=True)
    return [value / max(1.0, sum(ordered)) for value in ordered]


def marginal_trees(marginals: list[list[float]], size: int) -> float:
    """Slow reference: the highest expected length of all trees of at most `size` nodes, by trying every one."""

    def best(places: list[tuple[int, ...]], left: int) -> float:
        """Of what can be added at `places`, paths whose parent is in the tree, or below them."""
        if not places or not left:
            return 0.0
        path, *others = places
        below = [(*path, rank) for rank in range(len(marginals[len(path)]))] if len(path) < len(marginals) else []
        joint = float(np.prod([marginals[depth][rank] for depth, rank in enumerate(path)]))
        return max(best(others, left), joint + best([*others, *below], left - 1))

    return best([(rank,) for rank in range(len(marginals[0]))], size)


@settings(max_examples=60, deadline=None)
@given(st.lists(probabilities, min_size=1, max_size=3), st.integers(1, 5))
def test_of_parallel_heads_any_size_has_the_highest_expected_length(marginals: list[list[float]], size: int) -> None:
    """Would catch: a heap that forgets siblings or children, so that likelier nodes are left out."""
    ranks = min(map(len, marginals))
    marginals = [descending(values[:ranks]) for values in marginals]
    tokens = np.arange(len(marginals) * ranks).reshape(1, len(marginals), ranks)
    builder = TreeBuilder.of_parallel_heads([len(marginals)], tokens, np.array([marginals]), nodes=size)
    assert builder.probability[0].sum() == pytest.approx(marginal_trees(marginals, size), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12))
def test_best_expanded_trees_are_connected_and_most_likely(seed: int, rows: int, beam: int, size: int) -> None:
    """Would catch: a node chosen without its parent, a depth limit that is ignored, fillers with a probability."""
    random = np.random.default_rng(seed)
    limits = random.integers(0, 4, rows)
    limits[0] = 3
    builder = TreeBuilder(limits.tolist())
    builder.add_root(_proposals(random, rows, 1))
    for _ in range(3):
        nodes = builder.frontier(beam)
        if not nodes.shape[1]:
            break
        builder.add(nodes, _proposals(random, rows, nodes.shape[1]))
    trees, indices = builder.best(size)
    for row, ((tokens, parents), chosen) in enumerate(zip(trees, indices, strict=True)):
        assert len(tokens) == len(parents) == len(chosen) == len(set(chosen)) <= size
        assert all(parent < node for node, parent in enumerate(parents))
        assert all(builder.depth[row, node] <= limits[row] for node in chosen)
        assert [builder.parents[row, node] for node in chosen] == [chosen[p] if p >= 0 else -1 for p in parents]
        left_out = np.delete(builder.probability[row], chosen)
        if len(chosen) == size and len(left_out):
            assert builder.probability[row, chosen].min() >= left_out.max() - 1e-12


def _proposals(random: np.random.Generator, rows: int, nodes: int) -> Proposals:
    acceptance = -np.sort(-random.dirichlet(np.ones(4), size=(rows, nodes))[..., :3], axis=-1)
    return Proposals(random.integers(0, 50, (rows, nodes, 3)), acceptance)


def test_frontier_row_without_expandable_nodes_adds_nothing() -> None:
    """Would catch: nodes that fill up a row getting children, which would be verified for nothing."""
    builder = TreeBuilder([2, 1])
    builder.add_root(Proposals(np.array([[[1, 2]], [[3, 4]]]), np.full((2, 1, 2), 0.4)))
    nodes = builder.frontier(2)
    builder.add(nodes, Proposals(np.full((2, 2, 1), 9), np.full((2, 2, 1), 0.5)))
    assert (builder.probability[1] > 0).sum() == 2
    assert (builder.probability[0] > 0).sum() == 4


def test_best_with_first_nodes_keeps_their_order() -> None:
    """Would catch: an early-exit target taking the states of other nodes than those that were run."""
    builder = TreeBuilder([3])
    builder.add_root(Proposals(np.array([[[1, 2]]]), np.array([[[0.3, 0.2]]])))
    expanded = builder.frontier(2)
    builder.add(expanded, Proposals(np.array([[[3], [4]]]), np.array([[[0.5], [0.9]]])))
    ((tokens, parents),) = builder.best(3, expanded)[0]
    assert tokens == [1, 2, 4] and parents == (-1, -1, 1)


def curve(draft_token: float, slope: float) -> LatencyModel:
    return LatencyModel.from_curves(CostCurve((1, 65), (1.0, 1.0 + 64 * slope), 256, 1), draft_token=draft_token)


@pytest.mark.parametrize(("slope", "draft_token"), [(0.002, 0.05), (0.05, 0.05), (0.2, 0.3)])
def test_fastest_size_no_other_number_of_nodes_is_faster(slope: float, draft_token: float) -> None:
    """Would catch: a tree sized without regard to what a node costs."""
    latency = curve(draft_token, slope).at(1, 100)
    builder = TreeBuilder([6])
    builder.add_root(Proposals(np.arange(4).reshape(1, 1, 4), np.array([[[0.5, 0.2, 0.1, 0.05]]])))
    shape = TreeSize(None, latency=latency)
    spent = latency.drafter.draft([1])
    while beam := shape.width(builder):
        nodes = builder.frontier(beam)
        chances = np.broadcast_to(np.array([0.5, 0.2, 0.1, 0.05]), (1, nodes.shape[1], 4))
        builder.add(nodes, Proposals(np.zeros((1, nodes.shape[1], 4), dtype=int), chances))
        spent += latency.drafter.draft([nodes.shape[1]])
    joint = builder.sorted_probability(64)[0]
    rates = [(1 + joint[:n].sum()) / (latency.target.seconds_of(1.0 + n) + spent) for n in range(len(joint) + 1)]
    assert shape.nodes(builder) == int(np.argmax(rates))


@pytest.mark.parametrize("joint", [[[0.9, 0.5, 0.2, 0.1]], [[0.6, 0.1], [], [0.9, 0.8, 0.7, 0.02]], [[]]])
@pytest.mark.parametrize("drafting", [0.0, 0.5])
def test_fastest_size_of_grown_trees_no_other_number_of_nodes_is_faster(
    joint: list[list[float]], drafting: float
) -> None:
    """Would catch: rows added up at the wrong nodes, the passes of the drafter forgotten or counted twice."""
    latency = curve(0.05, 0.1).at(1, 100)
    rates = []
    for count in range(max(map(len, joint)) + 1):
        tokens = len(joint) + sum(sum(row[:count]) for row in joint)
        rates.append(tokens / (latency.target.seconds_of(len(joint) * (1.0 + count)) + drafting))
    count = TreeSize(None, latency=latency, rows=len(joint)).best_size(joint, drafting)
    assert count == int(np.argmax(rates))


def test_fastest_size_certain_text_grows_deep_and_uncertain_text_wide() -> None:
    """Would catch: one shape for all texts. Long certain chains stay thin, uncertain text gets short and wide."""
    depths, widths = [], []
    for first in (0.97, 0.3):
        chances = np.array([first, *[(1 - first) / 4] * 3])
        builder = TreeBuilder([16])
        builder.add_root(Proposals(np.arange(4).reshape(1, 1, 4), chances[None, None]))
        shape = TreeSize(None, latency=curve(0.05, 0.002).at(1, 100))
        while beam := shape.width(builder):
            nodes = builder.frontier(beam)
            if not nodes.shape[1]:
                break
            chance = np.broadcast_to(chances, (1, nodes.shape[1], 4))
            builder.add(nodes, Proposals(np.zeros((1, nodes.shape[1], 4), dtype=int), chance))
        _, ((*kept,),) = builder.best(shape.nodes(builder))
        depths.append(int(builder.depth[0, kept].max()))
        widths.append(len(kept) / depths[-1])
    assert depths[0] > depths[1] + 3
    assert widths[1] > widths[0]


def test_fixed_size_stops_when_no_better_node_can_come() -> None:
    """Would catch: passes of the drafter that cannot change the tree."""
    builder = TreeBuilder([9])
    builder.add_root(Proposals(np.arange(3).reshape(1, 1, 3), np.array([[[0.5, 0.3, 0.1]]])))
    assert TreeSize(16).width(builder) == 4
    assert TreeSize(3).width(builder) == 1
    builder.add(builder.frontier(1), Proposals(np.zeros((1, 1, 3), dtype=int), np.array([[[0.1, 0.05, 0.01]]])))
    assert TreeSize(2).width(builder) == 0
    assert TreeSize(None, children=1).nodes(builder) == 9


def test_fastest_size_with_a_drafter_that_costs_nothing_stops() -> None:
    """Would catch: passes without end, since each promises a little more."""
    builder, passes = TreeBuilder([10_000]), 0
    builder.add_root(Proposals(np.arange(8).reshape(1, 1, 8), np.full((1, 1, 8), 0.12)))
    shape = TreeSize(None, latency=curve(0.0, 0.0).at(1, 100))
    while beam := shape.width(builder):
        nodes = builder.frontier(beam)
        builder.add(
            nodes, Proposals(np.zeros((1, nodes.shape[1], 8), dtype=int), np.full((1, nodes.shape[1], 8), 0.12))
        )
        passes += 1
    assert passes <= 64


def test_frontier_of_a_shorter_row_keeps_its_chain_in_front() -> None:
    """Would catch: filler nodes between the nodes of a chain, whose early states then belong to other tokens."""
    builder = TreeBuilder([3, 2, 1])
    one = np.full((3, 1, 1), 0.5)
    builder.add_root(Proposals(np.array([[[5]], [[5]], [[5]]]), one))
    expanded = np.zeros((3, 0), dtype=int)
    while (nodes := builder.frontier(1)).shape[1]:
        expanded = np.concatenate([expanded, nodes], axis=1)
        builder.add(nodes, Proposals(np.array([[[6]], [[6]], [[6]]]), one))
    trees, indices = builder.best(3, expanded)
    for row, depth in enumerate((3, 2, 1)):
        (chain,) = DraftTree.from_nodes([trees[row]]).leftmost_chain().tokens.tolist()
        path = [place for place, node in enumerate(indices[row]) if builder.probability[row, node] > 0]
        assert path[: len(chain)] == list(range(min(depth, len(chain)))) and chain[0] == 5


# Best-first search, and drafts for rows cut to one size


def test_best_first_pulls_the_next_sibling_only_after_the_one_before_is_added() -> None:
    """Would catch: all children of a node computed although few are reached; they may be expensive to look up."""
    pulled = []

    def children(tag: int, depth: int):  # type: ignore[no-untyped-def]
        for token, probability in ((5, 0.5), (6, 0.3), (7, 0.1), (8, 0.05)):
            pulled.append(token)
            yield token, probability, token

    tree = best_first(0, children, 1, SearchLimits(2))
    assert tree.tokens == [5, 6] and tree.probability == [0.5, 0.3] and pulled == [5, 6, 7]


@pytest.mark.parametrize(
    ("size", "nodes", "min_probability", "is_chain"),
    [(12, 12, 0.0, False), (None, 5, 0.0, True), ("auto", 5, 0.05, False)],
    ids=["number", "chain", "auto without latencies"],
)
@pytest.mark.parametrize("is_prefill", [False, True])
def test_draft_rows_limits_follow_the_size(
    size: int | str | None, nodes: int, min_probability: float, is_chain: bool, is_prefill: bool
) -> None:
    """Would catch: a tree at prefill, which verifies chains; a fixed chain cut off by its probability."""
    limits: list[SearchLimits] = []

    def search(row: int, given: SearchLimits) -> SearchTree[None]:
        limits.append(given)
        return SearchTree([7] * row, list(range(-1, row - 1)), [0.5**depth for depth in range(1, row + 1)])

    call = make_call(make_state([[1], [2]]))
    draft, trees = draft_rows(call, size, [0, 5], search, is_prefill)  # type: ignore[arg-type]
    assert limits == [SearchLimits(nodes, min_probability, is_chain or is_prefill)] * 2
    assert draft.parents == ((), (-1,)) and draft.probability == ((), (0.5,)) and len(trees) == 2
