"""Speculation in the packed steps of continuous batching: draft, verify and roll back draft trees.

Transformers packs the tokens of all running requests into one row of a forward pass, over a paged cache. A request
that decodes has one token in it; any number is legal, as in a chunked prefill. So its draft follows that token, the
logits of all of these positions are computed, and the position of the request is set back over rejected tokens, whose
slots are written again in the next step. Blocks that other requests may share consist of accepted tokens only.

A step of three requests: the second one is in its prefill, the others decode. `L` marks positions with logits:

    request       A A A A       B B B B B         C C
    token         t d d d       p p p p p         t d         t: last token, d: draft, p: prompt
    logits        L L L L               L         L L         the last token of B's prompt alone
    afterwards    A accepts 1 of 3 drafts: its position is set back by 2

Where the attention takes a mask, drafts are trees: their nodes get the positions of their depths and attend to their
ancestors alone, and accepted nodes are moved next to each other in the cache.

Each `Request` is a call of its own, whose forward passes are the packed steps. The nodes of all drafts are ranked
together: they join the step in descending order of their path probability for as long as they raise the expected tokens
per second, by the latency of the target.

Source: Yu et al., "Orca" (2022), for batches that requests join and leave at every step; Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023), for the cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from hf_specgen import compat
from hf_specgen.batching import transformers_batching
from hf_specgen.batching.packed_request import Request, RequestContext, warn_of_refusal
from hf_specgen.batching.shared_steps import SharedSteps
from hf_specgen.call_statistics import Statistics
from hf_specgen.depth.latency import fastest_count, pass_seconds_up_to
from hf_specgen.device_tree import Floats
from hf_specgen.linear_layers import FastLinearLayers
from hf_specgen.settings import Settings
from hf_specgen.targets.hidden_states import hook_points, recorded_states
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.row_layout import UNLIMITED
from hf_specgen.targets.support import position_table
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import are_nan

logger = logging.getLogger("hf_specgen")

Moves = dict[str, tuple[list[int], list[int]]]
"""By layer type (full or sliding attention), the slots to copy from, and the slots to copy to."""


class PackedSteps:
    """Adds drafts to the packed steps of one batch processor, and verifies them; called by its thread alone.

    `processor` and `manager` are Transformers' `ContinuousBatchProcessor` and `ContinuousBatchingManager`.
    `report_finished` receives the counters of every request that has ended. Request ``req_<i>`` is sampled as
    `torch.manual_seed(seed + i)` and `generate` would sample it alone. `report_refusal` receives why the
    strategy refuses a request, which then fails; if it is None, such requests are answered without drafts.
    """

    def __init__(
        self,
        processor: Any,
        manager: Any,
        settings: Settings,
        report_finished: Callable[[Statistics], None],
        report_refusal: Callable[[str], None] | None = None,
    ):
        self._report_refusal = report_refusal
        self._model = manager.model
        self._shared = SharedSteps(settings)
        aux_layers = settings.candidates.target_requirements(self._model).aux_hidden_state_layers
        self._hook_points = hook_points(self._model, aux_layers)
        self._linear_layers = FastLinearLayers(self._model)
        self._processor = processor
        self._cache = processor.cache
        self._report_finished = report_finished
        self._allocators: dict[str, Any] = processor.cache.cache_allocators
        # The slots of a sliding window are a ring buffer: a rejected token may overwrite one that is still needed. So
        # drafts end where the text fills the smallest window.
        windows = [getattr(allocator, "sliding_window", None) for allocator in self._allocators.values()]
        self._max_length = min([window for window in windows if window], default=UNLIMITED)
        self._request_context = RequestContext(
            self._model,
            manager.generation_config,
            self._shared.settings,
            torch.initial_seed(),  # the processor has just set it, to that of the config if there is one
            aux_layers,
            min(position_table(text_config(self._model)), self._max_length) - 1,
            processor.logit_processor.logits_processor,
            verifies_chains_only=processor.inputs_and_outputs.attention_mask is None,
        )
        self._requests: dict[str, Request] = {}
        self._warned_reasons = set[str]()  # why requests are decoded without drafts, without the numbers
        # Of the present step:
        self._scheduled: list[tuple[Any, Request]] = []  # the requests in it, each after its `FutureRequestState`
        self._num_decoding = 0  # requests that decode; the others are in their prefill
        self._drafted = 0  # draft tokens
        self._step_seconds: Floats | None = None  # predicted, with 0, 1, 2, … draft tokens
        self._scheduled_at = 0.0  # when its drafts were added; it then offloads, makes its inputs, runs and samples
        self._states: list[torch.Tensor] = []  # recorded hidden states, by layer
        self._scores: torch.Tensor

    @torch.no_grad()
    def check_request(self, state: Any) -> None:
        """Raise a `ValueError` if the strategy refuses a request, a `RequestState`, that then has to fail."""
        if self._report_refusal is None:
            return
        reason = self._request_of(state).refusal
        if reason:
            self._requests.pop(state.request_id).end()
            self._report_refusal(reason)
            raise ValueError(reason)

    @torch.no_grad()  # Transformers' thread has autograd on, but for the forward passes of the target
    def add_drafts(self, scheduled: Sequence[Any], tokens: int, token_budget: int) -> int:
        """Add draft tokens to the requests of a scheduled step, Transformers' `FutureRequestState`; returns how many.

        The step has `tokens` tokens so far, and may have `token_budget`.
        """
        self._update_requests(scheduled)
        max_draft_tokens = max(0, token_budget - tokens) if self._num_decoding else 0
        self._shared.begin([request.steps for _, request in self._scheduled], self._num_decoding)
        self._step_seconds = self._predicted_seconds(tokens, token_budget)
        self._draft(max_draft_tokens)
        counts = self._verified_counts(max_draft_tokens)
        self._drafted = 0
        for index, (future, request) in enumerate(self._scheduled):
            # Cut the draft to what fits into the smallest window, or to nothing if the cache is full.
            count = max(0, min(counts[index], self._max_length - 1 - future.state.position_offset))
            has_slots = count > 0 and self._allocate_slots(future.state, 1 + count)
            request.tree = request.tree.first_nodes(count if has_slots else 0)
            future.state.tokens_to_process = future.state.tokens_to_process + request.tree.token_lists()[0]
            future.query_length += request.tree.nodes
            self._drafted += request.tree.nodes
        self._scheduled_at = perf_counter()
        return self._drafted

    def _predicted_seconds(self, tokens: int, token_budget: int) -> Floats | None:
        """Seconds of the step with 0, 1, 2, … draft tokens beside `tokens` others; None if no latency is known."""
        if self._shared.latency is None:
            return None
        # A pass over the decoding requests alone, plus what the draft tokens add to the step. The time of prompts in
        # the step is left out, as it does not depend on drafts.
        seconds = pass_seconds_up_to(self._shared.latency.target, token_budget)
        predicted: Floats = seconds[self._num_decoding] + (seconds[tokens:] - seconds[tokens])
        return predicted

    def _update_requests(self, scheduled: Sequence[Any]) -> None:
        """End cancelled requests, begin new ones, and set `_scheduled` and `_num_decoding`."""
        for name in filter(self._processor.scheduler.request_is_cancelled, list(self._requests)):
            self._report_finished(self._requests.pop(name).end())
        self._scheduled = [(future, self._request_of(future.state)) for future in scheduled]
        # Those with a token whose keys and values are not in the cache yet: not those in a prefill, first or repeated.
        self._num_decoding = sum(bool(future.has_new_token and future.state.generated_tokens) for future in scheduled)

    def _request_of(self, state: Any) -> Request:
        """The request of a scheduled `RequestState`, begun if it is new."""
        request = self._requests.get(state.request_id)
        if request is not None and not request.resume_as(state):
            # It was cancelled while no request was scheduled, and its `request_id` was then used again.
            self._report_finished(self._requests.pop(state.request_id).end())
            request = None
        if request is None:
            request = self._requests[state.request_id] = Request(state, self._request_context)
            self._shared.join(request.steps)
            if request.refusal and self._report_refusal is None:
                warn_of_refusal(self._warned_reasons, request.refusal)
        return request

    def _draft(self, max_draft_tokens: int) -> None:
        """Draft for the decoding requests, if some number of draft tokens, all of them accepted, would be faster."""
        may_be_faster = (
            self._step_seconds is None
            or fastest_count([1.0] * max_draft_tokens, self._num_decoding, self._step_seconds) > 0
        )
        # Requests in their first prefill have no step to plan.
        decoding = [(future, one) for future, one in self._scheduled if future.has_new_token and one.generated]
        for future, request in decoding:
            with request.keeping_error():
                self._shared.plan(request.steps, may_be_faster and self._may_draft(future.state, request))
        planned = [request for _, request in decoding if request.error is None]
        self._shared.draft([request.steps for request in planned])
        for request in planned:
            with request.keeping_error():
                request.tree = request.steps.draft_step()

    def _may_draft(self, state: Any, request: Request) -> bool:
        """Whether a request that has a new token in the step may have a draft."""
        # A request that was evicted, and ends its second prefill in this step, has `generated` but no
        # `generated_tokens`. Its step is planned without a draft, as `Request.verify` ends it with `end_step`.
        is_decoding = bool(state.generated_tokens)
        # Blocks that are restored from the host in this step are added to its `complete_blocks`, and `_roll_back` would
        # replace these.
        is_cached = not state.is_cpu_offloaded
        fits_window = state.position_offset < self._max_length - 1
        return is_decoding and is_cached and fits_window and not request.refusal

    def _verified_counts(self, max_draft_tokens: int) -> Counter[int]:
        """How many draft tokens of each request are verified: the most probable ones of all requests together."""
        gains_of_requests = list[tuple[float, int]]()
        for index, (_, request) in enumerate(self._scheduled):
            nodes = len(request.tree.parents[0])
            # Without estimates all nodes count as certain.
            probability = request.tree.probability[0][:nodes] if request.tree.probability else [1.0] * nodes
            gains_of_requests += [(gain, index) for gain in probability]
        # The nodes of a tree are in descending order already: of each tree the first ones are counted.
        ranked = sorted(gains_of_requests, key=lambda gain_and_index: -gain_and_index[0])[:max_draft_tokens]
        count = len(ranked)
        if ranked and self._step_seconds is not None:
            count = fastest_count([gain for gain, _ in ranked], self._num_decoding, self._step_seconds[: 1 + count])
        return Counter(index for _, index in ranked[:count])

    def _allocate_slots(self, state: Any, tokens: int) -> bool:
        """Allocate slots for a request's tokens in the step; returns whether they could be allocated.

        No new block is allocated for drafts while there are fewer free ones than active requests, which may need them.
        """
        if self._cache.pool.num_free_sectors < len(self._processor.scheduler.active_requests):
            length = state.current_len()
            allocators = self._allocators.values()
            if any(allocator.needs_new_blocks(state.request_id, length, tokens) for allocator in allocators):
                return False
        return bool(self._cache.can_store_request_tokens(state, tokens))

    def place_drafts(self, positions: torch.Tensor, masks: Any) -> tuple[list[int], list[Any]]:
        """Give the nodes of trees the positions of their depths, and mask all nodes but their ancestors.

        The `position_offset` of each request counts its tokens of the step already.

        Args:
            positions: `[tokens]` of the step.
            masks: `[1, 1, tokens, keys]`, added to attention scores, for all layers or by layer type; None where drafts
                are chains.

        Returns:
            the indices in the step of the tokens with logits, and the `FutureRequestState` that each belongs to.
        """
        if not isinstance(masks, dict):
            masks = {} if masks is None else dict.fromkeys(self._allocators, masks)
        indices = list[int]()
        futures = list[Any]()
        # Where the tokens of the request end in the step, and by layer type where its keys end in the mask.
        end = 0
        key_ends = dict.fromkeys(masks, 0)
        for future, request in self._scheduled:
            cached = future.state.position_offset - future.query_length
            end += future.query_length
            for layer_type in masks:
                key_ends[layer_type] += self._allocators[layer_type].get_seqlen_k(cached, future.query_length)
            # Its last tokens, which have logits: the pending token or the last one of a prompt, and the draft.
            num_logits = 1 + request.tree.nodes
            first = end - num_logits
            if future.has_new_token:
                indices += range(first, end)
                futures += [future] * num_logits
            if request.tree.is_chain:  # as Transformers has placed it
                continue
            depths, ancestors = (values[0].to(positions.device) for values in request.tree.structure())
            positions[first:end] = cached + depths
            for layer_type, mask in masks.items():
                # Of these tokens as queries, and as the last keys of the request.
                block = mask[0, 0, first:end, key_ends[layer_type] - num_logits : key_ends[layer_type]]
                block.masked_fill_(~ancestors, torch.finfo(mask.dtype).min)
        return indices, futures

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """A context for the pass of a step, which records the hidden states that drafters read."""
        with (
            recorded_states(self._hook_points, compat.input_device(self._model)) as recorded,
            self._linear_layers.in_use(),
        ):
            yield
        self._states = [states[0] for states in recorded]

    def receive_scores(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Receive the processed scores, `[1, rows, vocab]`; `verify` chooses tokens from them.

        `output_ids`, to which Transformers would write sampled tokens, is not used.
        """
        self._scores = scores[0]

    @torch.no_grad()
    def verify(self) -> tuple[list[Any], list[int], list[float] | None]:
        """Verify all drafts; returns the requests, the last new token of each that got one, and its log-probability.

        The requests are the `FutureRequestState`s of the step, but for those that have failed. In the middle of their
        prefill they get no token. Log-probabilities are None unless requested.

        The new tokens before it are appended here to the requests, whose positions are set back over rejected tokens;
        Transformers appends the last one, as in a step without drafts.
        """
        measured_seconds = perf_counter() - self._scheduled_at
        num_logits = [1 + request.tree.nodes if future.has_new_token else 0 for future, request in self._scheduled]
        self._distribute_states(num_logits)
        requests = list[Any]()
        last_tokens = list[int]()
        last_logprobs = list[float]()
        accepted = 0
        moves: Moves = {layer_type: ([], []) for layer_type in self._allocators}
        for (future, request), scores in zip(self._scheduled, self._scores.split(num_logits), strict=True):
            if not future.has_new_token:
                requests.append(future)
                continue
            # A step with prompts would be no measurement of a decoding step.
            if self._num_decoding == len(self._scheduled):
                request.steps.timer.add("forward", measured_seconds)
            if not (tokens := self._new_tokens(future.state, request, scores)):
                continue
            requests.append(future)
            # All of them but the last one, which Transformers appends.
            logprobs: list[Any] = [None] * len(tokens)
            if self._processor.return_logprobs:
                logprobs = request.logprobs(scores, tokens)
                last_logprobs.append(logprobs[-1])
            for token, logprob in zip(tokens[:-1], logprobs[:-1], strict=True):
                future.state.update_and_check_completion(token, logprob)
            last_tokens.append(tokens[-1])
            accepted += len(tokens) - 1
            self._roll_back(future, request, len(tokens), moves)
        if self._step_seconds is not None:
            predicted_seconds = self._step_seconds[self._drafted]
            with_token = [one.steps for future, one in self._scheduled if future.has_new_token and one.error is None]
            passes = self._shared.passes_of(with_token)
            self._shared.count_loss(predicted_seconds, self._num_decoding + accepted, passes)
        transformers_batching.move_slots(self._cache, moves)
        return requests, last_tokens, last_logprobs if self._processor.return_logprobs else None

    def _new_tokens(self, state: Any, request: Request, scores: torch.Tensor) -> list[int]:
        """The new tokens of a request, by its scores `[1 + nodes, vocab]`, which ends with the last one.

        After an exception the request fails alone, without new tokens. But where the attention takes a mask, NaN of one
        request may have reached the cache of all others in the step: 0 * NaN is NaN.
        """
        try:
            tokens = request.verify(scores)
        except Exception as error:
            if not self._request_context.verifies_chains_only and bool(are_nan(scores).any()):
                raise
            logger.error("request %s of continuous batching has failed", state.request_id, exc_info=error)
            request.error = error
            transformers_batching.fail_request(self._processor, state, error)
            tokens = []
        if not tokens or request.steps.state.has_ended(0):
            self._report_finished(self._requests.pop(state.request_id).end())
        return tokens

    def _distribute_states(self, num_logits: Sequence[int]) -> None:
        """Give each request the hidden states of its tokens in the step.

        Layer -1, the input of the output matrix, has states of the tokens with logits alone, `num_logits` by request.
        """
        tokens = [future.query_length for future, _ in self._scheduled]
        by_layer = []  # the states of each request
        for states in self._states:
            has_all_tokens = states.shape[1] == sum(tokens)
            by_layer.append(states.split(tokens if has_all_tokens else num_logits, dim=1))
        for index, (_, request) in enumerate(self._scheduled):
            request.target.receive([of_requests[index] for of_requests in by_layer], num_logits[index])
        self._states = []

    def _roll_back(self, future: Any, request: Request, kept: int, moves: Moves) -> None:
        """Set the position of a request to the end of its kept tokens, and count the cache blocks that they fill.

        `kept` is their number: the pending token and the accepted nodes. If these nodes are not the first ones of the
        tree, the copies that put them next to each other are added to `moves`.
        """
        nodes = request.tree.nodes
        path = request.target.path
        request.tree = DraftTree.empty(1)
        if not nodes:
            return
        # The position of the pending token, which is the first token of the request in the step.
        future.state.position_offset -= 1 + nodes
        if list(path) != list(range(len(path))):  # accepted nodes that are not next to each other
            for layer_type, (sources, destinations) in moves.items():
                slots = self._allocators[layer_type].get_write_indices(
                    future.state.request_id, future.state.position_offset, 1 + nodes
                )
                sources += [slots[1 + node] for node in path]
                destinations += slots[1 : 1 + len(path)]
        future.complete_blocks = self._cache.count_new_complete_blocks(future.state, kept)
        future.state.position_offset += kept

    def close(self) -> None:
        """End the requests that were not finished, and the shared draft sessions."""
        while self._requests:
            _, request = self._requests.popitem()
            self._report_finished(request.end())
        self._shared.close()
