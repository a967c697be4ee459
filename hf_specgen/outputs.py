"""Assembles the outputs of a call column by column: stopping criteria, streamer, scores, padding, the returned object.

Speculation extends rows at different speeds. A generated position is *emitted* once every row that has not ended has a
token in it; only then do the stopping criteria and the streamer receive it, in the order in which plain `generate`
passes it.

Plain `generate` feeds padding to ended rows until the last row ends. The results appear only in the returned cache and
scores, so here one forward pass at the end of the call processes all padding; or one pass for each column, if a
stopping criterion receives its scores.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specgen.call import Call
from hf_specgen.call_statistics import Statistics
from hf_specgen.compat import CACHE
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, VerificationSession
from hf_specgen.verification.processors import checked

BUILT_IN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)
"""Criteria that are not called: `GenerationState.stop_ids` and `max_length` have the same effect."""
WITHOUT_SCORES = (MaxTimeCriteria, StopStringCriteria)
"""Criteria that do not read the scores that they receive."""


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate`, with the statistics of the call as an attribute, which is no item."""

    speculation: Statistics | None = None


class EncoderDecoderSpeculativeOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder target."""

    speculation: Statistics | None = None


class OutputCollector:
    """Emits complete columns, stops rows where plain `generate` stops them, and collects scores if they were asked for.

    Attributes:
        columns: how many columns are emitted.
        shows_padding: whether what the target computes for the padding of ended rows is returned, as cache or scores.
    """

    def __init__(
        self,
        call: Call,
        target: Target,
        verification: VerificationSession,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
    ):
        self._call, self._state, self._target, self._streamer = call, call.state, target, streamer
        self._processors, batch = verification.processors, call.state.batch
        self._custom = StoppingCriteriaList([c for c in criteria if type(c) not in BUILT_IN_CRITERIA])
        if self._custom:
            verification.is_stopped_by_criteria = self._is_stopped
        self.columns = 0
        names = {"scores": call.keeps_scores, "logits": call.keeps_logits}
        self._kept: dict[str, list[torch.Tensor]] = {name: [] for name, is_kept in names.items() if is_kept}
        self._stops: dict[int, list[bool]] = {}  # of columns that are not emitted yet
        self._waiting = {name: [deque[torch.Tensor]() for _ in range(batch)] for name in self._kept}
        self._processed = [0] * batch  # padding tokens, by row
        self.shows_padding = bool(call.config.return_dict_in_generate) or target.returns_cache

    @property
    def needs_plain_steps(self) -> bool:
        """Whether steps must not draft, because what the user sees besides the tokens could not be computed.

        In a batch a custom stopping criterion may cut off tokens of an earlier step, which cannot be
        rolled back in a recurrent state.
        """
        is_cut = bool(self._custom) and self.shows_padding and self._state.batch > 1
        return is_cut and self._target.has_recurrent_state

    def _is_stopped(self, columns: int, scores: Sequence[torch.Tensor]) -> bool:
        """Whether a custom criterion stops a row after so many columns, which verification has chosen.

        `scores` are those of the last of them, which are not emitted yet. Criteria are called once for each column.
        """
        stops = self._stops[columns] = self._custom_stops(columns, scores)
        return any(stop and not stopped for stop, stopped in zip(stops, self._state.stopped, strict=True))

    def stream(self, ids: torch.Tensor) -> None:
        """Pass the prompt or a column to the streamer; raise if that draws the random numbers of later columns."""
        if self._streamer is not None:
            with checked([self._streamer], self._state.prefix(0), self._call.do_sample, ValueError):
                self._streamer.put(ids)

    def add(self, result: VerificationResult) -> None:
        """Add a step whose tokens have been appended to the state, and emit the columns that it completes."""
        for name, rows in self._waiting.items():
            for waiting, new in zip(rows, getattr(result, name), strict=True):
                waiting.extend(new)
        while not self._state.all_stopped and self._column_is_complete():
            self._emit_column()
        if self._state.all_stopped:
            for row, tokens in enumerate(self._state.generated):
                if len(tokens) > self.columns:
                    self._state.truncate(row, self.columns)

    def output_ids(self) -> torch.Tensor:
        """`[batch, prompt + generated]` the ids that plain `generate` returns."""
        return self._state.prefix(self._state.prompt_length + self.columns)

    def returned(self, statistics: Statistics) -> SpeculativeOutput | EncoderDecoderSpeculativeOutput | torch.Tensor:
        """Complete cache, scores and stream of a call whose rows have stopped; returns what `generate` returns.

        These are its ids, or with `return_dict_in_generate=True` an output.
        """
        cache, call = None, self._call
        if self.shows_padding:
            self._process_padding()
            cache = self._target.finish()
        if self._streamer is not None:
            self._streamer.end()
        if not call.config.return_dict_in_generate:
            return self.output_ids()
        assert call.model is not None
        fields: dict[str, Any] = {name: tuple(columns) for name, columns in self._kept.items()}
        fields |= {"sequences": self.output_ids(), CACHE: cache}
        is_encoder_decoder = call.model.config.is_encoder_decoder
        output = (EncoderDecoderSpeculativeOutput if is_encoder_decoder else SpeculativeOutput)(**fields)
        output.speculation = statistics
        return output

    def _column_is_complete(self) -> bool:
        state = self._state
        return all(
            len(tokens) > self.columns or (stopped and state.pad_id is not None)
            for tokens, stopped in zip(state.generated, state.stopped, strict=True)
        )

    def _emit_column(self) -> None:
        state, column = self._state, self.columns
        self.columns += 1
        for name, rows in self._waiting.items():
            blank = torch.zeros_like(next(row[0] for row in rows if row))
            self._kept[name].append(torch.stack([row.popleft() if row else blank for row in rows]))
        tokens = [text[column] if column < len(text) else state.pad_id for text in state.generated]
        stops = self._stops.pop(self.columns, None) or self._custom_stops(self.columns)
        if self._streamer is not None:
            self.stream(torch.tensor(tokens))
        at_length = state.prompt_length + self.columns >= state.max_length
        for row, text in enumerate(state.generated):
            if state.stopped[row] or not (stops[row] or at_length or tokens[row] in state.stop_ids):
                continue
            state.stopped[row] = True
            if state.pad_id is not None:
                state.truncate(row, min(len(text), self.columns))

    def _custom_stops(self, columns: int, more_scores: Sequence[torch.Tensor] = ()) -> list[bool]:
        if not self._custom:
            return [False] * self._state.batch
        scores: Any = None
        if "scores" in self._kept:
            has_padding = self._state.pad_id is not None and any(self._state.stopped)
            if has_padding and not all(isinstance(one, WITHOUT_SCORES) for one in self._custom):
                self._process_padding()
            scores = (*self._kept["scores"], *more_scores)
        ids = self._state.prefix(self._state.prompt_length + columns)
        with checked(self._custom, ids, self._call.do_sample):
            return self._custom(ids, scores).tolist()

    def _process_padding(self) -> None:
        """Cut the cache of ended rows to the output, process their padding up to the last column, add its scores."""
        state, columns = self._state, self.columns
        target = copy.copy(self._target)  # which keeps what drafters read of the last step, in the middle of a call
        ends = [len(text) + processed for text, processed in zip(state.generated, self._processed, strict=True)]
        target.rewind([end - 1 for end in ends])
        missing = [max(0, columns - end) for end in ends]
        if not any(missing):
            return
        assert state.pad_id is not None
        last, logits = state.pending(), list[torch.Tensor]()
        pending = [state.pad_id if done else token for done, token in zip(self._processed, last, strict=True)]
        # A causal mask of a fixed size may have few slots after the longest row.
        width = max(1, min(target.slot_limit - max(target.cache.lengths), max(missing)))
        for first in range(0, max(missing), width):
            counts = [max(0, min(width, count - first)) for count in missing]
            tree = DraftTree.chains([[state.pad_id] * max(0, count - 1) for count in counts])
            logits.append(target.forward(tree, pending, [count > 0 for count in counts]).float())
            target.commit([list(range(count - 1)) if count else None for count in counts])
            pending = [state.pad_id] * state.batch
        self._processed = [sum(pair) for pair in zip(self._processed, missing, strict=True)]
        if self._kept:
            self._fill_in_scores(torch.cat(logits, dim=1), missing)

    def _fill_in_scores(self, logits: torch.Tensor, missing: Sequence[int]) -> None:
        rows = torch.arange(len(missing), device=logits.device)
        for column in range(self.columns - max(missing), self.columns):
            places = [column - (self.columns - count) for count in missing]
            nodes = torch.tensor([max(place, 0) for place in places], device=logits.device)
            column_logits = logits[rows, nodes].to(self._state.device)
            values = {"logits": column_logits}
            if not self._processors.lockstep:  # they may change the logits in place
                values["scores"] = self._processors.column(column, column_logits)
            for row, place in enumerate(places):
                if place >= 0 and missing[row]:
                    for name, columns in self._kept.items():
                        columns[column][row] = values[name][row]
