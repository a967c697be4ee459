"""The speculative decoding loop: propose, score, verify, commit. A step emits 1 to `1 + draft depth` tokens per row.

The prefill is a step like the others: tokens drafted from the prompt alone are verified in the same forward pass.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Miao et al.,
"SpecInfer" (2023), section 4, for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.chains import ChainSession
from hf_specgen.counters import Statistics
from hf_specgen.depth import Policy
from hf_specgen.monitoring.monitor import Monitor
from hf_specgen.outputs import OutputCollector
from hf_specgen.padding import PaddingReader
from hf_specgen.policy_runner import PolicyRunner
from hf_specgen.speculative_output import EncoderDecoderSpeculativeOutput, SpeculativeOutput, call_output
from hf_specgen.state import Call, GenerationState
from hf_specgen.targets.compilable import Compile
from hf_specgen.targets.cudnn_attention import without_cudnn_attention
from hf_specgen.targets.encoder import EncoderInput
from hf_specgen.targets.model_parts import mask_name
from hf_specgen.targets.packed_weights import packed_weights
from hf_specgen.targets.packing import pack_target
from hf_specgen.targets.requirements import make_target
from hf_specgen.targets.self_check import check_computation
from hf_specgen.targets.support import check_length
from hf_specgen.timer import StepTimer
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, Verifier
from hf_specgen.verification.processors import LogitsPipeline
from hf_specgen.verification.top_tokens import TopTokens


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
    inputs_tensor: torch.Tensor | None = None,
    compile: Compile = False,
    pack_weights: bool | None = None,
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
        inputs_tensor: the input of the encoder of an encoder-decoder target; `input_ids` is the prompt of its decoder.
        compile: run the target's forward passes after the prefill as compiled functions.
        pack_weights: whether linear layers run with packed weights; None for those of small models.
        model_kwargs: attention mask, positions, cache.

    Returns:
        `[batch, prompt + generated]` ids, or a `SpeculativeOutput` with `return_dict_in_generate=True`.
    """
    mask, pad_token = model_kwargs.get(mask_name(model)), compat.pad_token(generation_config)
    state = GenerationState.of_call(input_ids, mask, stopping_criteria, pad_token)
    encoder = EncoderInput.of_call(inputs_tensor, state.batch, model_kwargs)
    call = _make_call(model, state, candidates, logits_processor, generation_config, encoder)
    call = replace(call, compiled=compile, pack_weights=pack_weights)
    outputs = OutputCollector(call, stopping_criteria, streamer)
    with compat.without_compilation(model), without_cudnn_attention(), packed_weights(), ExitStack() as stack:
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
    return call_output(call, outputs, past_key_values)


