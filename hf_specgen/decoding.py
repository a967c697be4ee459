"""The speculative decoding loop: propose, score, verify, commit. A step emits 1 to `1 + draft depth` tokens per row.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Miao et al.,
"SpecInfer" (2023), section 4, for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.call import Call
from hf_specgen.candidates.base import Candidates, ChainSession, DraftCall
from hf_specgen.candidates.grammar import with_grammar
from hf_specgen.counters import RowStep, Statistics, StepRecord
from hf_specgen.depth import Policy, PolicySession
from hf_specgen.depth.latency import LatencyModel
from hf_specgen.monitoring import Monitor, MonitorSession
from hf_specgen.outputs import OutputCollector, Padding
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.requirements import check_computation, make_target
from hf_specgen.targets.support import check_length
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, Verifier
from hf_specgen.verification.result import TopTokens

UNLIMITED = 2**31
"""Draft tokens of a row that no position table limits."""
STEP_PARTS = ("draft", "forward", "verify")
"""Parts of a call's wall time that make up the latency of a step."""


def speculative_decode(
    call: Call,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    *,
    candidates: Candidates,
    verifier: Verifier,
    policy: Policy,
    monitor: Monitor | None = None,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None = None,
    on_start: Callable[[Statistics], None] | None = None,
) -> Any:
    """Generate as plain `generate` does, several tokens per forward pass of the target.

    `input_ids` `[batch, prompt]` (left-padded), `model_kwargs` and `criteria` are as prepared by `generate`. `on_start`
    receives the statistics of the call once everything has been checked, before the first forward pass. Returns
    `[batch, prompt + generated]` ids, or a `SpeculativeOutput` with `return_dict_in_generate=True`.
    """
    assert call.model is not None
    outputs = OutputCollector(call, criteria, streamer)
    with compat.without_compilation(call.model), ExitStack() as stack:
        target = checked_target(call, candidates, input_ids, model_kwargs)
        loop = DecodingLoop(call, target, outputs, candidates, verifier, policy, monitor, stack)
        if on_start is not None:
            on_start(loop.statistics)
        loop.prefill()
        with compat.optimized_for_decoding(call.model):
            loop.decode()
            output = loop.complete()
    if streamer is not None:
        streamer.end()
    candidates.speculation = loop.statistics
    return output


