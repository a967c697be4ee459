"""Parts of captured passes that need no GPU: widths, fixed masks, the step cache, lasting buffers."""

import gc
import random
from functools import partial

import pytest
import torch
from torch import nn

from hf_specgen.targets.cache import RaggedCache, StepLayer, move_captured
from hf_specgen.targets.graphs import CAPACITY_BLOCK, CapturedFunctions, GraphBuffers
from hf_specgen.targets.masks import fixed_mask
from tests.helpers.captures import graphs_on_cpu


def test_fixed_mask_hides_added_slots_in_every_row() -> None:
    """Would catch: attention to slots that nothing has been written to."""
    mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    fixed = fixed_mask(mask, batch=2, columns=8)
    assert fixed.shape == (2, 1, 2, 8) and fixed.is_contiguous()
    assert fixed[..., :3].all() and not fixed[..., 3:].any()
    additive = fixed_mask(torch.zeros(1, 1, 2, 3), batch=2, columns=8)
    assert (additive[..., 3:] == torch.finfo(torch.float32).min).all()


def test_step_layer_writes_what_ragged_layer_appends() -> None:
    """Would catch: keys in the slots of another row or head."""
    torch.manual_seed(0)
    old, new = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 2, 5)
    reference, cache = RaggedCache(), RaggedCache()
    for one in (reference, cache):
        one.update(old, old + 1, layer_idx=0)
        one.set_lengths([4, 2])
    expected_keys, expected_values = reference.update(new, new + 1, layer_idx=0)
    cache.reserve(16)
    ((keys, values),) = cache.buffers()
    slots = torch.tensor(cache.lengths)[:, None] + torch.arange(2)
    read_keys, read_values = StepLayer(keys, values, slots).update(new, new + 1)
    assert read_keys.shape == keys.shape
    for row, length in enumerate((6, 4)):
        assert torch.equal(read_keys[row, :, :length], expected_keys[row, :, :length])
        assert torch.equal(read_values[row, :, :length], expected_values[row, :, :length])


@pytest.mark.parametrize("seed", range(8))
def test_captured_commit_keeps_what_the_reference_keeps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a path that is moved twice, or from the slots of the step in which it was captured.

    The reference is a list of numbers for each row; trees are random, rows accept different numbers of nodes.
    """
    graphs_on_cpu(monkeypatch)
    choose, functions, module = random.Random(seed), CapturedFunctions(), nn.Linear(1, 1)
    cache, rows = RaggedCache(), choose.randint(1, 3)
    texts = [[float(row), row + 0.5] for row in range(rows)]
    cache.update(*[torch.tensor(texts)[:, None, :, None].expand(-1, 2, -1, 4)] * 2, layer_idx=0)
    for step in range(12):
        nodes, starts = choose.randint(1, 6), cache.lengths
        new = [[100.0 * (step + 1) + 10 * row + node for node in range(1 + nodes)] for row in range(rows)]
        cache.update(*[torch.tensor(new)[:, None, :, None].expand(-1, 2, -1, 4)] * 2, layer_idx=0)
        paths = [sorted(choose.sample(range(nodes), choose.randint(0, nodes))) for _ in range(rows)]
        functions.capacity(module, cache, 0, "graphs")

        def move(moves: torch.Tensor) -> None:
            run = partial(functions.run, mode="graphs", eagerly=lambda: cache.move(moves), rehearsal=moves[[0, 2, 2]])
            run(move_captured, module, moves, cache, 0)

        cache.keep_accepted(starts, paths, move)
        for row, path in enumerate(paths):
            texts[row] += [new[row][0], *(new[row][1 + node] for node in path)]
        assert cache.lengths == tuple(map(len, texts))
        for row, text in enumerate(texts):
            assert cache.buffers()[0][1][row, 1, : len(text), 3].tolist() == text
    assert functions.is_captured


def adopted(lasting: GraphBuffers, value: float) -> RaggedCache:
    """A cache with six slots of this value, in lasting buffers."""
    cache = RaggedCache(max_slots=20)
    cache.update(torch.full((1, 2, 6, 4), value), torch.full((1, 2, 6, 4), -value), layer_idx=0)
    for _ in range(2):  # the second time it has them already
        assert lasting.adopt(cache) == CAPACITY_BLOCK
    keys, values = cache.buffers()[0]
    assert (keys[:, :, :6] == value).all() and (values[:, :, :6] == -value).all() and not keys[:, :, 6:].any()
    return cache


def address(cache: RaggedCache) -> int:
    return cache.buffers()[0][0].data_ptr()


def test_graph_buffers_serve_one_call_after_another_and_no_two_at_once() -> None:
    """Would catch: graphs captured anew in every call, threads that write to one memory, a returned cache that the
    next call overwrites, buffers of inference mode."""
    lasting = GraphBuffers()
    with torch.inference_mode():
        first = adopted(lasting, 1.0)
    second, used = adopted(lasting, 2.0), address(first)
    assert address(second) != used and (first.buffers()[0][0][:, :, :6] == 1).all()
    del first
    gc.collect()
    third = adopted(lasting, 3.0)
    assert address(third) == used
    lasting.release(third)
    assert address(adopted(lasting, 4.0)) == used and (third.buffers()[0][0][:, :, :6] == 3).all()


def test_graph_buffers_that_an_eager_pass_outgrew_keep_what_it_wrote() -> None:
    """Would catch: keys and values of a long text between two drafts that are replaced by older ones."""
    cache, buffers = RaggedCache(), GraphBuffers()
    first, long, later = (torch.randn(1, 2, length, 4) for length in (200, 300, 90))
    cache.update(first, first, 0)
    assert buffers.adopt(cache) == 512
    cache.update(long, long, 0)
    cache.update(later, later, 0)
    buffers.adopt(cache)
    assert torch.equal(cache.buffers()[0][0][:, :, :590], torch.cat([first, long, later], dim=2))


@pytest.mark.parametrize("slots", [1, 300, 2000, 2049, 5000, 100_000])
def test_graph_buffers_have_few_capacities(slots: int) -> None:
    cache, states = RaggedCache(), torch.zeros(1, 1, 1, 2)
    cache.update(states, states, 0)
    cache.reserve(slots)
    held = cache.buffers()[0][0].shape[2]
    capacity = GraphBuffers().adopt(cache)
    assert held <= capacity < max(held + 256, 1.25 * held + 1)
