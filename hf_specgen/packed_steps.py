"""Speculation in the packed steps of continuous batching: draft, verify and roll back chains of draft tokens.

Transformers packs the tokens of all running requests into one row of a forward pass, over a paged cache. A request
that decodes has one token in it; any number is legal, as in a chunked prefill. So its draft follows that token, the
logits of all of these positions are computed, and the position of the request is set back over rejected tokens, whose
slots are written again in the next step. Blocks that other requests may share consist of accepted tokens only.

All drafts compete for one budget: draft tokens join the step in descending order of their path probability for as long
as they raise the expected tokens per second, by the latency of the target.

Source: Yu et al., "Orca" (2022), for batches that requests join and leave at every step; Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023), for the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Call
from hf_specgen.candidates.base import ChainSession, DraftCall
from hf_specgen.counters import Statistics, StepRecord
from hf_specgen.depth.adaptive import AdaptiveSession
from hf_specgen.generate import Settings
from hf_specgen.state import GenerationState
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.support import position_table
from hf_specgen.tree import DraftTree
from hf_specgen.verification import CoupledVerifier, VerificationResult
from hf_specgen.verification.base import check_sampled
from hf_specgen.verification.result import accepted_path
from hf_specgen.verification.sampling import argmax
from hf_specgen.verification.top_tokens import TopTokens

ASSUMED_ACCEPTANCE = 0.6
"""Of each token of a strategy that estimates nothing."""
Floats = NDArray[np.float64]


def best_count(gains: Sequence[float], emitted: int, seconds: Floats) -> int:
    """How many draft tokens give the most expected tokens per second; 0 unless that is 2% faster than none.

    Args:
        gains: path probabilities of the draft tokens, in descending order.
        emitted: tokens of a step without drafts.
        seconds: `[1 + len(gains)]` of a step with so many draft tokens.

    Example:
        >>> best_count([0.9, 0.8, 0.1], emitted=2, seconds=1 + 0.2 * np.arange(4))
        2
    """
    rates = (emitted + np.cumsum([0.0, *gains])) / seconds
    best = int(rates.argmax())
    return best if rates[best] > 1.02 * rates[0] else 0


class RequestDraft:
    """A request: its text, its sessions, and its draft in the current step.

    Attributes:
        proposed: the draft of the session.
        draft: the draft tokens that are verified in this step, the first ones of it.
    """

    def __init__(self, state: Any, model: PreTrainedModel, config: GenerationConfig, settings: Settings, seed: int):
        tokens = state.initial_tokens + state.generated_tokens
        length = compat.prompt_of_request(state)
        limit = float("inf") if state.max_new_tokens is None else len(state.initial_tokens) + state.max_new_tokens
        text = GenerationState(torch.tensor([tokens[:length]]), None, compat.end_tokens(state), limit)
        text.append(0, tokens[length:])
        call = Call(model, text, config, settings.candidates.settings(), remembers=settings.memory, seed=seed)
        self.text, self.verification = text, CoupledVerifier().start(call)
        self.policy = (settings.policy or settings.candidates.policy).start(call)
        arguments = {**vars(call), "verification": self.verification}
        self.session = ChainSession(settings.candidates.start(DraftCall(**arguments)))
        self.statistics, self._without_step = Statistics([[]]), len(tokens) - length
        self.proposed, self.draft, self._has_proposed = DraftTree.empty(1), list[int](), False

    @property
    def is_adaptive(self) -> bool:
        """Whether the budget of the step decides how much is verified, and not a policy."""
        return isinstance(self.policy, AdaptiveSession)

    def propose(self, limit: int, requests: int) -> None:
        """Draft, at most `limit` tokens deep; of `requests` that decode."""
        self.text.other_rows, self._has_proposed = requests - 1, True
        depth = limit if self.is_adaptive else self.policy.depths([limit])[0]
        self.proposed = self.session.draft([max(0, min(depth, limit, self.session.call.drafting.k))])

    def gains(self) -> Sequence[float]:
        """What ranks each proposed token: its path probability, or 1 if a policy has chosen the depth."""
        if not self.is_adaptive:
            return [1.0] * self.proposed.nodes
        if self.proposed.probability:
            return self.proposed.probability[0]
        return [ASSUMED_ACCEPTANCE**depth for depth in range(1, 1 + self.proposed.nodes)]

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """`[tokens]` samples from the `[tokens, vocab]` scores after the last token and the draft."""
        first, tree = len(self.text.generated[0]), DraftTree.chains([self.draft])
        steps, nodes = [range(first, first + len(scores))], [range(-1, len(self.draft))]
        return self.verification.choose(scores[None], steps, tree, nodes)[0]

    def commit(self, chosen: Sequence[int], top_tokens: TopTokens | None) -> list[int]:
        """Append the accepted draft tokens and the token after them; returns what was appended."""
        tree, is_first = DraftTree.chains([self.draft]), not self.text.generated[0]
        path, tokens = accepted_path(self.draft, tree.parents[0], chosen)
        check_sampled(tokens)
        tokens = tokens[: self.text.append(0, tokens)]
        self.verification.confirm(len(self.text.generated[0]))
        result = VerificationResult(
            [path[: len(tokens) - 1]], [tokens], [min(len(path), len(tokens))], top_tokens=top_tokens
        )
        if self._has_proposed or self.session.top_tokens:
            self.session.observe(result)
        rows = self.statistics.record(tree, result, is_prefill=is_first)
        if is_first:
            self._without_step = 1
        else:
            requested, passes = [self.proposed.nodes], self.session.passes
            self.policy.observe(StepRecord(requested, rows, 1 + tree.nodes, {}, passes))
        self.proposed, self.draft, self._has_proposed = DraftTree.empty(1), [], False
        return tokens

    def end(self) -> Statistics:
        """End the sessions; the counters of the request."""
        self.session.end()
        length = len(self.text.generated[0])
        self.verification.end(length)
        self.statistics.finish([length], [self._without_step])
        return self.statistics


class PackedSteps:
    """Extends, samples and reads the packed steps of one batch processor; called by its thread alone.

    Args:
        processor: of Transformers' continuous batching.
        seed: request ``req_<i>`` is sampled as `torch.manual_seed(seed + i)` and `generate` would sample it alone.
        finished: receives the counters of every request that has ended.
    """

    def __init__(
        self,
        processor: Any,
        model: PreTrainedModel,
        config: GenerationConfig,
        settings: Settings,
        seed: int,
        finished: Callable[[Statistics], None],
    ):
        self._processor, self._model, self._config, self._settings = processor, model, config, settings
        self._seed, self._finished = seed, finished
        self._requests: dict[str, RequestDraft] = {}
        self._tokens = 0
        windows = [getattr(part, "sliding_window", None) for part in processor.cache.cache_allocators.values()]
        self._positions = min(position_table(text_config(model)), *(window for window in windows if window), 2**31)

    def extend(self, scheduled: Sequence[Any], tokens: int, token_budget: int, cached: int) -> int:
        """Add draft tokens to the requests of a scheduled step; returns how many.

        Args:
            scheduled: Transformers' `FutureRequestState` of each request in the step.
            tokens: in the step so far.
            token_budget: tokens of the step at most.
            cached: tokens that the step reads from the cache.
        """
        self._drop_cancelled()
        self._tokens = tokens
        decoding = [one for one in scheduled if one.has_new_token and one.state.generated_tokens]
        drafts = [self._request(one.state) for one in decoding]
        for one, draft in zip(decoding, drafts, strict=True):
            # Slots of a sliding window are written in turn: one that a rejected token has overwritten would be lost.
            limit = min(draft.text.remaining(0) - 1, self._positions - 1 - one.state.position_offset)
            draft.propose(int(max(0, limit)), len(decoding))
        emitted = sum(one.has_new_token for one in scheduled)
        for one, draft, count in zip(
            decoding, drafts, self._counts(drafts, emitted, token_budget, cached), strict=True
        ):
            if count and self._has_slots(one.state, 1 + count):
                draft.draft = draft.proposed.token_lists()[0][:count]
                one.state.tokens_to_process = one.state.tokens_to_process + draft.draft
                one.query_length += count
                self._tokens += count
        return self._tokens - tokens

    def _request(self, state: Any) -> RequestDraft:
        if state.request_id not in self._requests:
            seed = (self._seed + compat.request_number(state)) % 2**63
            self._requests[state.request_id] = RequestDraft(state, self._model, self._config, self._settings, seed)
        return self._requests[state.request_id]

    def _counts(self, drafts: Sequence[RequestDraft], emitted: int, token_budget: int, cached: int) -> list[int]:
        """How many draft tokens of each request are verified: the most probable ones of all requests together."""
        ranked = [(gain, number) for number, draft in enumerate(drafts) for gain in draft.gains()]
        ranked = sorted(ranked, key=lambda one: -one[0])[: max(0, token_budget - self._tokens)]
        if drafts and drafts[0].is_adaptive:
            latency = drafts[0].policy.latency  # of one request's share
            assert latency is not None
            target = latency.at(1, max(1, cached // len(drafts))).target
            sizes = range(self._tokens, self._tokens + len(ranked) + 1)
            seconds = np.array([target.seconds_of(size / len(drafts)) for size in sizes])
            ranked = ranked[: best_count([gain for gain, _ in ranked], emitted, seconds)]
        taken = Counter(number for _, number in ranked)
        return [taken[number] for number in range(len(drafts))]

    def _has_slots(self, state: Any, tokens: int) -> bool:
        """Allocate the slots of a request in the step, unless other running requests may need the last free ones."""
        cache, scheduler = self._processor.cache, self._processor.scheduler
        if cache.pool.num_free_sectors < len(scheduler.active_requests):
            length = state.current_len()
            parts = cache.cache_allocators.values()
            if any(part.needs_new_blocks(state.request_id, length, tokens) for part in parts):
                return False
        return bool(cache.can_store_request_tokens(state, tokens))

    def logit_rows(self, scheduled: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """The positions in the step after which tokens are chosen, and the request of each."""
        positions, requests, end = list[int](), list[Any](), 0
        for one in scheduled:
            end += one.query_length
            if one.has_new_token:
                draft = len(self._request(one.state).draft)
                positions += range(end - 1 - draft, end)
                requests += [one] * (1 + draft)
        return positions, requests

    def sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Choose a token from each row of the processed scores, `[1, rows, vocab]`; they are read in `commit`."""
        self._scores = scores[0]

    def commit(self, scheduled: Sequence[Any]) -> tuple[list[int], list[float] | None]:
        """Verify; returns the last new token of each request, and its logarithmic probability if asked for.

        The tokens before it are appended to the requests, whose positions are set back over rejected ones.
        """
        decided = [one for one in scheduled if one.has_new_token]
        drafts = [self._request(one.state) for one in decided]
        sizes = [1 + len(draft.draft) for draft in drafts]
        chosen = self._chosen(drafts, sizes).split(sizes) if sizes else ()
        logprobs = self._logprobs(torch.cat(chosen)).split(sizes) if self._processor.return_logprobs and sizes else None
        tops = self._top_tokens(decided, drafts, sizes)
        last, last_logprobs = list[int](), list[float]()
        for number, (one, draft) in enumerate(zip(decided, drafts, strict=True)):
            tokens = draft.commit(chosen[number].tolist(), tops[number])
            values: list[Any] = [None] * len(tokens)
            if logprobs is not None:
                values = logprobs[number].tolist()[: len(tokens)]
            for token, value in zip(tokens[:-1], values[:-1], strict=True):
                one.state.update_and_check_completion(token, value)
            self._roll_back(one, sizes[number], len(tokens))
            last.append(tokens[-1])
            if logprobs is not None:
                last_logprobs.append(values[-1])
            if draft.text.has_ended(0):
                self._finished(self._requests.pop(one.state.request_id).end())
        return last, None if logprobs is None else last_logprobs

    def _roll_back(self, one: Any, verified: int, kept: int) -> None:
        """Set the position of a request back to the tokens that are kept; count the blocks that these complete."""
        if verified > 1:
            state = one.state
            state.position_offset -= verified
            one.complete_blocks = self._processor.cache.count_new_complete_blocks(state, kept)
            state.position_offset += kept

    def _chosen(self, drafts: Sequence[RequestDraft], sizes: Sequence[int]) -> torch.Tensor:
        """`[rows]` the target's choices."""
        if not self._config.do_sample:
            return argmax(self._scores).cpu()
        parts = zip(drafts, self._scores.split(list(sizes)), strict=True)
        return torch.cat([draft.chosen(scores) for draft, scores in parts]).cpu()

    def _logprobs(self, chosen: torch.Tensor) -> torch.Tensor:
        values = self._scores.softmax(dim=-1).gather(1, chosen.to(self._scores.device)[:, None])
        return values[:, 0].log().cpu()

    def _top_tokens(
        self, decided: Sequence[Any], drafts: Sequence[RequestDraft], sizes: Sequence[int]
    ) -> list[TopTokens | None]:
        """Of each request the most likely tokens after every input token, where its session reads them."""
        count = max((draft.session.top_tokens for draft in drafts), default=0)
        if not count:
            return [None] * len(drafts)
        read = [[draft.text.last_token(0), *draft.draft] for draft in drafts]
        return list(TopTokens.of_rows(self._scores, read, count))

    def _drop_cancelled(self) -> None:
        scheduler = self._processor.scheduler
        for name in [name for name in self._requests if scheduler.request_is_cancelled(name)]:
            self._finished(self._requests.pop(name).end())

    def close(self) -> None:
        """End the sessions of requests that were not finished."""
        for name in list(self._requests):
            self._requests.pop(name).end()
