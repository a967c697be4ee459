"""Measures the latency profile of a target and a strategy in advance, instead of learning it from the first calls.

Two kinds of calls are timed in the decoding loop. In the first, a strategy that proposes arbitrary tokens makes the
target verify drafts of every size; in the second, the strategy itself drafts at every depth. Both pass their steps to
the recorder that estimates latencies in ordinary calls, so both kinds of profiles have the same content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Call
from hf_specgen.candidates.base import Candidates, DraftCall, DraftSession
from hf_specgen.candidates.tree_shape import MAX_NODES
from hf_specgen.counters import StepRecord
from hf_specgen.depth import profiles
from hf_specgen.depth.latency import LatencyModel, Slice, slice_of
from hf_specgen.depth.policy import Policy, PolicySession
from hf_specgen.depth.recorder import GRID, MEDIAN_WINDOW, LatencyRecorder
from hf_specgen.tree import DraftTree

PATTERN = 32
"""Length of the random sequence that prompts repeat, so that n-grams find matches in them."""
DRAFTING_CALLS = 3
"""Calls in which the strategy drafts: the first is a warm-up, the others measure its prefill."""


def measure_profile(
    model: PreTrainedModel, candidates: Candidates, *, rows: Sequence[int] = (1,), context: int = 256, sample: bool
) -> str:
    """Measure the latency profile of a strategy on a target, and store it in the cache directory.

    Args:
        model: the target.
        candidates: the strategy, as it will be used.
        rows: numbers of rows to measure at.
        context: prompt tokens in each row.
        sample: whether tokens are sampled; sampled and greedy calls have separate profiles.

    Returns:
        The key of the profile, for `hf_specgen.depth.profiles`.

    Raises:
        ValueError: if a number is out of range, or the strategy does not fit the target.
    """
    kind = str(candidates.profile_key()[0])
    slices = {}
    for count in rows:
        found = measure_slice(model, candidates, rows=count, context=context, sample=sample)
        slices[found.target.batch, found.target.context] = found
    description = profiles.describe(model, candidates.profile_key(), sample)
    return profiles.save(description, LatencyModel(tuple(slices.values()), kind))


def measure_slice(model: PreTrainedModel, candidates: Candidates, *, rows: int, context: int, sample: bool) -> Slice:
    """Measure latencies at one number of rows and one context length; the arguments are those of `measure_profile`."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    for name, value in (("rows", rows), ("context", context)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    largest = MAX_NODES if candidates.adaptive_tree else candidates.k
    depths = [size - 1 for size in GRID if size <= largest + 1]
    steps = (MEDIAN_WINDOW + 1) * len(depths)
    if context + steps > limit:
        raise ValueError(f"a context of {context} and {steps} steps need more than the model's {limit} positions")
    kind, negligible = str(candidates.profile_key()[0]), candidates.negligible_draft_cost
    place = slice_of(rows, context)
    prior = LatencyModel.default(compat.input_device(model).type, kind, negligible).at(*place)
    recorder = LatencyRecorder(*place, prior, measured=False)
    prompt = _prompt(model, rows, context)
    arguments: dict[str, Any] = {**prompt, "do_sample": sample, "max_new_tokens": steps, "eos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = _DepthSweep(depths, recorder, target_only=True)
        cast(Any, model).generate(**arguments, candidate_generator=_ArbitraryTokens(largest), policy=policy)
        drafted = [depth for depth in depths if 0 < depth <= candidates.k]
        for _ in range(DRAFTING_CALLS):
            policy = _DepthSweep(drafted, recorder, target_only=False)
            cast(Any, model).generate(**arguments, candidate_generator=candidates, policy=policy)
    latency = recorder.estimate()
    return Slice(latency.target, {kind: latency.drafter})


def _prompt(model: PreTrainedModel, rows: int, context: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[rows, context]`: a random sequence, repeated."""
    vocabulary = model.config.get_text_config().vocab_size
    pattern = torch.randint(vocabulary, (rows, PATTERN), generator=torch.Generator().manual_seed(0))
    ids = pattern.repeat(1, -(-context // PATTERN))[:, :context].to(compat.input_device(model))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class _DepthSweep(Policy):
    """Cycles through draft depths, and passes the times of all steps to a recorder.

    Args:
        depths: the depths, in order.
        recorder: receives the steps.
        target_only: whether to leave out the times of drafting.
    """

    def __init__(self, depths: Sequence[int], recorder: LatencyRecorder, target_only: bool):
        self.depths, self.recorder, self.target_only = tuple(depths), recorder, target_only

    def start(self, call: Call) -> PolicySession:
        return _DepthSweepSession(self, max(map(len, call.state.prompts)))


class _DepthSweepSession(PolicySession):
    def __init__(self, policy: _DepthSweep, prompt: int):
        self._policy, self._depths, self._unread = policy, cycle(policy.depths), prompt

    def depths(self, room: Sequence[int]) -> list[int]:
        return [next(self._depths)] * len(room)

    def observe(self, step: StepRecord) -> None:
        drafts = any(step.requested)
        if self._policy.target_only:
            seconds = {part: value for part, value in step.seconds.items() if part != "draft"}
            step = replace(step, requested=[0] * len(step.requested), seconds=seconds)
        self._policy.recorder.add(step, self._unread)
        self._unread = 0 if drafts else self._unread + 1


class _ArbitraryTokens(Candidates):
    """Drafts repetitions of each row's last token, nearly all of which are rejected."""

    def __init__(self, k: int):
        super().__init__(k)

    def start(self, call: DraftCall) -> DraftSession:
        return _ArbitrarySession(call)


class _ArbitrarySession(DraftSession):
    def draft(self, budget: Sequence[int]) -> DraftTree:
        pending = self.call.state.pending()
        return DraftTree.chains([[token] * depth for token, depth in zip(pending, budget, strict=True)])
