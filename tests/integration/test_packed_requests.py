"""Requests of a continuous-batching manager: their names, how they end, and what their drafts need."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

import hf_specgen
from hf_specgen import AdaptiveDepth, DraftModelCandidates, NgramCandidates
from hf_specgen.batching.packed_request import Request, RequestContext
from hf_specgen.batching.transformers_batching import (
    packed_step_processors,
    processors_of_request,
    request_number,
    unpaged_attention,
)
from hf_specgen.candidates.base import DraftSession
from hf_specgen.compat import attention_implementation, logits_processors
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.evaluation.workloads import domain_prompts
from hf_specgen.settings import Settings
from tests.helpers import fresh_model, tiny_model
from tests.helpers.batching import SMALL, config, requests, run
from tests.helpers.calls import with_sessions
from tests.helpers.paths import DRAFT_LM


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


@pytest.mark.parametrize("is_decoding", [False, True])
def test_second_request_with_one_name_is_refused_and_the_first_one_answered(is_decoding: bool) -> None:
    """Would catch: the answer to the second prompt for the first request, an error that ends the manager."""
    model, (first, second, third) = fresh_model("llama"), requests(3)
    settings = config(max_new_tokens=40, eos_token_id=[0])
    expected = run(model, [first, third], settings=settings)
    hf_specgen.attach(model, NgramCandidates(k=3))
    manager, answers, errors = started(model, settings), dict[str, list[int]](), list[str]()
    try:
        manager.add_request(first, request_id="x", streaming=is_decoding)
        if is_decoding:
            assert manager.get_result(timeout=20) is not None
        manager.add_request(second, request_id="x")
        manager.add_request(third, request_id="y")
        while len(answers) < 2:
            result = manager.get_result(timeout=20)
            if result.error:
                errors.append(result.error)
            elif result.is_finished():
                answers[result.request_id] = result.generated_tokens
    finally:
        manager.stop(block=True)
    assert answers == {"x": expected[0], "y": expected[1]}
    assert errors == ["a request with the request_id 'x' has not ended; give another one, or leave it out"]


def test_prefill_that_starts_again_has_the_states_of_its_last_attempt() -> None:
    """Would catch: states of the chunks before an eviction, which a drafter takes for those of the first tokens."""
    model, prompt = tiny_model("llama"), list(range(1, 7))
    settings = Settings.parse(NgramCandidates())
    context = RequestContext(model, config(), settings, 0, [0], 99, [], verifies_chains_only=False)
    state = RequestState(request_id="a", initial_tokens=prompt, max_new_tokens=4)
    request = Request(state, context)
    request.target.receive([torch.zeros(1, 4, 8)], 0)
    assert request.resume_as(state.create_equivalent_initial_request())
    for chunk, num_logits in ((torch.ones(1, 3, 8), 0), (torch.ones(1, 3, 8), 1)):
        request.target.receive([chunk], num_logits)
    request.target.commit([[]])
    [states] = request.target.committed_states([0])
    assert torch.equal(states, torch.ones(6, 8))
    other = RequestState(request_id="a", initial_tokens=[9, 9], max_new_tokens=4)
    assert not request.resume_as(other)
    request.end()


def test_attention_is_restored_if_it_could_not_be_set() -> None:
    """Would catch: a model whose submodules have the attention of `generate` after an error, for packed steps."""
    model: Any = fresh_model("llama")
    model.set_attn_implementation("paged|eager")
    set_attention = model.set_attn_implementation

    def fail(name: str) -> None:
        set_attention(name)
        if name == "eager":
            raise ValueError("a module that has no such attention")

    model.set_attn_implementation = fail
    with pytest.raises(ValueError, match="no such attention"), unpaged_attention(model):
        pass
    assert attention_implementation(model.config) == "paged|eager"


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


def test_drafter_makes_no_pass_once_a_sliding_window_is_full() -> None:
    """Would catch: drafts that are made in every step, and of which none can be verified."""
    model, passes = fresh_model("mistral", sliding_window=32), list[str]()
    draft = fresh_model("llama")
    candidates = DraftModelCandidates(draft, k=3)
    [prompt] = requests(1)
    settings = config(max_new_tokens=60, eos_token_id=[0])
    expected = run(model, [prompt], settings=settings)
    model.register_forward_pre_hook(lambda *_: passes.append("target"))
    draft.register_forward_pre_hook(lambda *_: passes.append("draft"))
    assert run(model, [prompt], settings=settings, candidate_generator=candidates) == expected
    assert "draft" in passes
    assert "draft" not in passes[-(len(prompt) + 60 - 32) :]


def test_blocks_restored_from_the_host_are_registered_for_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a restored request whose draft replaces the number of blocks that the step completes."""
    model, prompts = fresh_model("llama"), requests(10)
    restored = dict[int, tuple[Any, dict[str, int]]]()
    counted, missing = list[str](), list[str]()
    restore, mark = OffloadingManager.restore_scheduled_requests, PagedAttentionCache.mark_complete_blocks

    def recording_restore(self: Any, scheduled: list[Any]) -> None:
        offloaded = [future for future in scheduled if future.state.is_cpu_offloaded]
        restore(self, scheduled)
        restored.update({id(future.state): (future.state, dict(future.complete_blocks)) for future in offloaded})

    def recording_mark(self: Any, state: Any, complete: dict[str, int]) -> None:
        _, counts = restored.pop(id(state), (None, {}))
        counted.extend(counts)
        missing.extend(name for name, count in counts.items() if complete.get(name, 0) < count)
        mark(self, state, complete)

    empty = torch.empty  # without an accelerator there is no pinned memory
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **settings: empty(*sizes, **settings))
    batching = {"num_blocks": 12, "page_size": 8, "cpu_offload_space": 0.01}
    expected = run(model, prompts, batching)
    monkeypatch.setattr(OffloadingManager, "restore_scheduled_requests", recording_restore)
    monkeypatch.setattr(PagedAttentionCache, "mark_complete_blocks", recording_mark)
    assert run(model, prompts, batching, candidate_generator=NgramCandidates(k=4)) == expected
    assert counted and not missing


