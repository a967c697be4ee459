"""Many requests of one manager of continuous batching, whose block pool is too small for those that run at once.

400 of them; `pytest tests/slow/test_many_requests.py --thread-seconds 60` sends 2,000.
"""

import gc
from typing import Any

import hf_specgen
from hf_specgen import CombinedCandidates, FixedDepth
from hf_specgen.batching.packed_request import Request
from tests.helpers import fresh_model
from tests.helpers.batching import requests, run, started

TOKENS = 8
SCARCE = {"num_blocks": 24, "page_size": 8, "max_batch_tokens": 96}


def test_many_requests_of_which_some_are_cancelled(pytestconfig: Any) -> None:
    """Would catch: a lost or mixed-up request, tokens changed by an eviction or a cancellation, blocks never freed."""
    count = 400 if pytestconfig.getoption("thread_seconds") < 60 else 2000
    model, prompts = fresh_model("llama"), requests(40)
    expected = [tokens[:TOKENS] for tokens in run(model, prompts)]
    hf_specgen.attach(model, CombinedCandidates(tree=4, policy=FixedDepth()), strict=True)
    manager: Any = started(model, SCARCE)
    names = {}
    for number in range(count):
        name = manager.add_request(prompts[number % 40], max_new_tokens=TOKENS, streaming=number % 5 == 0)
        names[name] = number
        if number % 14 == 0:
            manager.cancel_request(name)
    cancelled = {name for name, number in names.items() if number % 7 == 0}
    waiting, to_cancel = set(names) - cancelled, iter(sorted(cancelled))
    while waiting:
        result = manager.get_result(timeout=60)
        assert result is not None and result.error is None
        own = expected[names[result.request_id] % 40]
        assert result.generated_tokens == (own if result.is_finished() else own[: len(result.generated_tokens)])
        if result.is_finished():
            waiting.discard(result.request_id)
            manager.cancel_request(next(to_cancel, result.request_id))
    cache = manager.batch_processor.cache
    manager.stop(block=True)
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    assert cache.compute_free_capacity() == 1.0
    totals = hf_specgen.statistics(model)
    assert totals.calls >= count - len(cancelled) and totals.accepted > 0
    del manager
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Request]
