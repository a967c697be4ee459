"""The speculative decoding loop: draft, run the target, verify, roll back. A step emits 1 to `1 + draft depth` tokens.

The prefill is a step like the others: tokens drafted from the prompt alone are verified in the same forward pass.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Miao et al.,
"SpecInfer" (2023), section 4, for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specgen import compat
from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.chains import ChainSession
from hf_specgen.counters import RowStep, Statistics, StepPasses
from hf_specgen.depth import Policy, PolicySession, StepRecord
from hf_specgen.depth.schedules import context_length
from hf_specgen.monitoring.monitor import Monitor, MonitorSession
from hf_specgen.outputs import OutputCollector
from hf_specgen.padding import PaddingReader
from hf_specgen.state import Call, GenerationState
from hf_specgen.target.cache import MAX_PREFILL_DRAFT
from hf_specgen.target.compiled import compile_seconds
from hf_specgen.target.encoder import EncoderInput
from hf_specgen.target.model_parts import mask_name
from hf_specgen.target.requirements import make_target
from hf_specgen.target.self_check import check_computation
from hf_specgen.target.support import check_length
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, Verifier
from hf_specgen.verification.processors import LogitsPipeline
from hf_specgen.verification.top_tokens import TopTokens

MEASURED_PARTS = ("prefill", "draft", "forward", "verify", "policy")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate`, with the statistics of the call in `speculation`."""

    speculation: Statistics | None = None


def speculative_decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    candidates: Candidates,
    verifier: Verifier,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    policy: Policy | None = None,
    monitor: Monitor | None = None,
    on_start: Callable[[Call], None] | None = None,
    compile: bool = False,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | EncoderDecoderSpeculativeOutput | torch.Tensor:
    """Generate as plain `generate` does, several tokens per forward pass of the target.

    Args:
        model: the target.
        input_ids: `[batch, prompt]`, left-padded.
        candidates: proposes draft tokens.
        verifier: decides which draft tokens are accepted.
        logits_processor, stopping_criteria, generation_config, streamer: as prepared by `generate`.
        policy: chooses draft depths; `candidates.policy` if None.
        monitor: receives the record of every step.
        on_start: called once everything has been checked, before the first forward pass.
        compile: run the target's passes behind the prompt as compiled functions.
        inputs_tensor: what the encoder of an encoder-decoder reads; `input_ids` is the prompt of its decoder.
        model_kwargs: attention mask, positions, cache.

    Returns:
        `[batch, prompt + generated]` ids, or a `SpeculativeOutput` with `return_dict_in_generate=True`.
    """
    state = GenerationState.of_call(
        input_ids, model_kwargs.get(mask_name(model)), stopping_criteria, compat.pad_token(generation_config)
    )
    returns_dict = bool(generation_config.return_dict_in_generate)
    call = Call(
        model,
        state,
        generation_config,
        candidates,
        Statistics([[] for _ in range(state.batch)]),
        processors=LogitsPipeline(logits_processor, state),
        keeps_scores=returns_dict and bool(generation_config.output_scores),
        keeps_logits=returns_dict and bool(generation_config.output_logits),
        compiled=compile,
        encoder=EncoderInput.of_call(inputs_tensor, state.batch, model_kwargs),
    )
    outputs = OutputCollector(call, stopping_criteria, streamer)
    with compat.without_compilation(model), ExitStack() as stack:
        loop = _Loop(call, outputs, verifier, policy or candidates.policy, monitor, input_ids, model_kwargs, stack)
        if on_start is not None:
            on_start(call)
        loop.prefill()
        with compat.optimized_for_decoding(model):
            loop.decode()
            loop.padding.read_all()
        past_key_values = loop.target.finish() if loop.padding.is_visible else None
    if streamer is not None:
        streamer.end()
    candidates.speculation = call.statistics
    if not returns_dict:
        return outputs.output_ids()
    fields: dict[str, Any] = {
        "sequences": outputs.output_ids(),
        "scores": tuple(outputs.scores) if call.keeps_scores else None,
        "logits": tuple(outputs.logits) if call.keeps_logits else None,
        "past_key_values": past_key_values,
    }
    if not model.config.is_encoder_decoder:
        return SpeculativeOutput(**fields, speculation=call.statistics)
    output = EncoderDecoderSpeculativeOutput(**fields)
    # An attribute, and no item: `generate` of Whisper takes items apart by rows.
    object.__setattr__(output, "speculation", call.statistics)
    return output


