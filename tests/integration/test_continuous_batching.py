"""`generate_batch`: tokens of plain `generate_batch` and `generate`; cancelled requests are in tests/slow."""

import gc
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache

import hf_specgen
from hf_specgen import (
    AdaptiveDepth,
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MovingWindow,
    NgramCandidates,
    RecyclingCandidates,
    Schedule,
    SpeculationMonitor,
)
from hf_specgen.batching.transformers_batching import cached_manager
from hf_specgen.candidates.base import DraftSession
from hf_specgen.depth import CostCurve, DisableWhen, LatencyModel
from hf_specgen.evaluation.workloads import domain_prompts
from hf_specgen.tree import DraftTree
from tests.helpers import fresh_model, shared_draft, tiny_model
from tests.helpers.batching import GPU_LIKE, HEADS, NEW, SMALL, config, requests, run, started
from tests.helpers.calls import with_sessions
from tests.helpers.depth import Clock
from tests.helpers.models import recorded_inputs

STRATEGIES = {
    "ngram": lambda model: NgramCandidates(k=5),
    "ngram, adaptive": lambda model: NgramCandidates(policy=GPU_LIKE),
    "recycling": lambda model: RecyclingCandidates(k=3),
    "auto": lambda model: CombinedCandidates(policy=GPU_LIKE),
    "trees": lambda model: CombinedCandidates(tree=6, policy=FixedDepth()),
    "draft model": lambda model: DraftModelCandidates(shared_draft(model), k=3),
    "window": lambda model: NgramCandidates(k=4, policy=MovingWindow()),
}


def alone(model: Any, prompt: list[int], settings: Any, seed: int = 0, **speculation: Any) -> list[int]:
    """The tokens of `generate` for one prompt."""
    torch.manual_seed(seed)
    ids = model.generate(torch.tensor([prompt]), generation_config=settings, **speculation)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_requests_same_tokens(attention: str) -> None:
    """Would catch: a logit of another position, a rejected token that stays in the cache, a text beyond EOS."""
    model, prompts = fresh_model("llama"), requests(16)
    model.set_attn_implementation(attention)
    plain = run(model, prompts)
    # Plain `generate` and `generate_batch` are both those of Transformers: a few requests show that settings agree.
    assert plain[::4] == [alone(model, prompt, config()) for prompt in prompts[::4]]
    assert len({len(tokens) for tokens in plain}) > 3, "some requests end early"
    for name in STRATEGIES if attention == "sdpa" else ("trees",):  # which differ in their masks
        candidates = STRATEGIES[name](model)
        assert run(model, prompts, candidate_generator=candidates) == plain, name
        statistics = candidates.speculation
        assert statistics.emitted == sum(map(len, plain)) and statistics.accepted > 0, name
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(("strategy", "per_request"), [("ngram", True), ("draft model", False), ("trees", True)])
def test_sampled_requests_same_tokens_as_alone_with_their_seed(strategy: str, per_request: bool) -> None:
    """Would catch: noise that depends on other requests, or temperatures given to the rows of another request."""
    model, prompts = tiny_model("llama"), requests(8)
    settings = config(do_sample=True, temperature=0.6, top_k=12, top_p=0.95)
    expected = [alone(model, prompt, settings, 50 + number) for number, prompt in enumerate(prompts)]
    batching = {"seed": 50, "per_request_processors": per_request, "return_logprobs": True}
    candidates = STRATEGIES[strategy](model)
    assert run(model, prompts, batching, settings, candidate_generator=candidates) == expected
    assert candidates.speculation.accepted > 0
    only = run(model, prompts[3:4], {**batching, "seed": 53}, settings, candidate_generator=candidates)
    assert only == expected[3:4]


