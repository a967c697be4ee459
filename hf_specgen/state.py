"""The state of one `generate` call: the tokens of every row, which rows have ended, and the settings of the call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

if TYPE_CHECKING:
    from hf_specgen.candidates.base import Candidates
    from hf_specgen.counters import Statistics
    from hf_specgen.depth.policy import PolicySession
    from hf_specgen.targets.base import Target
    from hf_specgen.targets.encoder import EncoderInput
    from hf_specgen.verification.base import VerificationSession
    from hf_specgen.verification.processors import LogitsPipeline


class GenerationState:
    """Prompts and generated tokens of a batch. The decoding loop writes it, everything else reads it.

    Args:
        input_ids: `[batch, prompt]`, left-padded as `generate` received them.
        attention_mask: `[batch, at least prompt]`, 0 for padding; None if there is none.
        stop_ids: a row ends after any of these tokens (EOS).
        max_length: a row ends at that many columns, prompt included.
        pad_id: what plain `generate` writes after the end of a row; None if rows never end before the batch does.

    Attributes:
        prompts: the prompt of each row, without padding.
        generated: the tokens generated so far, per row.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        stop_ids: Collection[int] = (),
        max_length: float = float("inf"),
        pad_id: int | None = None,
    ):
        self.batch, self.prompt_length = input_ids.shape
        self.prompts = _without_padding(input_ids, attention_mask)
        self.generated: list[list[int]] = [[] for _ in range(self.batch)]
        self.stop_ids = frozenset(stop_ids)
        self.max_length = max_length
        self.pad_id = pad_id
        self.device = input_ids.device
        self._stopped = [False] * self.batch
        self._columns = torch.cat([input_ids.cpu(), self._blank(64)], dim=1)
        self._filled = [0] * self.batch

    @classmethod
    def of_call(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        criteria: StoppingCriteriaList,
        pad_id: int | None,
    ) -> GenerationState:
        """The state at the start of a call, from what `generate` prepared; rows are padded if a criterion has EOS."""
        stop_ids: set[int] = set()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                stop_ids.update(criterion.eos_token_id.tolist())
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        max_length = float("inf") if criteria.max_length is None else criteria.max_length
        return cls(input_ids, attention_mask, stop_ids, max_length, pad_id if pads else None)

    def pending(self) -> list[int]:
        """The last token of each row, which is not in the target's cache yet."""
        return [tokens[-1] for tokens in self.generated]

    def last_token(self, row: int) -> int:
        """The last token of a row's text; the padding token for a prompt that is nothing but padding."""
        text = self.generated[row] or self.prompts[row]
        return text[-1] if text else int(self._columns[row, self.prompt_length - 1])

    def has_ended(self, row: int) -> bool:
        """Whether the row takes no further tokens: EOS, maximum length, or a stopping criterion.

        Without an EOS token rows are not padded: one that a criterion stopped continues until all rows have stopped.
        """
        return (self._stopped[row] and self.pad_id is not None) or self._at_end(row)

    def stop(self, row: int) -> None:
        """Record that plain `generate` stops this row at its last confirmed column."""
        self._stopped[row] = True

    def is_stopped(self, row: int) -> bool:
        """Whether `stop` was called for the row."""
        return self._stopped[row]

    @property
    def all_stopped(self) -> bool:
        """Whether plain `generate` would return now."""
        return all(self._stopped)

    def remaining(self, row: int) -> float:
        """How many more tokens the row may generate."""
        return self.max_length - self.prompt_length - len(self.generated[row])

    def append(self, row: int, tokens: Sequence[int]) -> int:
        """Append tokens up to and including the first at which the row ends; returns how many were appended."""
        text = self.generated[row]
        for count, token in enumerate(tokens, start=1):
            text.append(token)
            if self._at_end(row):
                return count
        return len(tokens)

    def count_until_end(self, row: int, tokens: Sequence[int]) -> int:
        """How many of these tokens `append` would append."""
        room = self.remaining(row)
        for count, token in enumerate(tokens, start=1):
            if token in self.stop_ids or count >= room:
                return count
        return len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Cut the row to `length` generated tokens."""
        del self.generated[row][length:]
        column = self.prompt_length + self._filled[row]
        self._columns.numpy()[row, self.prompt_length + length : column] = self._padding
        self._filled[row] = min(self._filled[row], length)

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Undo on exit every `append` made inside, so that verification can look ahead along the draft."""
        lengths = [len(tokens) for tokens in self.generated]
        try:
            yield
        finally:
            for row, length in enumerate(lengths):
                if len(self.generated[row]) > length:
                    self.truncate(row, length)

    def prefix(self, columns: int) -> torch.Tensor:
        """The first `columns` columns, as plain `generate` would pass them to processors and stopping criteria.

        A row that has ended, or that has fewer tokens, is padded on the right.

        Returns:
            `[batch, columns]` a copy, on the device of the prompt.
        """
        if columns > self._columns.shape[1]:
            self._columns = torch.cat([self._columns, self._blank(max(columns, self._columns.shape[1]))], dim=1)
        for row, tokens in enumerate(self.generated):
            filled, wanted = self._filled[row], min(len(tokens), columns - self.prompt_length)
            if wanted > filled:
                first = self.prompt_length + filled
                # By way of numpy: a tenth of the time.
                self._columns.numpy()[row, first : self.prompt_length + wanted] = tokens[filled:wanted]
                self._filled[row] = wanted
        return self._columns[:, :columns].to(self.device, copy=True)

    def _at_end(self, row: int) -> bool:
        tokens = self.generated[row]
        return bool(tokens) and (tokens[-1] in self.stop_ids or self.prompt_length + len(tokens) >= self.max_length)

    @property
    def _padding(self) -> int:
        return 0 if self.pad_id is None else self.pad_id

    def _blank(self, columns: int) -> torch.Tensor:
        return torch.full((self.batch, columns), self._padding, dtype=torch.long)