@dataclass
class EncoderDecoderSpeculativeOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder target."""

    speculation: Statistics | None = None


class _Loop:
    """Runs the steps of one call, with the target and the sessions of drafter, verifier, policy and monitor.

    Args:
        call, outputs: the call and its output collector.
        verifier, policy, monitor: their sessions are started here.
        input_ids, model_kwargs: the prompt.
        stack: ends the sessions when it closes, also after an exception.
    """

    def __init__(
        self,
        call: Call,
        outputs: OutputCollector,
        verifier: Verifier,
        policy: Policy,
        monitor: Monitor | None,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        stack: ExitStack,
    ):
        assert call.model is not None
        self._started = perf_counter()
        self.call, self.state, self.outputs = call, call.state, outputs
        requirements = call.candidates.target_requirements(call.model)
        check_computation(call.model, requirements, input_ids, call.config, model_kwargs)
        self.target = make_target(requirements, call.model, input_ids, call.config, model_kwargs, call.compiled)
        stack.push(lambda kind, *_: self.target.abandon() if kind else None)
        check_length(call.model, self.target.first_positions, call.max_new_tokens)
        self.verification = verifier.start(call)
        stack.callback(lambda: self.verification.end(outputs.columns))
        depth = policy.start(call)
        monitoring = None if monitor is None else monitor.start(call)
        if monitoring is not None:
            stack.callback(monitoring.end)
        self.policy = PolicyRunner(depth, call.candidates.k, monitoring)
        self.drafter = call.candidates.start(
            replace(call, target=self.target, verification=self.verification, depth=depth)
        )
        if self.target.verifies_chains_only:
            self.drafter = ChainSession(self.drafter)
        stack.callback(self.drafter.end)
        self._seconds = dict.fromkeys(MEASURED_PARTS, 0.0)
        self._tokens_from_prefill = [1] * self.state.batch
        self.padding = PaddingReader(call, self.target, outputs)

    def prefill(self) -> None:
        """The first step: process the prompt, and verify chains drafted from it where the strategy supplies them."""
        rows = [True] * self.state.batch
        tree = DraftTree.empty(self.state.batch)
        if self.target.supports_prefill_drafts:
            tree = self._draft(self.drafter.draft_at_prefill, rows).leftmost_chain()
        with self._timed("prefill"):
            logits = self.target.prefill(tree)
        result = self._verify(tree, logits, rows)
        self._tokens_from_prefill = [int(not parents) for parents in tree.parents]
        if tree.nodes or self.drafter.top_tokens:
            self.drafter.observe(result)
        if tree.nodes:
            self._report(tree, self.call.statistics.record_prefill_draft(tree, result))

    def decode(self) -> None:
        """Run steps until every row has stopped, then complete the statistics."""
        state, statistics = self.state, self.call.statistics
        while not state.all_stopped:
            active = self._active_rows()
            tree = self._draft(self.drafter.draft, active)
            result = self._score_and_verify(tree, active)
            self.drafter.observe(result)
            steps = statistics.record(tree, result)
            with self._timed("policy"):
                self._report(tree, steps)
            if not self.padding.is_visible:
                self.target.drop_rows([not state.has_ended(row) for row in range(state.batch)])
        statistics.finish([len(tokens) for tokens in state.generated], self._tokens_from_prefill)
        self._seconds["total"] = perf_counter() - self._started
        statistics.seconds = self._seconds

    def _draft(self, draft: Callable[[Sequence[int]], DraftTree], active: Sequence[bool]) -> DraftTree:
        drafts = not self.padding.needs_plain_steps
        room = [self._room(row) if is_active and drafts else 0 for row, is_active in enumerate(active)]
        with self._timed("policy"):
            budget = self.policy.budget(room)
        with self._timed("draft"):
            return draft(budget)

    def _score_and_verify(self, tree: DraftTree, active: Sequence[bool]) -> VerificationResult:
        processed = active
        if self.call.processes_padding:
            tree, processed = self.padding.add_to(tree), [True] * tree.batch
        with self._timed("forward"):
            logits = self.target.forward(tree, self.padding.pending(), processed)
        return self._verify(tree, logits, active)

    def _verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Accept draft tokens, append them to the rows, roll the cache back to them, and confirm columns."""
        with self._timed("verify"):
            result = self.verification.verify(tree, logits, active)
            if self.drafter.top_tokens:
                pending = [self.state.last_token(row) for row in range(self.state.batch)]
                result.top_tokens = TopTokens.of_step(logits, tree, pending, active, self.drafter.top_tokens)
            for row, tokens in enumerate(result.tokens):
                self.state.append(row, tokens)
            self.target.commit(self.padding.paths(result))
            self.outputs.add(result)
            self.verification.confirm(self.outputs.columns)
        return result

    def _report(self, tree: DraftTree, rows: list[RowStep | None]) -> None:
        """Report a step to the policy and the monitor, and count its forward passes."""
        step = self.policy.observe(tree, rows, self._seconds, self.drafter.passes)
        drafter = tuple(step.passes) if any(step.requested) else None
        passes = StepPasses(step.batch, context_length(self.call), step.batch * step.tokens_per_row, drafter)
        self.call.statistics.passes.append(passes)

    def _active_rows(self) -> list[bool]:
        """Rows that take part in the next step: not ended, and less than `max_lead` ahead of the confirmed columns."""
        furthest = self.outputs.columns + min(self.verification.max_lead(), self.target.max_lead)
        return [
            not self.state.has_ended(row) and len(tokens) < furthest for row, tokens in enumerate(self.state.generated)
        ]

    def _room(self, row: int) -> int:
        """How many draft tokens the row can use: one less than it has tokens left, since the bonus token follows them.

        Draft tokens also stay within `target.last_position`, unless the row itself has passed it.
        """
        target = self.target
        pending = target.first_positions[row] + len(self.state.generated[row]) - 1
        positions = target.last_position - pending if pending <= target.last_position else 2**31
        room = min(self.state.remaining(row) - 1, positions)
        if not self.state.generated[row]:
            room = min(room, MAX_PREFILL_DRAFT)
        return int(max(0, room))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin, compiling = perf_counter(), compile_seconds()
        try:
            yield
        finally:
            compiling = compile_seconds() - compiling
            self._seconds[part] += perf_counter() - begin - compiling
            if compiling:
                self._seconds["compile"] = self._seconds.get("compile", 0.0) + compiling