@pytest.mark.parametrize("strategy", ["eagle trees", "adaptive"])
def test_default_device_of_the_program_same_tokens(strategy: str, reference_model: Any) -> None:
    """Would catch: a head, or the passes that measure latencies, on the device of `torch.set_default_device`."""
    candidates = NgramCandidates(policy=AdaptiveDepth()) if strategy == "adaptive" else HEADS[strategy]()
    prompts = requests(3)
    plain = run(reference_model, prompts)
    with torch.device("meta"):  # on which nothing can be read
        assert run(reference_model, prompts, candidate_generator=candidates) == plain
    assert candidates.speculation.emitted > 0


def test_logprobs_are_those_of_plain_decoding() -> None:
    """Would catch: log-probabilities of rejected nodes, or fewer of them than tokens."""
    model, prompts = tiny_model("llama"), requests(6)
    batching = ContinuousBatchingConfig(**SMALL, return_logprobs=True)
    arguments = {"generation_config": config(), "continuous_batching_config": batching, "record_timestamps": True}
    plain = model.generate_batch(prompts, **arguments)
    ours = model.generate_batch(prompts, **arguments, candidate_generator=STRATEGIES["trees"](model))
    for one, other in zip(plain.values(), ours.values(), strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert len(other.timestamps) == len(other.generated_tokens) == len(other.logprobs)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_sliding_windows_are_drafted_until_they_are_full(architecture: str) -> None:
    """Would catch: a rejected token that overwrites the oldest slot of a window."""
    model, prompts = tiny_model(architecture, sliding_window=32), requests(12)
    candidates = STRATEGIES["trees"](model)
    assert run(model, prompts, candidate_generator=candidates) == run(model, prompts)
    assert candidates.speculation.drafted > 0 and max(map(len, prompts)) + NEW > 40


@pytest.mark.parametrize(
    "batching",
    [
        {"num_blocks": 8, "page_size": 8},
        {"num_blocks": 20, "page_size": 8, "scheduler_type": "prefill_first", "max_batch_tokens": 48},
        {"num_blocks": 300, "page_size": 4},
        {"max_requests_per_batch": 2},
        {"max_batch_tokens": 12},
    ],
    ids=["evicted requests", "split prompts", "shared blocks", "two at a time", "few tokens in a step"],
)
def test_scarce_resources_same_tokens(batching: dict[str, Any]) -> None:
    """Would catch: blocks shared with rejected tokens in them, drafts that push out prompts, a lost request."""
    model, prompts = tiny_model("llama"), requests(10)
    prompts += prompts[:6]
    expected = run(model, prompts)
    candidates = STRATEGIES["trees"](model)
    assert run(model, prompts, batching, candidate_generator=candidates) == expected
    assert candidates.speculation.emitted == sum(map(len, expected))


def test_paged_cache_is_freed_at_the_end_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: cycles of references by which the next call holds two paged caches, gigabytes of a large model."""
    caches, init = list[Any](), PagedAttentionCache.__init__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(PagedAttentionCache, "__init__", recorded)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # which Transformers calls as soon as a manager has stopped
    model, prompts = fresh_model("llama"), requests(3)
    gc.disable()
    try:
        run(model, prompts)
        run(model, prompts, candidate_generator=STRATEGIES["trees"](model))
        run(model, prompts, candidate_generator=STRATEGIES["draft model"](model))
        hf_specgen.attach(model, NgramCandidates(k=3))
        run(model, prompts)
    finally:
        gc.enable()
    assert [cache() for cache in caches] == [None] * 4


def raise_in_second_draft(session: Any) -> None:
    draft = session.draft

    def fail(depths: Any) -> Any:
        if len(session.batch.state.generated[0]) > 4:
            raise RuntimeError("a failing strategy")
        return draft(depths)

    session.draft = fail


@pytest.mark.parametrize("fails", ["strategy", "target"])
def test_exception_fails_the_requests_and_leaves_the_model_usable(fails: str) -> None:
    """In the middle of the requests, while drafting or in a forward pass. Would catch: hooks that stay behind."""
    model, prompts, passes = fresh_model("llama"), requests(5), list[int]()
    plain = run(model, prompts)
    batching = ContinuousBatchingConfig(**SMALL)
    arguments = {"generation_config": config(), "continuous_batching_config": batching}

    def fail(*_: Any) -> None:
        passes.append(1)
        if fails == "target" and len(passes) == 6:
            raise RuntimeError("a failing target")

    handle, strategy = model.register_forward_pre_hook(fail), NgramCandidates(k=3)
    if fails == "strategy":
        with_sessions(strategy, raise_in_second_draft)
    results = model.generate_batch(prompts, **arguments, candidate_generator=strategy)
    handle.remove()
    assert results and all(f"a failing {fails}" in str(result.error) for result in results.values() if result.error)
    assert any(result.error for result in results.values()) and strategy.speculation is not None
    assert run(model, prompts, candidate_generator=NgramCandidates(k=5)) == plain
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("part", ["start", "plan", "draft", "observe", "end", "score"])
def test_exception_in_the_part_of_one_request_fails_no_other(part: str) -> None:
    """Would catch: all requests of the step that fail with it, or that lose their tokens or slots."""
    model, prompts = fresh_model("llama"), requests(5)
    plain = run(model, prompts)
    strategy: Any = NgramCandidates(k=3)

    def change(session: Any) -> None:
        state = session.batch.state
        if state.prompts[0] != prompts[2] or part == "score":
            return
        if part == "start":
            raise RuntimeError("a failing start")
        original = getattr(session, part)

        def fail(*arguments: Any) -> Any:
            if len(state.generated[0]) > 4:
                raise RuntimeError(f"a failing {part}")
            return original(*arguments)

        setattr(session, part, fail)

    def scores(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        unique = logits.argmax(dim=-1) == plain[2][1]  # no other request gets this token
        return logits.masked_fill(unique[..., None], -torch.inf) if part == "score" else logits

    assert sum(plain[2][1] in tokens for tokens in plain) == 1
    model.lm_head.register_forward_hook(scores)
    results = model.generate_batch(
        prompts,
        generation_config=config(do_sample=part == "score", top_k=1),
        continuous_batching_config=ContinuousBatchingConfig(**SMALL),
        candidate_generator=with_sessions(strategy, change),
    )
    failed = [index for index, result in enumerate(results.values()) if result.error]
    assert failed == ([] if part == "end" else [2])
    reason = "probability tensor contains" if part == "score" else f"a failing {part}"
    assert part == "end" or reason in str(results["req_2"].error)
    answers = [result.generated_tokens for result in results.values()]
    assert all(tokens == plain[index] for index, tokens in enumerate(answers) if index not in failed)


@pytest.mark.parametrize("strategy", ["draft model", "combined"])
def test_request_that_the_strategy_refuses_is_answered_without_drafts(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: one prompt that is too long for the draft model, and that fails all requests of a server."""
    model, draft = fresh_model("llama"), fresh_model("llama", max_position_embeddings=40)
    prompts = [*requests(4), *([7, 8, 9, 10] * length for length in (12, 13)), *requests(6)[4:]]
    assert max(map(len, requests(6))) < 40
    candidates: Any = DraftModelCandidates(draft, k=3, draft_window=None)
    if strategy == "combined":
        candidates = CombinedCandidates([NgramCandidates(k=2), candidates], tree=4, policy=FixedDepth())
    assert run(model, prompts, candidate_generator=candidates) == run(model, prompts)
    rows = candidates.speculation.rows
    assert sum(not any(step.drafted for step in row) for row in rows) == 2, "the others speculate"
    reasons = [record.message for record in caplog.records if "is answered without drafts" in record.message]
    assert len(reasons) == 1 and "the draft reads at most 40" in reasons[0]


def test_request_that_the_strategy_refuses_raises_if_strict() -> None:
    """Would catch: a request without drafts although attached strictly, or one that stops a server for all others."""
    model, draft = fresh_model("llama"), fresh_model("llama", max_position_embeddings=40)
    prompts = [*requests(2), [7, 8, 9, 10] * 12, *requests(4)[2:]]
    plain = run(model, prompts)
    hf_specgen.attach(model, DraftModelCandidates(draft, k=3, draft_window=None), strict=True)
    with pytest.raises(ValueError, match="the draft reads at most 40"):
        run(model, prompts)
    manager = started(model)
    names = manager.add_requests(prompts)
    results = {}
    while len(results) < len(prompts):
        result = manager.get_result(timeout=30)
        results[result.request_id] = result
    manager.stop(block=True)
    errors = [results[name].error for name in names]
    assert "the draft reads at most 40" in errors.pop(2) and errors == [None] * 4
    tokens = [results[name].generated_tokens for name in names]
    assert tokens[:2] + tokens[3:] == plain[:2] + plain[3:]
    assert hf_specgen.statistics(model).calls == 4 and hf_specgen.statistics(model).accepted > 0


@pytest.mark.parametrize("strategy", ["auto", "draft model"])
def test_weights_that_change_between_calls_are_used(strategy: str) -> None:
    """As in reinforcement learning. Would catch: tokens of old weights, from a graph, a packed weight or a table."""
    model, prompts = fresh_model("llama"), requests(3)
    hf_specgen.attach(model, STRATEGIES[strategy](tiny_model("llama")), strict=True)
    answers = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter) * parameter.abs().mean()
        plain = run(model, prompts, candidate_generator=None)
        assert run(model, prompts) == plain
        speculated = [model.generate(torch.tensor([one]), generation_config=config())[0] for one in prompts]
        assert [ids[len(one) :].tolist() for one, ids in zip(prompts, speculated, strict=True)] == plain
        answers.append(plain)
    assert answers[0] != answers[1]


