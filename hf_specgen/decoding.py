"""The decoding loop: draft, score, verify, keep. One step yields one to `1 + depth of the draft` tokens per row.

The prompt is read in a step like the others: what can be guessed before the target has read it is verified with it.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Miao et al.,
"SpecInfer" (2023), section 4, for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specgen.adaptive.pace import Pace, StepHook
from hf_specgen.adaptive.policy import Policy, State
from hf_specgen.candidates.base import Candidates, DraftContext, Drafter
from hf_specgen.outputs import OutputCollector
from hf_specgen.state import GenerationState
from hf_specgen.statistics import Statistics
from hf_specgen.target.support import check_length
from hf_specgen.timer import Timer
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, Verifier
from hf_specgen.verification.processors import LogitsPipeline


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What plain `generate` returns, and `speculation`: the statistics of the call."""

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
    monitor: StepHook | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | torch.Tensor:
    """Generate as plain `generate` does, several tokens at a time.

    Args:
        model: the target.
        input_ids: `[batch, prompt]`, left-padded.
        candidates: guesses the next tokens.
        verifier: decides which guesses stand.
        logits_processor, stopping_criteria, generation_config, streamer: as prepared by `generate`.
        policy: says how deep to draft; that of the candidates if left out.
        monitor: told of every step.
        model_kwargs: attention mask, positions, cache.

    Returns:
        `[batch, prompt + generated]` ids, or a `SpeculativeOutput` with `return_dict_in_generate=True`.
    """
    call = _Call(
        model, input_ids, candidates, verifier, logits_processor, stopping_criteria, generation_config, model_kwargs
    )
    call.pace = Pace(policy or candidates.policy, call.state(candidates), call.sequences.generated, monitor)
    call.context.policy = call.pace.policy
    call.emission = OutputCollector(call.sequences, stopping_criteria, streamer, call.keep_scores, call.output_scores)
    decode_mode = getattr(model, "_optimize_model_for_decode", nullcontext)
    try:
        drafter = candidates.bind(call.context, model)
        call.read_prompt(drafter)
        with decode_mode():
            call.decode(drafter)
            call.fill_in_padding()
    except BaseException:
        call.target.abandon()
        raise
    drafter.end()
    if streamer is not None:
        streamer.end()
    candidates.speculation = call.statistics
    return call.output()