def test_draft_tokens_are_sampled_with_the_logits_processors_of_the_request(
    reference_model: Any, tokenizer: Any
) -> None:
    """Would catch: drafts from the logits at temperature 1, fewer of which are accepted."""
    texts = domain_prompts(3)
    prompts = [tokenizer(text)["input_ids"] for domain in ("json", "code") for text in texts[domain]]
    settings = config(do_sample=True, temperature=0.5, top_p=0.8, top_k=0, eos_token_id=2, max_new_tokens=24)
    candidates, one_by_one, expected = DraftModelCandidates(str(DRAFT_LM), k=4), 0, list[list[int]]()
    for number, prompt in enumerate(prompts):
        torch.manual_seed(50 + number)
        arguments = {"generation_config": settings, "candidate_generator": candidates}
        ids = reference_model.generate(torch.tensor([prompt]), **arguments)
        expected.append(ids[0, len(prompt) :].tolist())
        one_by_one += candidates.speculation.steps
    for per_request in (False, True):
        batching = {"seed": 50, "per_request_processors": per_request}
        assert run(reference_model, prompts, batching, settings, candidate_generator=candidates) == expected
        assert candidates.speculation.steps <= 1.02 * one_by_one


def test_per_request_processors_use_the_settings_of_a_request() -> None:
    """Would catch: the manager's temperature for a request with one of its own, or settings that another row gets."""
    model = tiny_model("llama")
    scores = torch.randn(3, 99, generator=torch.Generator().manual_seed(1))
    managers = config(do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    own = {"temperature": 0.3, "top_k": 5}
    processors = packed_step_processors(model, managers, ContinuousBatchingConfig(per_request_processors=True))
    for given in ({}, own):
        state = RequestState(request_id="a", initial_tokens=[1], logit_processor_kwargs=given)
        settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, **given}
        expected = found = scores
        for processor in logits_processors(model, config(do_sample=True, **settings)):
            expected = processor(torch.empty(3, 0), expected)
        for processor in processors_of_request(processors, state):
            found = processor(torch.empty(3, 0), found)
        torch.testing.assert_close(found, expected)


def test_manager_in_an_attached_block_speculates_with_the_strategy_of_its_thread() -> None:
    """Would catch: the strategy of the block that any thread entered last, whose statistics then count the requests."""
    model = fresh_model("llama")
    has_entered, may_leave = threading.Event(), threading.Event()

    def attach_another() -> None:
        with hf_specgen.attached(model, NgramCandidates(k=2)) as totals:
            has_entered.set()
            may_leave.wait(60)
            others.append(totals.calls)

    others = list[int]()
    thread = threading.Thread(target=attach_another)
    with hf_specgen.attached(model, NgramCandidates(k=3)) as own:
        thread.start()
        has_entered.wait(60)
        manager = started(model, config())
        manager.add_request(requests(1)[0])
        assert manager.get_result(timeout=20) is not None
        manager.stop(block=True)
        may_leave.set()
        thread.join()
    assert own.calls == 1 and others == [0]


@pytest.mark.parametrize("ends", ["hard stop", "error"])
def test_sessions_of_unfinished_requests_end_in_the_thread_of_the_manager(ends: str) -> None:
    """Would catch: sessions that never end, or that another thread ends while they draft; lost statistics."""
    model, ended = fresh_model("llama"), list[threading.Thread]()
    is_streaming = threading.Event()

    def record(session: Any) -> None:
        end, draft = session.end, session.draft

        def fail(depths: Any) -> Any:
            if ends == "error" and is_streaming.wait(60):
                raise RuntimeError("a failing strategy")
            return draft(depths)

        session.draft = fail
        session.end = lambda: (ended.append(threading.current_thread()), end())

    hf_specgen.attach(model, with_sessions(NgramCandidates(k=3), record), strict=True)
    manager = started(model, config(eos_token_id=[0]))
    thread = manager._generation_thread
    manager.add_request(requests(1)[0], max_new_tokens=2000, streaming=True)
    assert manager.get_result(timeout=20) is not None
    is_streaming.set()
    manager.stop(block=True, hard_stop=True)
    assert ended == [thread]
    assert hf_specgen.statistics(model).calls == 1


def test_generate_batch_ends_no_session_outside_the_thread_of_the_manager() -> None:
    """Would catch: Ctrl-C while a request is flushed, whose session another thread ends."""
    model, ended = fresh_model("llama"), list[threading.Thread]()

    def record(session: Any) -> None:
        end = session.end
        session.draft = lambda depths: 1 / 0
        session.end = lambda: (ended.append(threading.current_thread()), end())

    candidates = with_sessions(NgramCandidates(k=3), record)
    batching = ContinuousBatchingConfig(**SMALL)
    arguments = {"generation_config": config(), "continuous_batching_config": batching}
    model.generate_batch(requests(3), **arguments, candidate_generator=candidates)
    assert len(ended) == 3 and threading.current_thread() not in ended
