"""The ragged cache against a list of lists, and against Transformers' own cache."""

import gc
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.cache_layer import MAX_ROLLBACK, MIN_SPARE_SLOTS, RaggedLayer
from hf_specgen.targets.state_cache import LayerStates
from hf_specgen.targets.static_buffers import CAPACITY_BLOCK, GraphBuffers
from tests.helpers import reference

LAYERS, HEADS, HEAD_DIM = 2, 2, 3
Text = list[list[int]]  # for each row the number that stands in each slot


def states(numbers: Text, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that contain the numbers, different in every layer, head and dimension."""
    base = torch.tensor(numbers, dtype=torch.float32).view(len(numbers), 1, -1, 1)
    place = torch.arange(HEADS * HEAD_DIM).view(1, HEADS, 1, HEAD_DIM) / 8 + layer / 64  # exact in float32
    return base + place, -base - place


def write(cache: RaggedCache | DynamicCache, numbers: Text) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward pass: the same step in every layer."""
    return [cache.update(*states(numbers, layer), layer) for layer in range(LAYERS)]


def assert_holds(cache: RaggedCache, text: Text) -> None:
    assert cache.lengths == tuple(map(len, text))
    for index, layer in enumerate(cache.layers):
        assert layer.lengths == cache.lengths
        for row, numbers in enumerate(text):
            keys, values = states([numbers], index)
            assert torch.equal(layer.keys[row : row + 1, :, : len(numbers)], keys), (index, row)
            assert torch.equal(layer.values[row : row + 1, :, : len(numbers)], values), (index, row)


def filled(text: Text) -> RaggedCache:
    """A cache with rows of different lengths: written as wide as the longest, then cut."""
    width = max(map(len, text))
    cache = RaggedCache()
    write(cache, [[*row, *[-9] * (width - len(row))] for row in text])
    cache.set_lengths([len(row) for row in text])
    assert_holds(cache, text)
    return cache


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_states_of_another_dtype_are_promoted_as_in_a_dynamic_cache(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """As where `torch.autocast` begins or ends between two turns. Would catch: an error, or states that are rounded."""
    ours, plain = RaggedCache(), DynamicCache()
    for dtype in dtypes:
        keys, values = torch.randn(2, 2, 1, 3, 4, dtype=dtype)
        for mine, expected in zip(ours.update(keys, values, 0), plain.update(keys, values, 0), strict=True):
            assert mine.dtype == expected.dtype and torch.equal(mine, expected)


@given(st.data())
def test_ragged_cache_agrees_with_lists(data: st.DataObject) -> None:
    """Would catch: a write at a wrong slot, a node moved wrongly, stale lengths, contents lost in growth."""
    text: Text = [[] for _ in range(data.draw(st.integers(1, 3), "batch"))]
    cache, number = RaggedCache(), 0
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        is_large = data.draw(st.integers(0, 7), "size") == 7  # more than the spare slots
        nodes = MIN_SPARE_SLOTS if is_large else data.draw(st.integers(0, 5), "nodes")
        step = [[number + row * 1000 + i for i in range(1 + nodes)] for row in range(len(text))]
        number += 100
        starts = tuple(map(len, text))
        for index, (keys, values) in enumerate(write(cache, step)):
            for row, old in enumerate(text):
                expected = states([old + step[row]], index)
                assert torch.equal(keys[row : row + 1, :, : len(old) + 1 + nodes], expected[0])
                assert torch.equal(values[row : row + 1, :, : len(old) + 1 + nodes], expected[1])
            assert keys.shape[2] == values.shape[2] == max(starts) + 1 + nodes
        paths = [data.draw(prefixes(nodes) if is_large else paths_down(nodes), "path") for _ in text]
        cache.keep_accepted(starts, paths)
        for row, path in enumerate(paths):
            if path is not None:
                text[row] += [step[row][0], *(step[row][1 + node] for node in path)]
        assert_holds(cache, text)


def prefixes(nodes: int) -> st.SearchStrategy[list[int] | None]:
    """A beginning of a chain; None for a row that takes no part."""
    return st.none() | st.integers(0, nodes).map(lambda length: list(range(length)))


def paths_down(nodes: int) -> st.SearchStrategy[list[int] | None]:
    """A path from the root to any node of any tree; None for a row that takes no part."""
    trees = reference.any_parents(st.just(nodes))
    paths = trees.flatmap(lambda p: st.integers(-1, nodes - 1).map(lambda node: reference.walk_up(p, node)[::-1]))
    return st.none() | paths


def test_keep_accepted_of_chains_moves_nothing() -> None:
    """Would catch: a copy in every step of strategies that draft chains: their nodes are in place already."""
    cache = filled([[1], [1, 2]])
    write(cache, [[10, 20, 21]] * 2)
    written = [tensor._version for pair in cache.buffers() for tensor in pair]
    cache.keep_accepted((1, 2), [[0, 1], [0]])
    assert [tensor._version for pair in cache.buffers() for tensor in pair] == written
    assert_holds(cache, [[1, 10, 20, 21], [1, 2, 10, 20]])


def test_ragged_layer_one_token_steps_copy_seldom_and_reserve_little() -> None:
    """Would catch: a copy of the whole cache at every step, or a buffer that doubles."""
    layer, copies = RaggedLayer(), []
    for length in range(1, 4001):
        before = layer.keys
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        if layer.keys is not before:
            copies.append(length)
        assert layer.keys.shape[2] <= length + max(MIN_SPARE_SLOTS, length / 32)
    assert len(copies) < 60


@pytest.mark.parametrize("window", [4, 100, 300])
def test_ragged_layer_with_a_window_keeps_what_later_queries_see(window: int) -> None:
    """Would catch: slots that are dropped too early, or never."""
    layer, full = RaggedLayer(window), RaggedLayer()
    for step in range(1500):
        states = torch.full((2, 1, 1, 2), float(step))
        announced = layer.get_mask_sizes(1) if step else (1, 0)
        keys, _ = layer.update(states, states)
        layer.set_lengths(layer.lengths)
        everything, _ = full.update(states, states)
        assert announced[0] == keys.shape[2] and announced[0] + announced[1] == step + 1
        seen = min(window + MAX_ROLLBACK, everything.shape[2])
        assert torch.equal(keys[:, :, -seen:], everything[:, :, -seen:])
    assert layer.keys.shape[2] <= 2 * window + MAX_ROLLBACK + 3 * MIN_SPARE_SLOTS
    with pytest.raises(RuntimeError, match="9 tokens cannot be kept: the sliding window before them"):
        layer.set_lengths([1000, 9])
    layer.set_lengths([0, 0])
    assert layer.first == 0


def test_ragged_layer_unwritten_slots_are_finite() -> None:
    """Would catch: uninitialised slots behind a short row: they are masked, but 0 * nan is nan."""
    with patch.object(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, float("nan"))):
        cache = filled([[1]])
        cache.layers[0].reserve(300)
    assert bool(cache.layers[0].keys.isfinite().all()) and bool(cache.layers[0].values.isfinite().all())


def test_selected_rows_keep_their_lengths() -> None:
    """Would catch: rows re-ordered without their lengths."""
    cache, expected = filled([[1, 2, 3], [4]]), [[4], [4], [1, 2, 3]]
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    assert_holds(cache, expected)
    write(cache, [[7]] * len(expected))
    assert_holds(cache, [[*row, 7] for row in expected])


def dynamic_cache(window: int) -> DynamicCache:
    """A full and a sliding layer, as models with mixed attention have them."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(window)]
    return cache


@given(st.integers(2, 6), st.integers(0, 9), st.integers(1, 9), st.integers(0, 4))
def test_from_and_to_dynamic_round_trip_equals_direct_update(window: int, before: int, new: int, rejected: int) -> None:
    """Would catch: a window one slot too long or short, or in the wrong place; a wrong cumulative length."""
    old, more = [list(range(before)), list(range(50, 50 + before))], [list(range(100, 100 + new))] * 2
    given_cache, expected = dynamic_cache(window), dynamic_cache(window)
    for dynamic in (given_cache, expected):
        if before:
            write(dynamic, old)
    cache = RaggedCache.from_dynamic(given_cache)
    assert cache.lengths == ((before, before) if before else ())
    write(cache, [row + [-9] * rejected for row in more])
    cache.set_lengths([before + new] * 2)
    cache.to_dynamic(given_cache)
    write(expected, more)
    for mine, theirs in zip(given_cache.layers, expected.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_from_dynamic_leaves_the_given_cache_as_it_is_and_shares_its_memory() -> None:
    """Would catch: a later turn of a chat that holds all keys twice; a given cache that a failed call has changed."""
    given_cache, text = DynamicCache(), [[*range(100)]]
    write(given_cache, text)
    cache = RaggedCache.from_dynamic(given_cache, max_slots=150)
    write(cache, [[1, 2, 3]])
    for index, layer in enumerate(given_cache.layers):
        assert torch.equal(layer.keys, states(text, index)[0]) and torch.equal(layer.values, states(text, index)[1])
        assert layer.keys.data_ptr() == cache.layers[index].keys.data_ptr()


def test_to_dynamic_makes_layers_and_copies_their_states() -> None:
    """Would catch: a returned cache that keeps the whole buffer alive; a failure for a cache without layers."""
    cache, dynamic = filled([[1, 2]]), DynamicCache()
    cache.to_dynamic(dynamic)
    for index, layer in enumerate(dynamic.layers):
        assert torch.equal(layer.keys, states([[1, 2]], index)[0])
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
    write(dynamic, [[3]])
    assert torch.equal(dynamic.layers[1].values, states([[1, 2, 3]], 1)[1])


@pytest.mark.parametrize("tokens", [1, 100, 330, 700])
def test_sliding_layer_keeps_what_a_rejected_step_needs(tokens: int) -> None:
    """Would catch: slots that are dropped before it is known how many tokens of a long step are accepted."""
    cache, window = RaggedCache(layers=[RaggedLayer(64)]), 64

    def write(count: int) -> None:
        states = torch.zeros(1, 1, count, 4)
        cache.update(states, states, layer_idx=0)

    write(1000)
    cache.set_lengths([1000])
    write(1 + tokens)
    cache.set_lengths([1001])
    assert cache.first_visible <= 1001 - window


# What captured passes need and no GPU does: widths, fixed masks, the step cache, static buffers


def adopted(buffers: GraphBuffers, value: float) -> RaggedCache:
    """A cache with six slots of this value, in static buffers."""
    cache = RaggedCache(max_slots=20)
    cache.update(torch.full((1, 2, 6, 4), value), torch.full((1, 2, 6, 4), -value), layer_idx=0)
    for _ in range(2):  # the second time it has them already
        assert buffers.adopt(cache) == CAPACITY_BLOCK
    keys, values = cache.buffers()[0]
    assert (keys[:, :, :6] == value).all() and (values[:, :, :6] == -value).all() and not keys[:, :, 6:].any()
    return cache


def address(cache: RaggedCache) -> int:
    return cache.buffers()[0][0].data_ptr()


def test_graph_buffers_serve_one_call_after_another_and_no_two_at_once() -> None:
    """Would catch: graphs captured in every call, one memory for two threads, a returned cache overwritten."""
    buffers = GraphBuffers()
    with torch.inference_mode():
        first = adopted(buffers, 1.0)
    second, used = adopted(buffers, 2.0), address(first)
    assert address(second) != used and (first.buffers()[0][0][:, :, :6] == 1).all()
    del first
    gc.collect()
    third = adopted(buffers, 3.0)
    assert address(third) == used
    dynamic = DynamicCache()
    third.to_dynamic(dynamic)
    del third
    assert address(adopted(buffers, 4.0)) == used and (dynamic.layers[0].keys == 3).all()


def test_graph_buffers_that_an_eager_pass_outgrew_keep_what_it_wrote() -> None:
    """Would catch: keys and values of a long text between two drafts that are replaced by older ones."""
    cache, buffers = RaggedCache(), GraphBuffers()
    first, long, later = (torch.randn(1, 2, length, 4) for length in (200, CAPACITY_BLOCK, 90))
    cache.update(first, first, 0)
    assert buffers.adopt(cache) == CAPACITY_BLOCK
    cache.update(long, long, 0)
    cache.update(later, later, 0)
    buffers.adopt(cache)
    assert torch.equal(cache.buffers()[0][0][:, :, : CAPACITY_BLOCK + 290], torch.cat([first, long, later], dim=2))


@pytest.mark.parametrize("slots", [1, 300, 2000, 2049, 5000, 100_000])
def test_graph_buffers_have_few_capacities(slots: int) -> None:
    """Would catch: a capacity of its own for each length, so that each is captured anew, or one far too large."""
    cache, states = RaggedCache(), torch.zeros(1, 1, 1, 2)
    cache.update(states, states, 0)
    cache.reserve(slots)
    held = cache.buffers()[0][0].shape[2]
    capacity = GraphBuffers().adopt(cache)
    assert held <= capacity < max(held + CAPACITY_BLOCK, 1.25 * held + 1)


@pytest.mark.parametrize("length", [5000, 300])
def test_convolutions_keep_no_columns_of_a_long_prompt(length: int) -> None:
    """Would catch: the columns of 100,000 tokens in every layer, more memory than that of keys and values."""
    states, window = LayerStates(), 4
    new = torch.randn(1, 8, length)
    read = states.append_to_convolution(new, 0, window)
    assert torch.equal(read[..., window:], new)
    kept = states.convolutions[0]
    assert kept.untyped_storage().nbytes() <= 8 * (window + 2 * MAX_ROLLBACK) * kept.element_size()
    # A draft may still be removed, and a part of what was generated.
    states.append_to_convolution(torch.randn(1, 8, 5), 0, window)
    states.set_lengths([length + 2])
    assert torch.equal(states.convolutions[0][..., -window - 2 : -2], kept[..., -window:])
