"""What a draft session reads of a call: its rows, and data of target, verification and policy about them.

    interface         what it provides                  what implements it
    RowState          prompts and generated tokens      GenerationState, SharedRowState
    TargetView        hidden states, sizes of passes    Target, RequestTarget, SharedTargets
    DraftSampling     noise of draft tokens             VerificationSession, SharedSampling

A session of one call reads the first class of each line. `RequestTarget` is the target of a request of continuous
batching. The shared classes stand for those of several calls that draft together, see `hf_specgen.batching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.call import Call
from hf_specgen.depth import PolicySession
from hf_specgen.depth.latency import LatencyModel, StepLatency
from hf_specgen.verification.processors import ScoreProcessors


class RowState(Protocol):
    """The rows of a draft: their tokens, which every step updates. The members are those of `GenerationState`."""

    @property
    def batch(self) -> int: ...
    @property
    def prompts(self) -> list[list[int]]: ...
    @property
    def generated(self) -> list[list[int]]: ...
    @property
    def drafts_together(self) -> bool: ...
    @property
    def max_new_tokens(self) -> float: ...
    @property
    def context_length(self) -> int: ...
    def has_ended(self, row: int) -> bool: ...
    def last_token(self, row: int) -> int: ...
    def pending(self) -> list[int]: ...


class TargetView(Protocol):
    """What a drafter reads of the target, see `DraftBatch`, where `rows` are the present ones."""

    @property
    def device(self) -> torch.device: ...
    @property
    def rows(self) -> list[int]: ...
    @property
    def verifies_chains_only(self) -> bool: ...
    def pass_shape(self, tokens: int) -> tuple[int, int]: ...
    def last_states(self, aux_layers: Sequence[int]) -> torch.Tensor: ...
    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]: ...


class DraftSampling(Protocol):
    """What a drafter needs to sample its tokens. The members are those of `VerificationSession`."""

    @property
    def wants_q(self) -> bool: ...
    @property
    def predicted_tokens(self) -> Sequence[Sequence[int]]: ...
    @property
    def score_processors(self) -> ScoreProcessors: ...
    @property
    def uses_draft_noise_only(self) -> bool: ...
    def draft_scores(
        self, scores: torch.Tensor, token_indices: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    def draft_noise(self, token_indices: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None: ...


class DraftBatch:
    """The rows that a session drafts for. Read-only.

    Args:
        call: the settings of the call.
        target: runs the forward passes of the model.
        verification: verifies the drafts.
        policy: chooses how deep rows draft.
        state: the rows, if they are not those of the call.

    Attributes:
        call: the settings of the call: generation config, strategy, logits processors, encoder input, tokenizer, …
        state: the tokens of every row, updated by every step: `prompts` and `generated`.
        model: the target.
        target: what runs its passes, only for drafters that run its layers or read its cache.
    """

    def __init__(
        self,
        call: Call,
        target: TargetView,
        verification: DraftSampling,
        policy: PolicySession,
        state: RowState | None = None,
    ):
        self.call = call
        self.state: RowState = call.state if state is None else state
        self.model = cast(PreTrainedModel, call.model)
        self.target = target
        self._verification = verification
        self._policy = policy

    def with_settings(self, **settings: Any) -> DraftBatch:
        """The same rows with other settings of the call."""
        call = replace(self.call, settings=replace(self.call.settings, **settings))
        return DraftBatch(call, self.target, self._verification, self._policy, self.state)

    # The rows

    @property
    def device(self) -> torch.device:
        """Where the target reads its input."""
        return self.target.device

    def is_active(self) -> list[bool]:
        """Whether each row has not ended; a row that has ended never drafts again."""
        return [not self.state.has_ended(row) for row in range(self.state.batch)]

    # The target

    @property
    def verifies_chains_only(self) -> bool:
        """Whether drafts must be chains, as for targets with a recurrent state."""
        return self.target.verifies_chains_only

    @property
    def present_rows(self) -> list[int]:
        """The rows that the target computes; others have ended."""
        return self.target.rows

    def pass_shape(self, tokens: int) -> tuple[int, int]:
        """How many rows, and tokens of each, the target computes in a pass over `tokens` tokens of each row."""
        return self.target.pass_shape(tokens)

    def committed_states(self, layers: Sequence[int]) -> list[torch.Tensor]:
        """The target's hidden states `[kept, layers * hidden]` of each row's tokens that the last step has kept.

        After the prefill those of the prompts. For strategies that name the layers in `target_requirements`.
        """
        return self.target.committed_states(layers)

    def last_states(self, layers: Sequence[int]) -> torch.Tensor:
        """`[batch, layers * hidden]` the target's hidden states that chose each row's last token."""
        return self.target.last_states(layers)

    # Verification

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled."""
        return self.call.do_sample

    @property
    def wants_q(self) -> bool:
        """Whether a draft that was sampled carries the probabilities it was sampled with (`DraftTree.q`)."""
        return self._verification.wants_q

    @property
    def predicted_tokens(self) -> Sequence[Sequence[int]]:
        """For each row, the tokens that an earlier run sampled with the same noise; empty if unknown."""
        return self._verification.predicted_tokens

    @property
    def score_processors(self) -> ScoreProcessors:
        """The score-only logits processors of the call, which a drafter's logits pass through."""
        return self._verification.score_processors

    @property
    def uses_draft_noise_only(self) -> bool:
        """Whether `draft_scores` depend on the scores and `draft_noise` alone."""
        return self._verification.uses_draft_noise_only

    def draft_scores(
        self, scores: torch.Tensor, token_indices: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores of each token as a draft token, see `VerificationSession.draft_scores`."""
        return self._verification.draft_scores(scores, token_indices, tokens)

    def draft_noise(self, token_indices: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None:
        """The noise with which the target samples, see `VerificationSession.draft_noise`."""
        return self._verification.draft_noise(token_indices, device)

    # The policy

    @property
    def latency(self) -> LatencyModel | None:
        """The latencies of passes; None if the policy has none."""
        return self._policy.latency

    def step_latency(self, rows: int) -> StepLatency | None:
        """The latencies of a step of `rows` rows, for strategies that size their own trees; None if unknown."""
        return self._policy.step_latency(rows, self.state.context_length)

    def prefill_is_short(self) -> bool:
        """Whether the drafter's prefill is short beside the call."""
        return self._policy.prefill_is_short()

    @property
    def carries_over(self) -> bool:
        """Whether acceptance counted in earlier calls may be used, and this call's kept for later ones.

        Not where equal calls have to draft alike: with a policy that measures nothing, and in rejection sampling, whose
        text depends on the draft.
        """
        return self.call.settings.memory and not self.wants_q and self._policy.remembers