def _make_call(
    model: PreTrainedModel,
    state: GenerationState,
    candidates: Candidates,
    logits_processor: LogitsProcessorList,
    config: GenerationConfig,
    encoder: EncoderInput | None,
) -> Call:
    """The call that the sessions receive, before the first step."""
    returns_dict = bool(config.return_dict_in_generate)
    return Call(
        model,
        state,
        config,
        candidates,
        Statistics([[] for _ in range(state.batch)]),
        processors=LogitsPipeline(logits_processor, state),
        keeps_scores=returns_dict and bool(config.output_scores),
        keeps_logits=returns_dict and bool(config.output_logits),
        encoder=encoder,
    )


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
        self.timer = StepTimer()
        self.call, self.state, self.outputs = call, call.state, outputs
        requirements, model = call.candidates.target_requirements(call.model), call.model
        check_computation(model, requirements, input_ids, call.config, model_kwargs)
        if not call.compiled:
            self.call = call = replace(call, packed=pack_target(model, call.pack_weights))
        self.target = make_target(requirements, model, input_ids, call.config, model_kwargs, call.compiled)
        stack.push(lambda kind, *_: self.target.abandon() if kind else None)
        check_length(model, self.target.first_positions, call.max_new_tokens)
        self.verification = verifier.start(call)
        stack.callback(lambda: self.verification.end(outputs.columns))
        depth = policy.start(call)
        monitoring = None if monitor is None else monitor.start(call)
        if monitoring is not None:
            stack.callback(monitoring.end)
        self.policy = PolicyRunner(call, self.target, depth, monitoring, self.timer)
        self.drafter = call.candidates.start(
            replace(call, target=self.target, verification=self.verification, depth=depth)
        )
        if self.target.verifies_chains_only:
            self.drafter = ChainSession(self.drafter)
        stack.callback(self.drafter.end)
        self.padding = PaddingReader(call, self.target, outputs)
        self._tokens_from_prefill = [1] * self.state.batch

    def prefill(self) -> None:
        """The first step: process the prompt, and verify chains drafted from it where the strategy supplies them."""
        active = [True] * self.state.batch
        tree = DraftTree.empty(self.state.batch)
        # Without prompt tokens: what models compute for a row of padding only depends on the number of columns.
        if self.target.supports_prefill_drafts and all(self.state.prompts):
            tree = self._propose(self.drafter.draft_at_prefill, active).leftmost_chain()
        with self.timer.part("prefill"):
            logits = self.target.prefill(tree)
        with self.timer.part("verify"):
            result = self._verify(tree, logits, active)
            self._commit(result)
        self._tokens_from_prefill = [int(not parents) for parents in tree.parents]
        if tree.nodes or self.drafter.top_tokens:
            self.drafter.observe(result)
        if tree.nodes:
            steps = self.call.statistics.record_prefill_draft(tree, result)
            self.policy.observe(tree, steps, self.drafter.passes)

    def decode(self) -> None:
        """Run steps until every row has stopped, then complete the statistics."""
        state, statistics = self.state, self.call.statistics
        while not state.all_stopped:
            active = self._active_rows()
            tree = self.padding.add_to(self._propose(self.drafter.draft, active))
            with self.timer.part("forward"):
                logits = self.target.forward(tree, self.padding.pending(), self.padding.processed_rows(active))
            with self.timer.part("verify"):
                result = self._verify(tree, logits, active)
                self._commit(result)
            self.drafter.observe(result)
            steps = statistics.record(tree, result)
            with self.timer.part("policy"):
                self.policy.observe(tree, steps, self.drafter.passes)
            if state.batch > 1 and not self.padding.is_visible:
                self.target.drop_rows([not state.has_ended(row) for row in range(state.batch)])
        statistics.finish([len(tokens) for tokens in state.generated], self._tokens_from_prefill)
        statistics.seconds = self.timer.stop()

    def _propose(self, draft: Callable[[Sequence[int]], DraftTree], active: Sequence[bool]) -> DraftTree:
        """Draft tokens for the active rows, as deep as the policy chooses."""
        with self.timer.part("policy"):
            budget = self.policy.budget([False] * len(active) if self.padding.needs_plain_steps else active)
        with self.timer.part("draft"):
            return draft(budget)

    def _verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Which draft tokens are accepted, and which token follows them."""
        result = self.verification.verify(tree, logits, active)
        if self.drafter.top_tokens:
            pending = [self.state.last_token(row) for row in range(self.state.batch)]
            result.top_tokens = TopTokens.of_step(logits, tree, pending, active, self.drafter.top_tokens)
        return result

    def _commit(self, result: VerificationResult) -> None:
        """Append the tokens to the rows, roll the cache back to the accepted ones, and confirm columns."""
        for row, tokens in enumerate(result.tokens):
            self.state.append(row, tokens)
        self.target.commit(self.padding.paths(result))
        self.outputs.add(result)
        self.verification.confirm(self.outputs.columns)

    def _active_rows(self) -> list[bool]:
        """Rows that take part in the next step: not ended, and less than `max_lead` ahead of the confirmed columns."""
        furthest = self.outputs.columns + min(self.verification.max_lead(), self.target.max_lead)
        return [
            not self.state.has_ended(row) and len(tokens) < furthest for row, tokens in enumerate(self.state.generated)
        ]
