"""Requests of a continuous-batching manager: their names, how they end, and what their drafts need."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

import hf_specgen
from hf_specgen import AdaptiveDepth, DraftModelCandidates, NgramCandidates
from hf_specgen.batching.transformers_batching import request_number
from hf_specgen.candidates.base import DraftSession
from hf_specgen.depth import CostCurve, LatencyModel
from tests.helpers import fresh_model
from tests.helpers.batching import SMALL, config, requests, run


def started(model: Any, settings: Any = None, **batching: Any) -> Any:
    """A running manager with the settings of `generate`."""
    batching_config = ContinuousBatchingConfig(**{**SMALL, **batching})
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=batching_config)
    manager.start()
    return manager


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the manager did not get there in 20 seconds")


def test_request_id_of_a_cancelled_request_is_used_again() -> None:
    """Would catch: the noise, the limit or the draft session of the cancelled request, where no step came between."""
    model, (first, second) = fresh_model("llama"), requests(2)
    settings = config(do_sample=True, temperature=0.8, top_k=20, max_new_tokens=8, eos_token_id=[0])
    hf_specgen.attach(model, NgramCandidates(k=3), strict=True)
    manager = started(model, settings, seed=50)
    try:
        manager.add_request(first, request_id="x", max_new_tokens=400, streaming=True)
        assert manager.get_result(timeout=20) is not None
        manager.cancel_request("x")
        wait_until(lambda: not manager.batch_processor.has_pending_requests())
        while manager.get_result(timeout=0.1):
            pass
        manager.add_request(second, request_id="x")
        result = manager.get_result(timeout=20)
    finally:
        manager.stop(block=True)
    torch.manual_seed(50 + request_number(type("State", (), {"request_id": "x"})))
    ids = model.generate(torch.tensor([second]), generation_config=settings, candidate_generator=None)
    assert result is not None and result.error is None
    assert result.generated_tokens == ids[0, len(second) :].tolist()
    assert hf_specgen.statistics(model).calls == 2


def test_draft_caches_keep_no_activations() -> None:
    """Would catch: prefills of the draft model with autograd, whose activations its cache then holds."""
    model, draft = fresh_model("llama"), fresh_model("llama")
    assert all(parameter.requires_grad for parameter in draft.parameters())
    outputs = list[bool]()
    draft.register_forward_hook(lambda _, __, output: outputs.append(output.logits.requires_grad))
    candidates = DraftModelCandidates(draft, k=3)
    prompts = requests(6)
    assert run(model, prompts, {"max_requests_per_batch": 3}, candidate_generator=candidates) == run(model, prompts)
    assert outputs and not any(outputs)


class ShortPrompts(NgramCandidates):
    """Refuses long prompts."""

    def start(self, batch: Any) -> DraftSession:
        if len(batch.state.prompts[0]) > 99:
            raise ValueError("the prompt is too long")
        return super().start(batch)


def test_refused_request_leaves_the_latency_of_the_step() -> None:
    """Would catch: steps without T(q), whose drafts fill the token budget, beside a request without drafts."""
    model, sizes = fresh_model("llama"), list[int]()
    curve = CostCurve((1, 12, 256), (1.0, 1.0, 100.0), context=64, batch=1)
    candidates = ShortPrompts(policy=AdaptiveDepth(LatencyModel.from_curves(curve)))
    # Prompts are scheduled in descending order of their tokens: the refused one first.
    prompts = [[98, 97] * 50, *(prompt[:12] for prompt in requests(8))]
    settings = config(max_new_tokens=40, eos_token_id=[0])
    expected = run(model, prompts, settings=settings)
    model.register_forward_pre_hook(lambda _, __, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True)
    assert run(model, prompts, settings=settings, candidate_generator=candidates) == expected
    rows = candidates.speculation.rows
    assert sum(not any(step.drafted for step in row) for row in rows) < len(rows)
    decoding = [size for size in sizes if size < 99]
    assert max(decoding) <= 12, decoding
