"""Parts of captured passes that need no GPU: widths, fixed masks, the step cache, lasting buffers."""

import gc

import pytest
import torch

from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.graphs import CAPACITY_BLOCK, GraphBuffers


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
