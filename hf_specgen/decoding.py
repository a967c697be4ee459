"""The speculative decoding loop: propose, score, verify, commit. A step emits 1 to `1 + draft depth` tokens per row.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Miao et al.,
"SpecInfer" (2023), section 4, for trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.call import Call
from hf_specgen.call_statistics import Statistics, StepRecord
from hf_specgen.candidates.base import ChainSession, checked_draft
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.grammar import with_grammar
from hf_specgen.outputs import OutputCollector
from hf_specgen.settings import Settings
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.inputs import UNLIMITED
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.criteria import CustomCriteria
from hf_specgen.verification.result import TopTokens

STEP_PARTS = ("draft", "forward", "verify")
"""Parts of a call's wall time that make up the latency of a step."""


class DecodingLoop:
    """Runs the steps of one call, with the target and the sessions of drafter, verifier, policy and monitor."""

    _vocabulary = UNLIMITED
    """How many tokens the target chooses from, once a pass has shown it."""

    def __init__(
        self,
        call: Call,
        target: Target,
        settings: Settings,
        stack: ExitStack,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
    ):
        """Start the sessions, which end when `stack` closes, also after an exception."""
        self.call = call
        self.state = call.state
        self.target = target
        self.timer = StepTimer()
        self._max_depth = settings.candidates.k
        self.statistics = Statistics([[] for _ in range(call.state.batch)], strategy=call.drafting.name)
        self._criteria = CustomCriteria(criteria, call)
        self.verification = settings.verifier.start(call)
        self.outputs = OutputCollector(call, target, self.verification.processors, self._criteria, streamer)
        stack.callback(lambda: self.verification.end(self.outputs.columns))
        self.policy = settings.policy.start(call)
        self._monitor = None if settings.monitor is None else settings.monitor.start(call)
        if self._monitor is not None:
            stack.callback(self._monitor.end)
        self.drafter = settings.candidates.start(DraftBatch(call, target, self.verification, self.policy))
        if call.logits_processor:
            self.drafter = with_grammar(self.drafter, settings.candidates.tree)
        if target.verifies_chains_only:
            self.drafter = ChainSession(self.drafter)
        stack.callback(self.drafter.end)

    def run(self) -> Any:
        """Generate as plain `generate` does, several tokens per forward pass of the target; returns its output."""
        self.prefill()
        assert self.call.model is not None
        with compat.optimized_for_decoding(self.call.model):
            self.decode()
            return self.outputs.returned(self.finished_statistics())

    def prefill(self) -> None:
        """Run the prompt through the target, and choose the first tokens."""
        with self.timer.part("prefill"):
            logits = self.target.prefill()
        self.end_prefill(logits)

    def end_prefill(self, logits: torch.Tensor) -> None:
        """Choose the first tokens by the logits after the prompt, `[batch, 1, vocab]`."""
        result = self._verify(DraftTree.empty(self.state.batch), logits, [True] * self.state.batch)
        if self.drafter.top_tokens:
            self.drafter.observe(result)
        # The policy may measure the target's latency, unless too few cache slots are left.
        if not self.state.all_stopped and self.call.context_length + MAX_DRAFT_SLOTS <= self.target.slot_limit:
            with self.timer.part("policy"):
                self.policy.prefilled(self.target)

    def decode(self) -> None:
        """Run steps until every row has stopped."""
        state = self.state
        while not state.all_stopped:
            self.plan_step()
            tree = self.draft_step()
            with self.timer.part("forward"):
                logits = self.target.forward(tree, state.pending(), self._active)
            self.end_step(tree, logits)
            if state.batch > 1 and not self.outputs.shows_padding:
                self.target.drop_rows([not state.has_ended(row) for row in range(state.batch)])

    def plan_step(self, may_draft: bool = True) -> None:
        """Choose how deep the rows draft in the next step."""
        # Rows that have not ended, and are within the allowed row skew of the emitted columns.
        furthest = self.outputs.columns + min(self.verification.max_row_skew(), self.target.max_row_skew)
        texts = enumerate(self.state.generated)
        self._active = [not self.state.has_ended(row) and len(tokens) < furthest for row, tokens in texts]
        drafts = may_draft and not self.outputs.needs_plain_steps
        with self.timer.part("policy"):
            self.max_depths = self._depths(self._active if drafts else [False] * self.state.batch)
        with self.timer.part("draft"):
            self.drafter.plan(self.max_depths)

    def draft_step(self) -> DraftTree:
        """The draft that was planned."""
        with self.timer.part("draft"):
            return checked_draft(self.drafter.draft(self.max_depths), self.call, self._vocabulary)

    def end_step(self, tree: DraftTree, logits: torch.Tensor) -> None:
        """Verify a draft by the logits of a step, and report the outcome to the sessions."""
        result = self._verify(tree, logits, self._active)
        self.drafter.observe(result)
        rows, passes = self.statistics.record(tree, result), self.drafter.passes
        with self.timer.part("policy"):
            seconds, self.timer.step = self.timer.step, {}
            passes, context = None if passes is None else tuple(passes), self.call.context_length
            shape = self.target.pass_shape(1 + tree.nodes)
            step = StepRecord(self.max_depths, rows, shape[1], seconds, passes, context, shape[0])
            self.policy.observe(step)
            if self._monitor is not None:
                self._monitor.observe(step)
            self.statistics.passes.append(step)

    def finished_statistics(self) -> Statistics:
        """The statistics of a call, completed."""
        self.statistics.finish([len(tokens) for tokens in self.state.generated])
        self.statistics.seconds = {**self.timer.seconds, "total": perf_counter() - self.timer.started}
        return self.statistics

    def _depths(self, may_draft: Sequence[bool]) -> list[int]:
        """How deep the rows draft: as the policy chooses, within what each row can use."""
        limits = self._max_draft_tokens(may_draft)
        depths = self.policy.depths(limits)
        if len(depths) != len(limits):
            raise ValueError(
                f"{self.policy!r} returned {len(depths)} depths for {len(limits)} rows; return one per row"
            )
        return [max(0, min(depth, limit, self._max_depth)) for depth, limit in zip(depths, limits, strict=True)]

    def _max_draft_tokens(self, may_draft: Sequence[bool]) -> list[int]:
        """How many draft tokens each row can use before its last token, the last position and the last cache slot."""
        state, target = self.state, self.target
        columns = state.prompt_length + max(map(len, state.generated))
        if columns + MAX_DRAFT_SLOTS > target.slot_limit:
            return [0] * state.batch
        limits = []
        for row, tokens in enumerate(state.generated):
            pending = target.first_positions[row] + len(tokens) - 1
            positions = target.last_position - pending if pending <= target.last_position else UNLIMITED
            most = min(state.remaining(row) - 1, positions, target.max_draft_tokens)
            limits.append(int(max(0, most)) if may_draft[row] else 0)
        return limits

    def _verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Append accepted draft tokens and what follows, roll the cache back to them, and emit complete columns."""
        self._vocabulary = logits.shape[-1]
        with self.timer.part("verify"):
            result = self.verification.verify(tree, logits, active, self._criteria)
            if result is None:
                tree, logits = DraftTree.empty(tree.batch), self.target.forward_again(self.state.pending(), active)
                result = self.verification.verify(tree, logits, active, self._criteria)
            assert result is not None, "a step without a draft"
            if self.drafter.top_tokens:
                pending, count = self.state.pending(), self.drafter.top_tokens
                result.top_tokens = TopTokens.of_step(logits, tree, pending, active, count)
            for row, tokens in enumerate(result.tokens):
                self.state.append(row, tokens)
            self.target.commit(result.paths)
            self.outputs.add(result)
            self.verification.confirm(self.outputs.columns)
        return result


class StepTimer:
    """Measures the wall time of a call by part, in `seconds`, and of the parts of a step, in `step`."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.seconds = dict.fromkeys(("prefill", *STEP_PARTS, "policy"), 0.0)
        self.step: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context whose time is added to a part; parts do not contain each other."""
        began = perf_counter()
        yield
        self.add(name, perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        self.seconds[part] += seconds
        if part in STEP_PARTS:
            self.step[part] = self.step.get(part, 0.0) + seconds
