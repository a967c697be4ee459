"""Speculation in the packed steps of continuous batching: draft, verify and roll back draft trees.

Transformers packs the tokens of all running requests into one row of a forward pass, over a paged cache. A request
that decodes has one token in it; any number is legal, as in a chunked prefill. So its draft follows that token, the
logits of all of these positions are computed, and the position of the request is set back over rejected tokens, whose
slots are written again in the next step. Blocks that other requests may share consist of accepted tokens only.

Where the attention takes a mask, drafts are trees: their nodes get the positions of their depths and see their
ancestors alone, and accepted nodes are moved next to each other in the cache.

Each request is decoded by a `DecodingLoop` of its own, whose forward passes are the packed steps. All drafts compete
for one budget: nodes join the step in descending order of their path probability for as long as they raise the expected
tokens per second, by the latency of the target.

Source: Yu et al., "Orca" (2022), for batches that requests join and leave at every step; Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023), for the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList

from hf_specgen import compat
from hf_specgen.batching import transformers_batching
from hf_specgen.batching.shared_steps import SharedSteps
from hf_specgen.call import Call, GenerationState
from hf_specgen.call_statistics import Statistics
from hf_specgen.decoding import DecodingLoop
from hf_specgen.depth.latency import Floats, fastest_count, step_seconds
from hf_specgen.settings import Settings
from hf_specgen.targets.hidden_states import HiddenStateRowTarget, captured_states
from hf_specgen.targets.inputs import UNLIMITED
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.support import position_table
from hf_specgen.tree import DraftTree

Moves = dict[str, tuple[list[int], list[int]]]
"""By kind of attention, the slots to copy from, and to."""


class PackedTarget(HiddenStateRowTarget):
    """The target as the loop and the drafter of one request see it: its passes are parts of packed steps."""

    batch, rows, has_common, returns_cache = 1, [0], True, False
    slot_limit, _graphs = UNLIMITED, None
    verifies_chains_only = False

    def __init__(self, steps: PackedSteps, prompt: int):
        self.device, self.verifies_chains_only = compat.input_device(steps.model), steps.chains_only
        self.first_positions, self.last_position = (prompt,), steps.positions - 1
        self._indices, self._kept = tuple(steps.layers), [[]]
        width = len(steps.layers) * text_config(steps.model).hidden_size
        self.states = torch.zeros(1, width, dtype=steps.model.dtype, device=self.device)
        self.pass_states = self._step_states = self.states[None, :0]

    def forward_again(self, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        raise ValueError(
            "a draft token has states that are not finite; leave candidate_generator= out of generate_batch()"
        )

    def process(self, states: Sequence[torch.Tensor], step: int) -> None:
        """Receive the hidden states `[1, tokens, hidden]` of the request's part of a packed step, by captured layer.

        The last `step` tokens are the pending one and the draft, or the last one of a prompt; 0 before its end.
        A prompt that is processed again, as its request was evicted from the cache, is left out.
        """
        is_prefilled = bool(self._kept[0])
        if not states or (is_prefilled and not step):
            return
        tokens = step if is_prefilled else min(part.shape[1] for part in states)
        new = torch.cat([part[:, part.shape[1] - tokens :] for part in states], dim=-1)
        self.pass_states = new if is_prefilled else torch.cat([self.pass_states, new], dim=1)
        self._step_states = self.pass_states[:, self.pass_states.shape[1] - step :]


class Request:
    """A request, by Transformers' `RequestState`: its decoding loop, and its draft in this step, `tree`."""

    def __init__(self, state: Any, steps: PackedSteps):
        prompt, tokens = transformers_batching.prompt_of_request(state), state.initial_tokens + state.generated_tokens
        limit = UNLIMITED if state.max_new_tokens is None else len(state.initial_tokens) + state.max_new_tokens
        self.target, self.tree, self._stack = PackedTarget(steps, prompt), DraftTree.empty(1), ExitStack()
        ids, settings = torch.tensor([tokens[:prompt]], device=self.target.device), steps.common.settings
        text = GenerationState(ids, None, transformers_batching.end_tokens(state), limit)
        text.append(0, tokens[prompt:])
        drafting = settings.candidates.settings()
        seed = (steps.seed + transformers_batching.request_number(state)) % 2**63
        call = Call(steps.model, text, steps.config, drafting, settings=settings, seed=seed)
        self.loop = DecodingLoop(call, self.target, settings, self._stack, StoppingCriteriaList())

    @property
    def text(self) -> list[int]:
        """The generated tokens."""
        return self.loop.state.generated[0]

    def commit(self, scores: torch.Tensor) -> list[int]:
        """Verify the draft by the scores `[1 + nodes, vocab]`; returns the tokens that are appended."""
        before = len(self.text)
        if before:
            self.loop.end_step(self.tree, scores[None])
        else:
            self.loop.end_prefill(scores[None])
        return self.text[before:]

    def end(self) -> Statistics:
        """End the sessions; the counters of the request."""
        self._stack.close()
        return self.loop.finished_statistics()