class _Call:
    """One `generate` call: its text, its target, its statistics."""

    emission: OutputCollector
    pace: Pace
    _given: list[int]

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        candidates: Candidates,
        verifier: Verifier,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self._started = perf_counter()
        self.returns_dict = bool(config.return_dict_in_generate)
        self.output_scores = self.returns_dict and bool(config.output_scores)
        self.output_logits = self.returns_dict and bool(config.output_logits)
        self.keep_scores = self.output_scores or self.output_logits
        self.target = candidates.make_target(model, input_ids, config, model_kwargs)
        self.sequences = GenerationState.of_call(input_ids, model_kwargs.get("attention_mask"), criteria, config)
        check_length(model, self.target.first_positions, self.sequences.max_length - self.sequences.prompt_length)
        self.verifier = verifier
        self.scorer = LogitsPipeline(processors, self.sequences)
        verifier.begin(self.scorer, self.sequences, bool(config.do_sample), self.keep_scores)
        self.context = DraftContext(
            self.sequences.prompts, self.sequences.generated, verifier=verifier, target=self.target
        )
        batch = self.sequences.batch
        self.statistics = Statistics([[] for _ in range(batch)])
        self._temperature = float(config.temperature or 0.0) if config.do_sample else 0.0
        self._seconds = dict.fromkeys(("prefill", "draft", "forward", "verify", "policy"), 0.0)

    def state(self, candidates: Candidates) -> State:
        """What a policy is shown."""
        return State(
            k=candidates.k,
            room=[0] * self.sequences.batch,
            prompts=[len(prompt) for prompt in self.sequences.prompts],
            generated=[0] * self.sequences.batch,
            statistics=self.statistics,
            temperature=self._temperature,
            max_new_tokens=self.sequences.max_length - self.sequences.prompt_length,
            model=self.target.model,
            strategy=repr(candidates),
            negligible_draft_cost=candidates.negligible_draft_cost,
            adaptive_tree=candidates.adaptive_tree,
        )

    def read_prompt(self, drafter: Drafter) -> None:
        """The first step. Rows that nothing is guessed for get the token that the prompt itself gives."""
        rows = [True] * self.sequences.batch
        tree = DraftTree.empty(len(rows))
        if self.target.supports_prefill_drafts:
            tree = self._draft(drafter.open, rows).leftmost_chain()
        with Timer(self._seconds, "prefill"):
            logits = self.target.prefill(tree)
        verdict = self._verify(tree, logits, rows)
        self._given = [int(not parents) for parents in tree.parents]
        if tree.nodes:
            drafter.observe(verdict)
            self.pace.observe(tree, self.statistics.record_prefill_draft(tree, verdict), self._seconds)

    def decode(self, drafter: Drafter) -> None:
        """All further steps."""
        while not self.emission.done:
            active = self._active_rows()
            tree = self._draft(drafter.draft, active)
            with Timer(self._seconds, "policy"):
                widened = self.pace.widened(tree)
            with Timer(self._seconds, "forward"):
                logits = self.target.forward(widened, self.sequences.pending(), active)[:, : 1 + tree.nodes]
            verdict = self._verify(tree, logits, active)
            drafter.observe(verdict)
            steps = self.statistics.record(tree, verdict)
            with Timer(self._seconds, "policy"):
                self.pace.observe(tree, steps, self._seconds)
            if not self._reads_padding:
                self.target.drop_rows([self.emission.goes_on(row) for row in range(tree.batch)])
        self.verifier.end(self.emission.columns)
        self.statistics.finish([len(tokens) for tokens in self.sequences.generated], self._given)
        self._seconds["total"] = perf_counter() - self._started
        self.statistics.seconds = self._seconds
        self.pace.end()

    def _draft(self, draft: Callable[[DraftContext], DraftTree], active: Sequence[bool]) -> DraftTree:
        room = [self._room(row) if is_active else 0 for row, is_active in enumerate(active)]
        self.context.ended = [row for row in range(len(room)) if not self.emission.goes_on(row)]
        with Timer(self._seconds, "policy"):
            self.context.budget = self.pace.budget(room)
        with Timer(self._seconds, "draft"):
            return draft(self.context)

    def _verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Accept, keep, emit."""
        with Timer(self._seconds, "verify"):
            verdict = self.verifier.verify(tree, logits, active)
            self.target.commit(verdict.paths)
            self.emission.add(verdict)
            self.verifier.confirmed(self.emission.columns)
        return verdict

    def fill_in_padding(self) -> None:
        """Read the padding of rows that ended early, if its scores or the cache are visible to the caller.

        Plain `generate` feeds padding to ended rows until the last one ends.
        """
        texts, columns = self.sequences.generated, self.emission.columns
        self.target.rewind([len(text) - 1 for text in texts])
        missing = [columns - len(text) for text in texts]
        if not any(missing) or not self._reads_padding:
            return
        pad_id = self.sequences.pad_id
        assert pad_id is not None
        tree = DraftTree.chains([[pad_id] * max(0, n - 1) for n in missing])
        logits = self.target.forward(tree, self.sequences.pending(), [n > 0 for n in missing]).float()
        self.target.commit([list(range(n - 1)) if n else None for n in missing])
        if self.keep_scores:
            self._fill_in_scores(logits, missing)

    def _fill_in_scores(self, logits: torch.Tensor, missing: list[int]) -> None:
        rows = torch.arange(len(missing), device=logits.device)
        for column in range(self.emission.columns - max(missing), self.emission.columns):
            places = [column - (self.emission.columns - n) for n in missing]
            nodes = torch.tensor([max(place, 0) for place in places], device=logits.device)
            column_logits = logits[rows, nodes].to(self.sequences.device)
            scores = column_logits if self.scorer.lockstep else self.scorer.column(column, column_logits)
            for row, place in enumerate(places):
                if place >= 0 and missing[row]:
                    self.emission.scores[column][row] = scores[row]
                    self.emission.logits[column][row] = column_logits[row]

    def output(self) -> SpeculativeOutput | torch.Tensor:
        sequences = self.emission.output_ids()
        cache = self.target.finish()
        if not self.returns_dict:
            return sequences
        return SpeculativeOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=tuple(self.emission.scores) if self.output_scores else None,  # type: ignore[arg-type]
            logits=tuple(self.emission.logits) if self.output_logits else None,  # type: ignore[arg-type]
            past_key_values=cache,
            speculation=self.statistics,
        )

    @property
    def _reads_padding(self) -> bool:
        """Whether the caller sees the scores or the cache of rows that ended before others."""
        return self.returns_dict or self.target.returns_cache

    def _active_rows(self) -> list[bool]:
        """Rows that go on: not at their end, and not too far ahead of the slowest."""
        furthest = self.emission.columns + self.verifier.max_lead()
        return [
            self.emission.goes_on(row) and len(tokens) < furthest for row, tokens in enumerate(self.sequences.generated)
        ]

    def _room(self, row: int) -> int:
        """How many draft tokens can be used: the target adds one of its own.

        A draft must not reach behind the model's last position before the text does: a table of positions ends there.
        """
        pending = self.target.first_positions[row] + len(self.sequences.generated[row]) - 1
        room = self.target.last_position - pending if pending <= self.target.last_position else 2**31
        return int(max(0, min(self.sequences.remaining(row) - 1, room)))
