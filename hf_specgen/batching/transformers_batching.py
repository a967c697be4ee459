"""Private symbols of Transformers' continuous batching, and the hooks into its packed steps.

Each docstring names the symbols, as they are in Transformers 5.24; `tests/unit/test_compat.py` checks them. Nothing
else in the package touches an underscore attribute of Transformers, but for `hf_specgen.compat`.
"""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import cb_logits_processors
from transformers.generation.continuous_batching.requests import FutureRequestState

from hf_specgen import compat
from hf_specgen.compat import attention_implementation


def on_batch_processor(manager: Any, make_steps: Callable[[Any, Any], Any]) -> None:
    """Hook the steps that `make_steps(manager, processor)` returns into each processor that a manager makes.

    A manager that is used again has only the hooks of its last use.
    Symbol: `ContinuousBatchingManager._create_batch_processor`.
    """
    _unhook(manager, "_create_batch_processor")  # of an earlier use
    plain = type(manager)._create_batch_processor
    this = weakref.proxy(manager)

    def create() -> Any:
        processor = plain(this)
        steps = make_steps(this, weakref.proxy(processor))
        _hook_packed_steps(processor, steps)
        _hook_end(processor, steps)
        return processor

    manager._create_batch_processor = create


def _hook_packed_steps(processor: Any, steps: Any) -> None:
    """Let `steps` (`PackedSteps`) draft and verify in a `ContinuousBatchProcessor`; None removes the hooks.

    `scheduler.add_waiting_request` receives new requests: one that `check_request` refuses fails alone, with its
    `ValueError`, as does one with the name of another. In each step Transformers calls, in this order:

        scheduler.schedule_batch                    then `add_drafts` adds the drafts
        model_runner.compute_batch                  after `place_drafts`, which gives the drafts positions and masks
        model_runner._sample                        is `receive_scores`
        inputs_and_outputs.prepare_batch_update     is `verify`, which verifies all drafts; requests may fail

    The hooks refer to the processor weakly: in a cycle it would keep its cache until the next garbage collection.
    Symbols: those above, and `_bulk_input_tensor` of `inputs_and_outputs`.
    """
    scheduler = processor.scheduler
    ios = processor.inputs_and_outputs
    runner = processor.model_runner
    hooked = {
        scheduler: ["add_waiting_request", "schedule_batch"],
        ios: ["prepare_batch_update"],
        runner: ["compute_batch", "_sample"],
    }
    for owner, names in hooked.items():
        for name in names:
            _unhook(owner, name)
    if steps is None:
        return
    this = weakref.proxy(processor)
    add = type(scheduler).add_waiting_request
    schedule = type(scheduler).schedule_batch
    compute = type(runner).compute_batch

    def add_waiting_request(state: Any) -> None:
        name = state.request_id
        if name in this.scheduler.active_requests or name in this.scheduler.waiting_requests:
            # Transformers would put the second request in the place of the first one, with the blocks of both.
            raise ValueError(f"a request with the request_id {name!r} has not ended; give another one, or leave it out")
        steps.check_request(state)
        add(this.scheduler, state)

    def schedule_batch(token_budget: int, cache_budget: int) -> Any:
        requests, is_decode, tokens, kv_read = schedule(this.scheduler, token_budget, cache_budget)
        if requests:
            # A step of decoding requests alone may exceed the cache budget, but not with drafts: it then gets none.
            draft_budget = token_budget if kv_read <= cache_budget else tokens
            drafted = steps.add_drafts(requests, tokens, draft_budget)
            is_decode = is_decode and not drafted
            tokens += drafted
        return requests, is_decode, tokens, kv_read

    def compute_batch(model: Any, batch_data: dict[str, Any]) -> None:
        ios = this.inputs_and_outputs
        # Logits after every draft token, processed with the settings of its request.
        indices, requests = steps.place_drafts(batch_data["position_ids"][0], batch_data["attention_mask"])
        arguments = ios._bulk_input_tensor[ios.static_inputs :]
        this.logit_processor.prepare_tensor_args(requests, arguments)
        batch_data["logits_indices"] = torch.tensor(indices, dtype=torch.long, device=ios.device)
        batch_data["logits_processor_args"] = arguments[:, : len(indices)]
        with steps.in_pass():
            compute(this.model_runner, model, batch_data)

    scheduler.add_waiting_request = add_waiting_request
    scheduler.schedule_batch = schedule_batch
    runner.compute_batch = compute_batch
    runner._sample = steps.receive_scores
    ios.prepare_batch_update = steps.verify