class PackedSteps:
    """Adds drafts to the packed steps of one batch processor, and verifies them; called by its thread alone.

    Request ``req_<i>`` is sampled as `torch.manual_seed(seed + i)` and `generate` would sample it alone.

    Args:
        processor: of Transformers' `ContinuousBatchingManager`.
        finished: receives the counters of every request that has ended.
    """

    def __init__(self, processor: Any, manager: Any, settings: Settings, finished: Callable[[Statistics], None]):
        self.model, self.config, self.common = manager.model, manager.generation_config, SharedSteps(settings)
        self.seed = torch.initial_seed()  # the processor has just set it, to that of the config if there is one
        self.layers = settings.candidates.target_requirements(self.model).aux_hidden_state_layers
        self.chains_only = processor.inputs_and_outputs.attention_mask is None
        self._processor, self._cache, self._finished = processor, processor.cache, finished
        self._allocators: dict[str, Any] = processor.cache.cache_allocators
        # Slots of a sliding window are written in turn: one that a rejected token has overwritten would be lost.
        windows = [getattr(part, "sliding_window", None) for part in self._allocators.values()]
        self._slots = min([window for window in windows if window], default=UNLIMITED)
        self.positions = min(position_table(text_config(self.model)), self._slots)
        self._requests: dict[str, Request] = {}
        self._step: list[tuple[Any, Request]] = []
        """The requests of the step, each with Transformers' `FutureRequestState`."""
        self._states: list[torch.Tensor] = []  # captured in the step
        self._drafted = self._decoding = 0
        self._began = 0.0  # when the passes of the step began
        self._seconds: Floats | None = None  # of the step by draft tokens

    def extend(self, scheduled: Sequence[Any], tokens: int, token_budget: int) -> int:
        """Add draft tokens to the requests of a scheduled step; returns how many.

        Args:
            scheduled: Transformers' `FutureRequestState` of each request in the step.
            tokens: in the step so far.
            token_budget: tokens of the step at most.
        """
        for name in filter(self._processor.scheduler.request_is_cancelled, list(self._requests)):
            self._finished(self._requests.pop(name).end())
        for one in scheduled:
            if one.state.request_id not in self._requests:
                self._requests[one.state.request_id] = Request(one.state, self)
        self._step = [(one, self._requests[one.state.request_id]) for one in scheduled]
        self._decoding = sum(bool(one.has_new_token and one.state.generated_tokens) for one in scheduled)
        most = max(0, token_budget - tokens) if self._decoding else 0
        self.common.begin([request.loop for _, request in self._step], self._decoding)
        self._seconds = None
        if self.common.latency is not None:
            # Without the time of prompts in the step: what they take does not depend on drafts.
            seconds = step_seconds(self.common.latency.target, token_budget)
            self._seconds = seconds[tokens:] - seconds[tokens] + seconds[self._decoding]
        # Not where even drafts that are accepted as a whole would not be faster.
        drafts = self._seconds is None or fastest_count([1.0] * most, self._decoding, self._seconds) > 0
        planned = [(one, request) for one, request in self._step if one.has_new_token and request.text]
        may_draft = [drafts and bool(one.state.generated_tokens) for one, _ in planned]
        trees = self.common.draft([request.loop for _, request in planned], may_draft)
        for (_, request), tree in zip(planned, trees, strict=True):
            request.tree = tree
        self._drafted, counts = 0, self._counts(most)
        for number, (one, request) in enumerate(self._step):
            count = max(0, min(counts[number], self._slots - 1 - one.state.position_offset))
            request.tree = request.tree.first_nodes(count if count and self._has_slots(one.state, 1 + count) else 0)
            one.state.tokens_to_process = one.state.tokens_to_process + request.tree.token_lists()[0]
            one.query_length += request.tree.nodes
            self._drafted += request.tree.nodes
        self._began = perf_counter()
        return self._drafted

    def _counts(self, most: int) -> Counter[int]:
        """How many draft tokens of each request are verified: the most probable ones of all requests together."""
        ranked = list[tuple[float, int]]()
        for number, (_, request) in enumerate(self._step):
            nodes, probability = len(request.tree.parents[0]), request.tree.probability
            ranked += [(gain, number) for gain in (probability[0][:nodes] if probability else [1.0] * nodes)]
        ranked = sorted(ranked, key=lambda one: -one[0])[:most]
        if ranked and self._seconds is not None:
            gains = [gain for gain, _ in ranked]
            ranked = ranked[: fastest_count(gains, self._decoding, self._seconds[: 1 + len(gains)])]
        return Counter(number for _, number in ranked)

    def _has_slots(self, state: Any, tokens: int) -> bool:
        """Allocate the slots of a request in the step, unless other running requests may need the last free ones."""
        if self._cache.pool.num_free_sectors < len(self._processor.scheduler.active_requests):
            length, parts = state.current_len(), self._allocators.values()
            if any(part.needs_new_blocks(state.request_id, length, tokens) for part in parts):
                return False
        return bool(self._cache.can_store_request_tokens(state, tokens))

    def place_drafts(self, positions: torch.Tensor, masks: Any) -> tuple[list[int], list[Any]]:
        """Give the nodes of trees the positions of their depths, and hide all nodes but their ancestors from them.

        The tokens of the step count as cached.

        Args:
            positions: `[tokens]` of the step.
            masks: `[1, 1, tokens, keys]`, added to attention scores, for all layers or for each kind of attention; None
                where drafts are chains.

        Returns:
            the places in the step after which tokens are chosen, and the request of each.
        """
        if not isinstance(masks, dict):
            masks = {} if masks is None else dict.fromkeys(self._allocators, masks)
        chosen, requests, end, keys = list[int](), list[Any](), 0, dict.fromkeys(masks, 0)
        for one, request in self._step:
            past, size = one.state.position_offset - one.query_length, 1 + request.tree.nodes
            end += one.query_length
            if one.has_new_token:
                chosen += range(end - size, end)
                requests += [one] * size
            for kind in masks:
                keys[kind] += self._allocators[kind].get_seqlen_k(past, one.query_length)
            if not request.tree.is_chain:
                depths, ancestors = (part[0].to(positions.device) for part in request.tree.structure())
                positions[end - size : end] = past + depths
                for kind, mask in masks.items():
                    block = mask[0, 0, end - size : end, keys[kind] - size : keys[kind]]
                    block.masked_fill_(~ancestors, torch.finfo(mask.dtype).min)
        return chosen, requests

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures the hidden states that drafters read, of the pass inside."""
        with captured_states(self.model, self.layers) as captured:
            yield
        self._states = [parts[0] for parts in captured]

    def sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Receive the processed scores, `[1, rows, vocab]`; tokens are chosen from them in `commit`."""
        self._scores = scores[0]

    def commit(self) -> tuple[list[int], list[float] | None]:
        """Verify; returns the last new token of each request, and its logarithmic probability if asked for.

        The tokens before it are appended to the requests, whose positions are set back over rejected ones.
        """
        seconds = perf_counter() - self._began
        steps = [1 + request.tree.nodes if one.has_new_token else 0 for one, request in self._step]
        self._pass_states_on(steps)
        last, last_logprobs, accepted = list[int](), list[float](), 0
        moves: Moves = {kind: ([], []) for kind in self._allocators}
        for (one, request), scores in zip(self._step, self._scores.split(steps), strict=True):
            if not one.has_new_token:
                continue
            if self._decoding == len(self._step):
                request.loop.timer.add("forward", seconds)
            tokens, values = request.commit(scores), list[Any]()
            if self._processor.return_logprobs:
                rows = scores[[0, *(1 + node for node in request.target.path)]]
                values = rows.softmax(dim=-1).gather(1, torch.tensor(tokens, device=rows.device)[:, None])
                values = values[:, 0].log().tolist()
                last_logprobs.append(values[-1])
            for number, token in enumerate(tokens[:-1]):
                one.state.update_and_check_completion(token, values[number] if values else None)
            last.append(tokens[-1])
            accepted += len(tokens) - 1
            self._roll_back(one, request, len(tokens), moves)
            if request.loop.state.has_ended(0):
                self._finished(self._requests.pop(one.state.request_id).end())
        if self._seconds is not None:
            self.common.count_loss(self._seconds[self._drafted], self._decoding + accepted, self.common.passes)
        transformers_batching.move_slots(self._cache, moves)
        return last, last_logprobs if self._processor.return_logprobs else None

    def _pass_states_on(self, steps: Sequence[int]) -> None:
        """Give each request the hidden states of its tokens; those of the output matrix are of the logit rows alone."""
        tokens = [one.query_length for one, _ in self._step]
        parts = [states.split(tokens if states.shape[1] == sum(tokens) else steps, dim=1) for states in self._states]
        for number, (_, request) in enumerate(self._step):
            request.target.process([part[number] for part in parts], steps[number])
        self._states = []

    def _roll_back(self, one: Any, request: Request, kept: int, moves: Moves) -> None:
        """Set the position of a request back to the tokens that are kept; count the blocks that these complete.

        Adds the slots of accepted nodes to `moves`, by kind of attention, from which to which.
        """
        nodes, path = request.tree.nodes, request.target.path
        request.tree = DraftTree.empty(1)
        if not nodes:
            return
        one.state.position_offset -= 1 + nodes
        if path != list(range(len(path))):
            for kind, (sources, destinations) in moves.items():
                slots = self._allocators[kind].get_write_indices(
                    one.state.request_id, one.state.position_offset, 1 + nodes
                )
                sources += [slots[1 + node] for node in path]
                destinations += slots[1 : 1 + len(path)]
        one.complete_blocks = self._cache.count_new_complete_blocks(one.state, kept)
        one.state.position_offset += kept

    def close(self) -> None:
        """End the sessions of requests that were not finished."""
        for request in self._requests.values():
            request.end()
        self._requests.clear()
        self.common.close()