class PolicyRunner:
    """Runs the policy of a call: limits its depths to k and to the room of each row, and reports every step to it.

    Args:
        session: the policy's session.
        k: maximum draft depth of the strategy.
        monitor: receives every step too.
    """

    def __init__(self, session: PolicySession, k: int, monitor: MonitorSession | None = None):
        self._session, self._k, self._monitor = session, k, monitor
        self._requested: list[int] = []
        self._reported = dict.fromkeys(("draft", "forward", "verify"), 0.0)

    def budget(self, room: Sequence[int]) -> list[int]:
        """The maximum draft depth of each row in this step.

        Raises:
            ValueError: if the policy returns another number of rows.
        """
        depths = self._session.depths(room)
        if len(depths) != len(room):
            raise ValueError(
                f"{self._session!r} returned {len(depths)} depths for {len(room)} rows; return one per row"
            )
        self._requested = [max(0, min(depth, free, self._k)) for depth, free in zip(depths, room, strict=True)]
        return self._requested

    def observe(
        self,
        tree: DraftTree,
        rows: list[RowStep | None],
        seconds: dict[str, float],
        drafter_passes: Sequence[int] | None,
    ) -> StepRecord:
        """Report a step, and return its record.

        Args:
            tree: the draft.
            rows: the outcome for each row.
            seconds: wall time of the call so far, by part.
            drafter_passes: tokens in each forward pass of the drafter; None if unknown.
        """
        spent = {part: seconds[part] - before for part, before in self._reported.items() if seconds[part] > before}
        self._reported = {part: seconds[part] for part in self._reported}
        step = StepRecord(self._requested, rows, 1 + tree.nodes, spent, drafter_passes)
        self._session.observe(step)
        if self._monitor is not None:
            self._monitor.observe(step)
        return step
