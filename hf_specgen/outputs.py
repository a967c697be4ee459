"""Assembles the outputs of a call by position: stopping criteria, streamer, scores, padding, the returned object.

Speculation extends rows at different speeds. A generated position is *emitted* once every row that has not ended has a
token in it; only then do the stopping criteria and the streamer receive it, in the order in which plain `generate`
passes it.

Plain `generate` feeds padding to ended rows until the last row ends. The results appear only in the returned cache and
scores, so here one forward pass at the end of the call processes all padding; or one pass for each position, if a
stopping criterion receives its scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specgen.call import Call
from hf_specgen.call_statistics import Statistics
from hf_specgen.compat import CACHE
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.criteria import CustomCriteria
from hf_specgen.verification.processors import LogitsPipeline, refusing_side_effects


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate`, with the statistics of the call as an attribute, which is no item."""

    speculation: Statistics | None = None


class EncoderDecoderSpeculativeOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder target."""

    speculation: Statistics | None = None


class OutputCollector:
    """Emits complete positions, stops rows where plain `generate` stops them, and collects scores if asked for.

    The target, and the processors of the call, are used for the padding of ended rows.
    """

    def __init__(
        self,
        call: Call,
        target: Target,
        processors: LogitsPipeline,
        criteria: CustomCriteria,
        streamer: BaseStreamer | None = None,
    ):
        self._call = call
        self._state = call.state
        self._target = target
        self._processors = processors
        self.criteria = criteria
        self._streamer = streamer
        self.emitted_positions = 0
        # By name the values of emitted positions, `[batch, vocab]`, and those of each row that wait for other rows.
        self._kept: dict[str, list[torch.Tensor]] = {}
        if criteria.scores is not None:
            self._kept["scores"] = criteria.scores
        if call.keeps_logits:
            self._kept["logits"] = []
        self._waiting = {name: [deque[torch.Tensor]() for _ in range(call.state.batch)] for name in self._kept}
        self._processed_padding = [0] * call.state.batch  # tokens, by row
        # Whether what the target computes for the padding of ended rows is returned, as cache or scores.
        self.returns_padding_outputs = bool(call.config.return_dict_in_generate) or target.returns_cache

    @property
    def needs_plain_steps(self) -> bool:
        """Whether steps must not draft, because what the user sees besides the tokens could not be computed.

        In a batch a custom stopping criterion may cut off tokens of an earlier step, which cannot be
        rolled back in a recurrent state.
        """
        is_cut = bool(self.criteria) and self.returns_padding_outputs and self._state.batch > 1
        return is_cut and self._target.has_recurrent_state

    def stream(self, ids: torch.Tensor) -> None:
        """Pass the prompt or a position to the streamer; raise if that draws the random numbers of later ones."""
        if self._streamer is not None:
            state = self._state
            with refusing_side_effects(
                [self._streamer], state.prefix(0), self._call.do_sample, state.default_device, ValueError
            ):
                self._streamer.put(ids)

    def add(self, result: VerificationResult) -> None:
        """Add a step whose tokens have been appended to the state, and emit the positions that it completes."""
        for name, rows in self._waiting.items():
            for waiting, new in zip(rows, getattr(result, name), strict=True):
                waiting.extend(new)
        while not self._state.all_stopped and self._position_is_complete():
            self._emit_position()
        if self._state.all_stopped:
            for row, tokens in enumerate(self._state.generated):
                if len(tokens) > self.emitted_positions:
                    self._state.truncate(row, self.emitted_positions)

    def output_ids(self) -> torch.Tensor:
        """`[batch, prompt + generated]` the ids that plain `generate` returns."""
        return self._state.prefix(self._state.prompt_length + self.emitted_positions)

    def returned(self, statistics: Statistics) -> SpeculativeOutput | EncoderDecoderSpeculativeOutput | torch.Tensor:
        """Complete cache, scores and stream of a call whose rows have stopped; returns what `generate` returns.

        These are its ids, or with `return_dict_in_generate=True` an output.
        """
        call = self._call
        cache = None
        if self.returns_padding_outputs:
            self._process_padding()
            cache = self._target.finish()
        if self._streamer is not None:
            self._streamer.end()
        if not call.config.return_dict_in_generate:
            return self.output_ids()
        assert call.model is not None
        fields: dict[str, Any] = {name: tuple(values) for name, values in self._kept.items()}
        fields |= {"sequences": self.output_ids(), CACHE: cache}
        is_encoder_decoder = call.model.config.is_encoder_decoder
        output = (EncoderDecoderSpeculativeOutput if is_encoder_decoder else SpeculativeOutput)(**fields)
        output.speculation = statistics
        return output

    def _position_is_complete(self) -> bool:
        state = self._state
        return all(
            len(tokens) > self.emitted_positions or (stopped and state.pad_id is not None)
            for tokens, stopped in zip(state.generated, state.stopped, strict=True)
        )

    def _emit_position(self) -> None:
        """Emit the next position: keep its scores, call criteria and streamer, stop rows."""
        state = self._state
        position = self.emitted_positions
        self.emitted_positions += 1
        for name, rows in self._waiting.items():
            blank = torch.zeros_like(next(row[0] for row in rows if row))  # of ended rows, until padding is processed
            self._kept[name].append(torch.stack([row.popleft() if row else blank for row in rows]))
        # A criterion receives the scores of padding too.
        has_padding = state.pad_id is not None and any(state.stopped)
        if has_padding and "scores" in self._kept and self.criteria.needs_scores:
            self._process_padding()
        stops = self.criteria.check_emitted(self.emitted_positions)
        tokens = [text[position] if position < len(text) else state.pad_id for text in state.generated]
        if self._streamer is not None:
            self.stream(torch.tensor(tokens))
        at_length = state.prompt_length + self.emitted_positions >= state.max_length
        for row, text in enumerate(state.generated):
            if state.stopped[row] or not (stops[row] or at_length or tokens[row] in state.stop_ids):
                continue
            state.stopped[row] = True
            if state.pad_id is not None:
                state.truncate(row, min(len(text), self.emitted_positions))

    def _process_padding(self) -> None:
        """Cut the cache of ended rows to the output, process their padding up to the last position, add its scores."""
        state = self._state
        target = self._target.copy()  # which keeps what drafters read of the last step, in the middle of a call
        ends = [len(text) + padding for text, padding in zip(state.generated, self._processed_padding, strict=True)]
        target.rewind([end - 1 for end in ends])
        missing = [max(0, self.emitted_positions - end) for end in ends]
        if not any(missing):
            return
        # An ended row was drafted for and verified with the others: its rejected nodes may have NaN states.
        target.cache.erase_rejected()
        assert state.pad_id is not None
        last_tokens = zip(self._processed_padding, state.pending(), strict=True)
        pending = [state.pad_id if padding else token for padding, token in last_tokens]
        logits = list[torch.Tensor]()
        # A causal mask of a fixed size may have few slots after the longest row.
        width = max(1, min(target.slot_limit - max(target.cache.lengths), max(missing)))
        for first in range(0, max(missing), width):
            counts = [max(0, min(width, count - first)) for count in missing]
            tree = DraftTree.chains([[state.pad_id] * max(0, count - 1) for count in counts])
            logits.append(target.forward(tree, pending, [count > 0 for count in counts]).float())
            target.commit([list(range(count - 1)) if count else None for count in counts])
            pending = [state.pad_id] * state.batch
        self._processed_padding = [sum(pair) for pair in zip(self._processed_padding, missing, strict=True)]
        if self._kept:
            self._fill_in_scores(torch.cat(logits, dim=1), missing)

    def _fill_in_scores(self, logits: torch.Tensor, missing: Sequence[int]) -> None:
        """Put the logits `[batch, padding, vocab]` of the last positions into rows where they are missing."""
        rows = torch.arange(len(missing), device=logits.device)
        for position in range(self.emitted_positions - max(missing), self.emitted_positions):
            # Which padding token of each row chose the position; negative for those that had not ended there.
            offsets = [position - (self.emitted_positions - count) for count in missing]
            nodes = torch.tensor([max(offset, 0) for offset in offsets], device=logits.device)
            logits_at = logits[rows, nodes].to(self._state.device)
            values = {"logits": logits_at}
            if not self._processors.lockstep:  # they may change the logits in place
                values["scores"] = self._processors.scores_at(position, logits_at)
            for row, offset in enumerate(offsets):
                if offset >= 0 and missing[row]:
                    for name, kept in self._kept.items():
                        kept[position][row] = values[name][row]