@dataclass(frozen=True)
class Call:
    """One `generate` call: what candidates, verifier, policy and monitor receive in `start`. Read-only.

    Args:
        model: the target; None in simulations and inside Transformers' own assisted decoding.
        state: the tokens of every row, updated by every step.
        config: the generation config, as prepared by `generate`.
        candidates: the candidate strategy in use.
        statistics: the counters of the steps so far.
        processors: applies the logits processors of the call; None inside Transformers' own loop.
        keeps_scores, keeps_logits: whether the caller asked for the processed scores, and for the raw logits.
        target: runs the forward passes of the model. Set for draft sessions only.
        verification: the verification session; see `VerificationSession.draft_weights`. Set for draft sessions only;
            None inside Transformers' own loop.
        depth: the policy's session; its `latency` is the latency model. Set for draft sessions only.
        encoder: what the encoder of an encoder-decoder target reads; None for other targets.
        compiled: whether the target's forward passes after the prefill are compiled, or captured as graphs.
        pack_weights: as given by the caller: whether target and drafter run with packed weights; None for the default.
        packed: whether the target's linear layers run with packed weights.
    """

    model: PreTrainedModel | None
    state: GenerationState
    config: GenerationConfig
    candidates: Candidates
    statistics: Statistics
    processors: LogitsPipeline | None = None
    keeps_scores: bool = False
    keeps_logits: bool = False
    target: Target | None = None
    verification: VerificationSession | None = None
    depth: PolicySession | None = None
    encoder: EncoderInput | None = None
    compiled: bool | Literal["graphs"] = False
    pack_weights: bool | None = None
    packed: bool = False

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self.config.do_sample)

    @property
    def temperature(self) -> float:
        """The sampling temperature; 0.0 for greedy decoding."""
        temperature = self.config.temperature
        return float(1.0 if temperature is None else temperature) if self.do_sample else 0.0

    @property
    def processes_padding(self) -> bool:
        """Whether each step also runs the target on the padding of ended rows, as plain `generate` does.

        Needed only if scores are returned and some processor needs all rows of a column at once.
        """
        lockstep = self.processors is not None and self.processors.lockstep
        return self.keeps_scores and lockstep and self.state.pad_id is not None

    def encoder_texts(self) -> list[list[int]]:
        """The token ids that the target's encoder read, by row; empty without an encoder, and for audio or images."""
        if self.encoder is None or self.model is None:
            return [[] for _ in range(self.state.batch)]
        embeddings = cast(Any, self.model).get_output_embeddings()
        return self.encoder.texts(0 if embeddings is None else len(embeddings.weight))

    @property
    def max_new_tokens(self) -> float:
        """How many tokens the call may generate per row; may be infinite."""
        return self.state.max_length - self.state.prompt_length


def _without_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows
    kept = attention_mask[:, -input_ids.shape[1] :].bool().tolist()
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, kept, strict=True)]
