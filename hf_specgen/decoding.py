"""The speculative decoding loop: propose, score, verify, commit. A step emits 1 to `1 + draft depth` tokens per row.

The passes of the target between draft and verification depend on the entry point:

    generate          DecodingLoop     passes of its own
    generate_many     DecodingLoop     its own prefill, then passes that it shares with other prompts
    generate_batch    DecodingSteps    the packed passes of Transformers

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Miao et al.,
"SpecInfer" (2023), section 4, for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.call import Call, UnrepeatableError
from hf_specgen.call_statistics import Statistics, StepRecord
from hf_specgen.candidates.base import WrappedSession, checked_draft, leftmost_chains, vocabulary_size
from hf_specgen.candidates.draft_batch import DraftBatch, TargetView
from hf_specgen.candidates.grammar import grammar_drafts
from hf_specgen.clock import thread_clock
from hf_specgen.depth.step_times import THREAD
from hf_specgen.outputs import OutputCollector
from hf_specgen.product_choice import comparison_seconds
from hf_specgen.settings import Settings
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.row_layout import UNLIMITED
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.criteria import CustomCriteria
from hf_specgen.verification.processors import LogitsPipeline
from hf_specgen.verification.result import TopTokens

STEP_PARTS = ("draft", "forward", "verify")  # parts of a call's wall time that make up the latency of a step


class DecodingTarget(TargetView, Protocol):
    """What `DecodingSteps` need from the target besides its passes: limits of drafts, a pass without one, the rollback.

    Attributes:
        first_positions: the position of each row's first generated token.
        last_position: the last position that the model can process.
        slot_limit: how many slots of the cache a row may have.
        max_draft_tokens: how many draft tokens of a row a pass can take.
        max_row_skew: how many tokens a row may be ahead of the slowest row.
    """

    @property
    def first_positions(self) -> Sequence[int]: ...
    @property
    def last_position(self) -> float: ...
    @property
    def slot_limit(self) -> float: ...
    @property
    def max_draft_tokens(self) -> float: ...
    @property
    def max_row_skew(self) -> float: ...
    def forward_again(self, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor: ...
    def commit(self, paths: Sequence[Sequence[int] | None]) -> None: ...


class StepOutputs(Protocol):
    """What receives the tokens of each step, as an `OutputCollector` does.

    `criteria` is None if there are no custom stopping criteria.
    """

    @property
    def emitted_positions(self) -> int: ...
    @property
    def criteria(self) -> CustomCriteria | None: ...
    @property
    def needs_plain_steps(self) -> bool: ...
    def add(self, result: VerificationResult) -> None: ...


class DecodingSteps:
    """Drafts and verifies the steps of one call; the caller runs the passes of the target.

    A step is `plan_step`, `draft_step`, a pass that the caller runs over the draft, `end_step`. The sessions of
    strategy, policy and monitor are started here, and end when the stack closes, also after an exception.
    """

    _vocabulary = UNLIMITED
    """The size of the target's vocabulary, by the logits of the last pass; drafts are checked against it."""

    def __init__(
        self,
        call: Call,
        target: DecodingTarget,
        settings: Settings,
        make_outputs: Callable[[LogitsPipeline], StepOutputs],
        stack: ExitStack,
    ):
        self.call = call
        self.state = call.state
        self.target = target
        self.timer = DecodingTimer()
        self._max_depth = settings.candidates.k
        self.statistics = Statistics([[] for _ in range(call.state.batch)], strategy=call.drafting.name)
        stack.callback(self._end_verification)
        self.verification = settings.verifier.start(call)
        self.outputs = make_outputs(self.verification.processors)
        self.policy = settings.policy.start(call)
        self._monitor = None if settings.monitor is None else settings.monitor.start(call)
        if self._monitor is not None:
            stack.callback(self._monitor.end)
        batch = DraftBatch(call, target, self.verification, self.policy)
        start = settings.start or settings.candidates.start
        self.draft_session = start(batch)
        stack.callback(self.draft_session.end)
        # The drafts of any strategy pass through these changes, in this order.
        tree = settings.candidates.tree
        for change in (grammar_drafts(batch, tree), leftmost_chains(batch)):
            if change is not None:
                self.draft_session = WrappedSession(self.draft_session, change)

    def end_prefill(self, logits: torch.Tensor) -> None:
        """Choose the first tokens by the logits after the prompt, `[batch, 1, vocab]`."""
        # Drafters take the vocabulary from the output matrix, or else from the config: there must be as many logits.
        model: Any = self.call.model
        has_matrix = model is None or hasattr(model.get_output_embeddings(), "weight")
        if not has_matrix and logits.shape[-1] < (size := vocabulary_size(model)):  # the configured one
            raise UnrepeatableError(
                f"{type(model).__name__} has {logits.shape[-1]} outputs, but its config a vocab_size of {size}; set "
                f"model.config.vocab_size = {logits.shape[-1]}"
            )
        result = self._verify(DraftTree.empty(self.state.batch), logits, [True] * self.state.batch)
        if self.draft_session.top_tokens:  # other sessions observe decoding steps only
            self.draft_session.observe(result)

    def plan_step(self, may_draft: bool = True) -> None:
        """Choose the rows that take part in the next step, and how deep each of them drafts."""
        # Rows that have not ended and are less than the allowed number of tokens ahead of the slowest row, which has
        # `emitted_positions` tokens.
        furthest = self.outputs.emitted_positions + min(self.verification.max_row_skew(), self.target.max_row_skew)
        texts = enumerate(self.state.generated)
        self._active = [not self.state.has_ended(row) and len(tokens) < furthest for row, tokens in texts]
        may_draft = may_draft and not self.outputs.needs_plain_steps
        with self.timer.part("policy"):
            self.max_depths = self._depths(self._active if may_draft else [False] * self.state.batch)
        with self.timer.part("draft"):
            self.draft_session.plan(self.max_depths)

    def draft_step(self) -> DraftTree:
        """The draft of the depths that `plan_step` chose."""
        with self.timer.part("draft"):
            draft = self.draft_session.draft(self.max_depths)
            return checked_draft(draft, self.call.drafting.name, self.state.batch, self._vocabulary)

    def end_step(self, tree: DraftTree, logits: torch.Tensor) -> None:
        """Verify a draft by the logits of a step, and report the outcome to the sessions."""
        result = self._verify(tree, logits, self._active)
        self.draft_session.observe(result)
        outcomes = self.statistics.record(tree, result)
        passes = self.draft_session.tokens_per_pass
        with self.timer.part("policy"):
            seconds = self.timer.step
            self.timer.step = {}
            passes = None if passes is None else tuple(passes)
            context = self.call.context_length
            pass_rows, tokens_per_row = self.target.pass_shape(1 + tree.nodes)
            loss = self.draft_session.excluded_time_loss
            step = StepRecord(
                self.max_depths,
                outcomes,
                tokens_per_row,
                seconds=seconds,
                drafter_passes=passes,
                context=context,
                computed_rows=pass_rows,
                excluded_time_loss=loss,
            )
            self.policy.observe(step)
            if self._monitor is not None:
                self._monitor.observe(step)
            self.statistics.batch_steps.append(step)

    def finished_statistics(self) -> Statistics:
        """The statistics of a call, completed."""
        self.statistics.finish([len(tokens) for tokens in self.state.generated])
        self.statistics.seconds = {**self.timer.seconds, "total": perf_counter() - self.timer.started}
        return self.statistics

    def _end_verification(self) -> None:
        """End the session of the verification, also where Ctrl-C came before there were outputs."""
        if hasattr(self, "verification"):
            self.verification.end(self.outputs.emitted_positions if hasattr(self, "outputs") else 0)

    def _depths(self, may_draft: Sequence[bool]) -> list[int]:
        """How deep each row drafts: as the policy chooses, up to `k` and what the row can use."""
        limits = self._max_draft_tokens(may_draft)
        depths = self.policy.depths(limits)
        if len(depths) != len(limits):
            raise ValueError(
                f"{self.policy!r} returned {len(depths)} depths for {len(limits)} rows; return one per row"
            )
        return [max(0, min(depth, limit, self._max_depth)) for depth, limit in zip(depths, limits, strict=True)]

    def _max_draft_tokens(self, may_draft: Sequence[bool]) -> list[int]:
        """How many draft tokens each row can use before its last token, the last position and the last cache slot."""
        state = self.state
        target = self.target
        # A prompt of embeddings has no positions in the text.
        text_length = max(state.prompt_length, *target.first_positions) + max(map(len, state.generated))
        if text_length + self.call.drafting.max_slots > target.slot_limit:
            return [0] * state.batch
        limits = []
        for row, tokens in enumerate(state.generated):
            pending = target.first_positions[row] + len(tokens) - 1
            # A row that is already beyond the last position exceeds it as in plain decoding, so it has no limit.
            positions = target.last_position - pending if pending <= target.last_position else UNLIMITED
            # A step emits one token after the accepted draft tokens.
            limit = min(state.remaining(row) - 1, positions, target.max_draft_tokens)
            limits.append(int(max(0, limit)) if may_draft[row] else 0)
        return limits

    def _verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Verify a draft; append the accepted tokens and the next one, roll the cache back, emit complete positions."""
        self._vocabulary = logits.shape[-1]
        with self.timer.part("verify"):
            result = self.verification.verify(tree, logits, active, self.outputs.criteria)
            if result is None:  # states of a draft token are NaN: verify without the draft
                tree = DraftTree.empty(tree.batch)
                logits = self.target.forward_again(self.state.pending(), active)
                result = self.verification.verify(tree, logits, active, self.outputs.criteria)
            assert result is not None, "a step without a draft"
            result.num_in_pass = [len(parents) for parents in tree.parents]
            if self.draft_session.top_tokens:
                pending = self.state.pending()
                count = self.draft_session.top_tokens
                result.top_tokens = TopTokens.of_step(logits, tree, pending, active, count)
            for row, tokens in enumerate(result.tokens):
                self.state.append(row, tokens)
            self.target.commit(result.paths)
            self.outputs.add(result)
            self.verification.confirm(self.outputs.emitted_positions)
        return result


class DecodingLoop(DecodingSteps):
    """Runs the prefill and the steps of one call: `DecodingSteps` with the passes of a target and its outputs."""

    target: Target
    outputs: OutputCollector

    def __init__(
        self,
        call: Call,
        target: Target,
        settings: Settings,
        stack: ExitStack,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
    ):
        custom_criteria = CustomCriteria(criteria, call)
        make_outputs = partial(OutputCollector, call, target, criteria=custom_criteria, streamer=streamer)
        super().__init__(call, target, settings, make_outputs, stack)

    def run(self) -> Any:
        """Run a whole call, several tokens per forward pass of the target; returns what plain `generate` returns."""
        self.prefill()
        self.measure_latency()
        assert self.call.model is not None
        with compat.optimized_for_decoding(self.call.model):
            self.decode()
            return self.outputs.returned(self.finished_statistics())

    def prefill(self) -> None:
        """Run the prompt through the target, and choose the first tokens."""
        with self.timer.part("prefill"):
            logits = self.target.prefill()
        self.end_prefill(logits)

    def measure_latency(self) -> None:
        """Let the policy measure the target's latency after the prefill, by passes that need free cache slots."""
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
            if state.batch > 1 and not self.outputs.returns_padding_outputs:
                self.target.drop_rows([not state.has_ended(row) for row in range(state.batch)])


class DecodingTimer:
    """Measures wall time by part of decoding: of the call in `seconds`, of the step in `step`.

    A step also has `THREAD`, without the time in which products of linear layers were compared.
    """

    def __init__(self) -> None:
        self.started = perf_counter()
        self.seconds = dict.fromkeys(("prefill", *STEP_PARTS, "policy"), 0.0)
        self.step: dict[str, float] = {}
        self._thread_clock = thread_clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context whose time is added to a part; parts do not contain each other."""
        began_comparisons = comparison_seconds()
        began_thread = self._thread_clock()
        began = perf_counter()
        yield
        self.add(name, perf_counter() - began)
        if name == "forward":
            compared = comparison_seconds() - began_comparisons
            self.step[THREAD] = self._thread_clock() - began_thread - compared

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part; none where a clock has gone backwards."""
        seconds = max(0.0, seconds)
        self.seconds[part] += seconds
        if part in STEP_PARTS:
            self.step[part] = self.step.get(part, 0.0) + seconds