def test_persistent_manager_speculates_only_where_the_call_does() -> None:
    """Would catch: a strategy that stays in a manager which later calls use again."""
    model, prompts = fresh_model("llama"), requests(6)
    plain, steps = run(model, prompts), list[int]()
    for candidates in (NgramCandidates(k=5), None, NgramCandidates(k=5)):
        arguments = {} if candidates is None else {"candidate_generator": candidates}
        with recorded_inputs(model) as passes:
            assert run(model, prompts, persistent_manager=True, **arguments) == plain
        steps.append(len(passes))
    model.destroy_cached_continuous_batching_manager()
    assert steps[0] == steps[2] < steps[1]


def test_config_of_a_persistent_manager_is_named_as_the_reason() -> None:
    """Would catch: the advice to change a setting that the call has not, and that changes nothing."""
    model, prompts = fresh_model("llama"), requests(2)
    run(model, prompts, persistent_manager=True)
    # As Transformers chooses by itself on a GPU.
    cached_manager(model).continuous_batching_config.use_async_batching = True
    with pytest.raises(ValueError, match=r"earlier call has kept .*asynchronous.* call model\.destroy_cached"):
        run(model, prompts, candidate_generator=NgramCandidates(), persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    run(model, prompts, candidate_generator=NgramCandidates(), persistent_manager=True)


def test_forward_passes_of_edits_and_json(reference_model: Any, tokenizer: Any) -> None:
    """Four requests at a time, with the budget of a memory-bound accelerator."""
    texts = domain_prompts(4)
    prompts = [tokenizer(text)["input_ids"] for domain in ("edit", "json") for text in texts[domain]]
    settings, batching = config(max_new_tokens=24, eos_token_id=2), {"num_blocks": 400, "max_requests_per_batch": 4}
    with recorded_inputs(reference_model) as plain_passes:
        plain = run(reference_model, prompts, batching, settings)
    with recorded_inputs(reference_model) as passes:
        assert run(reference_model, prompts, batching, settings, candidate_generator="auto", policy=GPU_LIKE) == plain
    assert len(passes) / len(plain_passes) < 0.5


@pytest.mark.parametrize("knee", [1, 16])
def test_draft_budget_follows_the_latency_of_the_step(reference_model: Any, tokenizer: Any, knee: int) -> None:
    """Would catch: drafts that a compute-bound step has no time for, drafting that goes on without verification."""
    texts = domain_prompts(4)
    prompts = [tokenizer(text)["input_ids"] for domain in ("edit", "json") for text in texts[domain]]
    sizes = tuple(sorted({1, knee, 256}))
    curve = CostCurve(sizes, tuple(max(1.0, size / knee) for size in sizes), context=64, batch=1)
    policy, seconds, asked = AdaptiveDepth(LatencyModel.from_curves(curve)), list[float](), list[int]()

    def count(session: Any) -> None:
        draft = session.draft
        session.draft = lambda depths: (asked.append(sum(depths)), draft(depths))[1]

    def keep(_: Any, __: Any, arguments: Any) -> None:
        seconds.append(curve.seconds_of(arguments["input_ids"].numel()))

    handle = reference_model.register_forward_pre_hook(keep, with_kwargs=True)
    settings = config(max_new_tokens=24, eos_token_id=2)
    plain, steps, before = run(reference_model, prompts, None, settings), len(seconds), sum(seconds)
    strategy = with_sessions(NgramCandidates(), count)
    assert run(reference_model, prompts, None, settings, candidate_generator=strategy, policy=policy) == plain
    handle.remove()
    ours = sum(seconds[steps:])
    if knee == 1:
        assert strategy.speculation.drafted == 0 and ours == before
        assert not any(asked)
    else:
        assert strategy.speculation.drafted > 0 and ours < 0.97 * before, "prompts take two thirds"


REFUSED = {
    "rejection": ({"verification": "rejection"}, {}, {}, "verifies exactly"),
    "monitor": ({"monitor": SpeculationMonitor()}, {}, {}, "speculates without monitor=; leave it out"),
    "asynchronous": ({}, {"use_async_batching": True}, {}, "asynchronous batching"),
    "prediction": ({"prediction": [1, 2, 3]}, {}, {}, "prediction="),
    "layer skip": ({"candidate_generator": LayerSkipCandidates(1, k=3)}, {}, {}, "needs a part of"),
    "graphs": ({}, {"use_cuda_graph": True}, {}, "CUDA graphs"),
    "compiled": ({}, {"default_compile_level": 1}, {}, "CUDA graphs and compilation"),
    "text": ({}, {"drop_unsupported_processors": False}, {"repetition_penalty": 1.2}, "RepetitionPenalty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_cannot_be_exact_are_refused(name: str) -> None:
    """Would catch: other tokens without a word, or an attention kernel that stays replaced."""
    arguments, batching, settings, words = REFUSED[name]
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=words):
        run(model, requests(1), batching, config(**settings), **{"candidate_generator": NgramCandidates(), **arguments})
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", HEADS)
def test_heads_read_the_hidden_states_of_their_request(reference_model: Any, tokenizer: Any, name: str) -> None:
    """Tokens and acceptance of `generate`, while requests join, leave and are evicted, with prompts that are split.

    Would catch: states or a cache of another request, or of a rejected token, which lower the acceptance; states twice.
    """
    texts = domain_prompts(2)
    prompts = [tokenizer(text)["input_ids"] for domain in ("json", "code") for text in texts[domain]]
    settings, more = config(eos_token_id=2, max_new_tokens=10), {"policy": FixedDepth(4), "memory": False}
    expected, one_by_one = list[list[int]](), 0
    for prompt in prompts:
        strategy = HEADS[name]()
        expected.append(alone(reference_model, prompt, settings, candidate_generator=strategy, **more))
        one_by_one += strategy.speculation.steps
    for batching in ({"max_requests_per_batch": 2}, {"num_blocks": 32, "max_batch_tokens": 80}):
        strategy = HEADS[name]()
        found = run(reference_model, prompts, batching, settings, candidate_generator=strategy, **more)
        assert found == expected
        assert strategy.speculation.steps <= 1.1 * one_by_one


@pytest.mark.parametrize("strategy", ["draft model", "combined"])
def test_drafter_makes_one_pass_for_all_requests(strategy: str) -> None:
    """Would catch: a draft model that drafts for one request after the other, padding of a prompt that has left."""
    model, prompts, passes = tiny_model("llama"), sorted(requests(12), key=len, reverse=True), list[int]()
    draft = fresh_model("llama")
    candidates: Any = DraftModelCandidates(draft, k=3)
    if strategy == "combined":
        candidates = CombinedCandidates([NgramCandidates(k=2), candidates], tree=4, policy=FixedDepth())
    draft.register_forward_pre_hook(
        lambda _, __, arguments: passes.append(arguments["input_ids"].numel()), with_kwargs=True
    )
    counts = []
    for at_a_time in (1, 3, 12):
        passes.clear()
        run(model, prompts, {"max_requests_per_batch": at_a_time}, candidate_generator=candidates)
        counts.append(len(passes))
    assert counts[2] < counts[0] / 4 and counts[1] < counts[0] / 1.5, counts


class Costly(Candidates):
    """Drafts wrong tokens in passes that each take a plain step; rows cannot join its sessions."""

    negligible_draft_cost = False

    def start(self, batch: Any) -> DraftSession:
        return CostlySession(batch)


class CostlySession(DraftSession):
    tokens_per_pass = (1,)

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return DraftTree.chains([[1] * min(1, depth) for depth in max_depths])


def test_drafter_with_a_session_for_each_request_pauses_when_it_loses_time() -> None:
    """Would catch: passes of such drafters that cost nothing, so that drafting goes on for ever."""
    model, latency = (
        fresh_model("llama"),
        LatencyModel.from_curves(CostCurve((1, 64), (1.0, 1.0), 64, 1), draft_token=0.5),
    )
    candidates = Costly(policy=AdaptiveDepth(latency))
    prompts = requests(4)
    assert run(model, prompts, candidate_generator=candidates) == run(model, prompts)
    statistics = candidates.speculation
    assert 0 < statistics.drafts < statistics.steps / 3, (statistics.drafts, statistics.steps)


@pytest.mark.parametrize("kind", ["wrapped", "assumed"])
def test_adaptive_policies_get_the_latencies_that_they_ask_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a policy inside another one without T(q), which never drafts; T(q) measured where it is assumed."""
    monkeypatch.setattr(time, "thread_time", Clock())  # passes of all sizes take the same time, so that drafts pay
    model, texts = fresh_model("llama"), list[torch.Tensor]()
    policy = (
        DisableWhen(new_tokens_below=2, otherwise=AdaptiveDepth()) if kind == "wrapped" else AdaptiveDepth("assumed")
    )
    model.config.measured_in = "this test"  # other models of the architecture may have a T(q) already
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: texts.append(inputs[0]))
    candidates = NgramCandidates(policy=policy)
    prompts = requests(6)
    assert run(model, prompts, candidate_generator=candidates) == run(model, prompts)
    assert kind == "assumed" or candidates.speculation.drafted > 0
    assert any(not bool(text.any()) for text in texts) == (kind == "wrapped"), "T(q) is measured on a text of zeros"


def test_attached_strategy_falls_back_with_one_warning_or_raises_if_strict() -> None:
    """Would catch: an attached strategy that is ignored in batches, or a warning for each of them."""
    model, prompts = fresh_model("llama"), requests(3)
    plain = run(model, prompts)
    hf_specgen.attach(model, NgramCandidates(), verification="rejection")
    for calls in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(model, prompts) == plain
        about = [str(one.message) for one in caught if "verifies exactly" in str(one.message)]
        assert len(about) == (calls == 1) and hf_specgen.statistics(model).plain_calls.popitem()[1] == calls
    hf_specgen.attach(model, NgramCandidates(), verification="rejection", strict=True)
    with pytest.raises(ValueError, match="verifies exactly"):
        run(model, prompts)
    hf_specgen.attach(model, NgramCandidates(k=4, policy=Schedule({1: 2})), strict=True)
    assert run(model, prompts) == plain and run(model, prompts, candidate_generator=None) == plain
    assert hf_specgen.statistics(model).calls == 1 and hf_specgen.statistics(model).drafted_per_position[2:] == []