def checked_target(call: Call, candidates: Candidates, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Target:
    """The target of a call; `ValueError` for a model that cannot speculate."""
    model = call.model
    assert model is not None
    requirements = candidates.target_requirements(model)
    check_computation(model, requirements, input_ids, call.config, model_kwargs)
    target = make_target(requirements, model, input_ids, call.config, model_kwargs, call.compiled)
    check_length(model, target.first_positions, call.max_new_tokens)
    return target


class DecodingLoop:
    """Runs the steps of one call, with the target and the sessions of drafter, verifier, policy and monitor."""

    def __init__(
        self,
        call: Call,
        target: Target,
        outputs: OutputCollector,
        candidates: Candidates,
        verifier: Verifier,
        policy: Policy,
        monitor: Monitor | None,
        stack: ExitStack,
    ):
        """Start the sessions, which end when `stack` closes, also after an exception."""
        self.timer, self.target = StepTimer(), target
        self.state, self.outputs, self._candidates = call.state, outputs, candidates
        self.statistics = Statistics([[] for _ in range(call.state.batch)], strategy=call.drafting.name)
        self.verification = verifier.start(call)
        stack.callback(lambda: self.verification.end(outputs.columns))
        depth = policy.start(call)
        monitoring = None if monitor is None else monitor.start(call)
        if monitoring is not None:
            stack.callback(monitoring.end)
        self.policy = PolicyRunner(call, self.target, depth, monitoring, self.timer, self.statistics)
        draft_call = DraftCall.of(call, self.target, self.verification, depth)
        self.drafter = candidates.start(draft_call)
        if call.logits_processor:
            self.drafter = with_grammar(self.drafter, draft_call, candidates.tree)
        if self.target.verifies_chains_only:
            self.drafter = ChainSession(self.drafter)
        stack.callback(self.drafter.end)
        self.padding = Padding(call, self.target, self.verification, outputs)

    def prefill(self) -> None:
        """Run the prompt through the target, and choose the first tokens."""
        with self.timer.part("prefill"):
            logits = self.target.prefill()
        self.end_prefill(logits)

    def end_prefill(self, logits: torch.Tensor) -> None:
        """Choose the first tokens by the logits after the prompt, `[batch, 1, vocab]`."""
        with self.timer.part("verify"):
            result = self._verify(DraftTree.empty(self.state.batch), logits, [True] * self.state.batch)
            self._commit(result)
        if self.drafter.top_tokens:
            self.drafter.observe(result)
        if not self.state.all_stopped:
            self.policy.prefilled()

    def decode(self) -> None:
        """Run steps until every row has stopped."""
        state = self.state
        while not state.all_stopped:
            self.plan_step()
            tree = self.draft_step()
            with self.timer.part("forward"):
                logits = self.target.forward(tree, state.pending(), self._active)
            self.end_step(tree, logits)
            if state.batch > 1 and not self.padding.is_visible:
                self.target.drop_rows([not state.has_ended(row) for row in range(state.batch)])

    def plan_step(self, may_draft: bool = True) -> None:
        """Choose how deep the rows draft in the next step."""
        self._active = self._active_rows()
        self._max_depths = self._depths(self._active if may_draft else [False] * self.state.batch)
        with self.timer.part("draft"):
            self.drafter.plan(self._max_depths)

    def draft_step(self) -> DraftTree:
        """The draft that was planned."""
        with self.timer.part("draft"):
            return self.drafter.draft(self._max_depths)

    def end_step(self, tree: DraftTree, logits: torch.Tensor) -> None:
        """Verify a draft by the logits of a step, and report the outcome to the sessions."""
        with self.timer.part("verify"):
            result = self._verify(tree, logits, self._active)
            self._commit(result)
        self.drafter.observe(result)
        rows = self.statistics.record(tree, result)
        with self.timer.part("policy"):
            self.policy.observe(tree, rows, self.drafter.passes)

    def complete(self) -> Any:
        """Complete the statistics, cache and scores of a call whose rows have stopped; returns its output."""
        self.finished_statistics()
        self.padding.process_rest()
        cache = self.target.finish() if self.padding.is_visible else None
        return self.outputs.returned(self.statistics, cache)

    def finished_statistics(self) -> Statistics:
        """The statistics of a call, completed."""
        lengths = [len(tokens) for tokens in self.state.generated]
        self.statistics.finish(lengths)
        self.statistics.seconds = self.timer.stop()
        return self.statistics

    def _depths(self, active: Sequence[bool]) -> list[int]:
        """How deep the active rows draft, by the policy."""
        with self.timer.part("policy"):
            may_draft = [False] * len(active) if self.padding.needs_plain_steps else active
            return self.policy.max_depths(may_draft, self._candidates.k)

    def _verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Which draft tokens are accepted, and which token follows them."""
        result = self.verification.verify(tree, logits, active)
        if self.drafter.top_tokens:
            pending = [self.state.last_token(row) for row in range(self.state.batch)]
            result.top_tokens = TopTokens.of_step(logits, tree, pending, active, self.drafter.top_tokens)
        return result

    def _commit(self, result: VerificationResult) -> None:
        """Append the tokens to the rows, roll the cache back to the accepted ones, and emit complete columns."""
        for row, tokens in enumerate(result.tokens):
            self.state.append(row, tokens)
        self.target.commit(result.paths)
        self.outputs.add(result)
        self.verification.confirm(self.outputs.columns)

    def _active_rows(self) -> list[bool]:
        """Rows that take part in the next step: not ended, and within the allowed row skew of the emitted columns."""
        furthest = self.outputs.columns + min(self.verification.max_row_skew(), self.target.max_row_skew)
        return [
            not self.state.has_ended(row) and len(tokens) < furthest for row, tokens in enumerate(self.state.generated)
        ]


class PolicyRunner:
    """Limits the depths of a policy to what each row can use; reports steps to the policy and to a monitor."""

    def __init__(
        self,
        call: Call,
        target: Target,
        session: PolicySession,
        monitor: MonitorSession | None,
        timer: StepTimer,
        statistics: Statistics,
    ):
        self._call, self._target, self._timer, self._statistics = call, target, timer, statistics
        self._session, self._monitor = session, monitor
        self._requested: list[int] = []

    def max_depths(self, may_draft: Sequence[bool], k: int) -> list[int]:
        """The maximum draft depth of each row in this step."""
        limits = self._max_draft_tokens(may_draft)
        depths = self._session.depths(limits)
        if len(depths) != len(limits):
            raise ValueError(
                f"{self._session!r} returned {len(depths)} depths for {len(limits)} rows; return one per row"
            )
        self._requested = [max(0, min(depth, limit, k)) for depth, limit in zip(depths, limits, strict=True)]
        return self._requested

    def _max_draft_tokens(self, may_draft: Sequence[bool]) -> list[int]:
        """How many draft tokens each row can use before its last token, the last position and the last cache slot."""
        state, target = self._call.state, self._target
        columns = state.prompt_length + max(map(len, state.generated))
        if columns + MAX_DRAFT_SLOTS > target.slot_limit:
            return [0] * state.batch
        limits = []
        for row, tokens in enumerate(state.generated):
            pending = target.first_positions[row] + len(tokens) - 1
            positions = target.last_position - pending if pending <= target.last_position else UNLIMITED
            most = min(state.remaining(row) - 1, positions)
            limits.append(int(max(0, most)) if may_draft[row] else 0)
        return limits

    @property
    def pass_latency(self) -> LatencyModel | None:
        """The latencies of whole passes, if the policy has any."""
        return self._session.known

    def prefilled(self) -> None:
        """Let the policy measure the target's latency, unless the target's slots are few."""
        if self._call.context_length + MAX_DRAFT_SLOTS <= self._target.slot_limit:
            with self._timer.part("policy"):
                self._session.prefilled(self._target)

    def observe(self, tree: DraftTree, rows: list[RowStep | None], drafter_passes: Sequence[int] | None) -> None:
        """Report a step, and count its forward passes."""
        passes = None if drafter_passes is None else tuple(drafter_passes)
        seconds, context = self._timer.step_seconds(), self._call.context_length
        step = StepRecord(self._requested, rows, 1 + tree.nodes, seconds, passes, context)
        self._session.observe(step)
        if self._monitor is not None:
            self._monitor.observe(step)
        self._statistics.passes.append(step)


class StepTimer:
    """Measures the wall time of a call by part, in `seconds`."""

    def __init__(self) -> None:
        self._started = perf_counter()
        self.seconds = dict.fromkeys(("prefill", *STEP_PARTS, "policy"), 0.0)
        self._step: dict[str, float] = {}
        self._part, self._began = "draft", 0.0

    def part(self, name: str) -> StepTimer:
        """A context whose time is added to a part; parts do not contain each other."""
        self._part = name
        return self

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.add(self._part, perf_counter() - self._began)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        self.seconds[part] += seconds
        if part in STEP_PARTS:
            self._step[part] = self._step.get(part, 0.0) + seconds

    def step_seconds(self) -> dict[str, float]:
        """Seconds of each part since the last call of this method."""
        seconds, self._step = self._step, {}
        return seconds

    def stop(self) -> dict[str, float]:
        """The seconds of all parts, and of the call in `total`."""
        self.seconds["total"] = perf_counter() - self._started
        return self.seconds