def _hook_end(processor: Any, steps: Any) -> None:
    """Let `close` end the sessions of `steps` (`PackedSteps`) in the thread of the manager; None removes the hook.

    Symbol: `ContinuousBatchProcessor.fail_all_requests`, which every such thread calls last, also without requests.
    """
    _unhook(processor, "fail_all_requests")
    if steps is None:
        return
    this = weakref.proxy(processor)
    fail = type(processor).fail_all_requests

    def fail_all_requests(error: Exception) -> None:
        try:
            fail(this, error)
        finally:
            steps.close()

    processor.fail_all_requests = fail_all_requests


def fail_request(processor: Any, state: Any, error: Exception) -> None:
    """Let one active request of a `ContinuousBatchProcessor` fail, and free its blocks of the cache."""
    processor.output_router.fail_and_deliver(state, error)
    processor.scheduler.finish_request(state.request_id)
    processor.scheduler.block_new_requests = False


def _unhook(owner: Any, name: str) -> None:
    """Remove a method of one object, so that it has the method of its class again."""
    with suppress(AttributeError):
        delattr(owner, name)


def move_slots(cache: Any, moves: dict[str, tuple[list[int], list[int]]]) -> None:
    """Copy keys and values between slots of a `PagedAttentionCache`: `(sources, destinations)` by layer type.

    Symbol: `_kv_token_views` of its allocators, the keys and the values of each layer.
    """
    for layer_type, (sources, destinations) in moves.items():
        if sources:
            source, destination = torch.tensor([sources, destinations], device=cache.device)
            for views in cache.cache_allocators[layer_type]._kv_token_views.values():
                for states in views:
                    states.index_copy_(0, destination, states.index_select(0, source))


def was_evicted(state: Any) -> bool:
    """Whether a request starts again after its eviction from the cache. Symbol: `RequestState._true_initial_tokens`.

    The attribute is then the length of the prompt, and `initial_tokens` also contains the tokens that were generated
    before; else it is 0.
    """
    return bool(state._true_initial_tokens)


def prompt_length(state: Any) -> int:
    """The number of prompt tokens of a continuous-batching request. Symbol: see `was_evicted`."""
    return int(state._true_initial_tokens or len(state.initial_tokens))


def end_tokens(state: Any) -> frozenset[int]:
    """The tokens that end a continuous-batching request. Symbol: `RequestState._eos_token_ids`."""
    return frozenset(state._eos_token_ids)


def request_number(state: Any) -> int:
    """`i` of a request with the default name "req_<i>"; for any other name 2**32 plus a hash of it."""
    name = str(state.request_id)
    return int(name[4:]) if re.fullmatch(r"req_\d+", name) else 2**32 + zlib.crc32(name.encode())


def cached_manager(model: Any) -> Any:
    """The manager that continuous batching kept for the next call. Symbol: `_cached_continuous_batching_manager`."""
    return getattr(model, "_cached_continuous_batching_manager", None)


@contextmanager
def unpaged_attention(model: Any) -> Iterator[None]:
    """A context in which the model has its attention without "paged|". Symbol: `_attn_implementation`."""
    paged = attention_implementation(model.config)
    plain = paged.removeprefix("paged|")
    if plain == paged:
        yield
        return
    try:
        model.set_attn_implementation(plain)
        yield
    finally:
        model.set_attn_implementation(paged)


def packed_step_processors(model: Any, config: GenerationConfig, batching: Any) -> list[Any]:
    """The logits processors that continuous batching applies to packed steps."""
    processors = cb_logits_processors.ContinuousBatchingLogitsProcessorList(
        compat.logits_processors(model, config),
        per_request_processors=batching.per_request_processors,
        drop_unsupported_processors=batching.drop_unsupported_processors,
    )
    return list(processors.logits_processor)


def is_per_request(processor: Any) -> bool:
    """Whether continuous batching applies a logits processor to each row of scores with its request's settings."""
    return isinstance(processor, cb_logits_processors.ContinuousBatchingLogitsProcessor)


def processors_of_request(processors: Sequence[Any], state: Any) -> list[Any]:
    """The logits processors of a manager for one request: per-request ones have the settings of its `RequestState`."""
    return [_with_settings(processor, state) if is_per_request(processor) else processor for processor in processors]


def _with_settings(processor: Any, state: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A per-request logits processor as an ordinary one, with the settings of one request for all rows of scores."""
    setting = processor.prepare_tensor_args([FutureRequestState(state, True, {}, 1)])

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, processor(scores, setting.to(scores.device).expand(len(scores))))

    return process
