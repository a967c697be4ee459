"""State beside keys and values: convolutions, recurrent states, an indexer; and the queue of tokens to replay.

A `StateLayer` keeps more columns than a convolution's window, so that it can be cut again where accepted tokens end. A
recurrent state that has read rejected tokens returns to where the pass began, and the accepted tokens stay uncached in
a `ReplayQueue` until the next pass, so that no pass is made for them alone::

    pass 1   state at 10   reads  a │ b c d      a pending, draft (b, c, d), of which b is accepted, then x follows
    pass 2   state at 10   reads  a b x │ e f    a and b are uncached, x pending, draft (e, f), all accepted
    pass 3   state at 15   reads  g │ …

A model that takes no positions numbers the tokens of a pass by how many slots the cache has, for all rows alike, so
that rows of different lengths would get wrong positions. There every pass begins at the slot up to which all rows that
take part are cached, the *common start*::

    pass 1   slot 10   row 0   a │ b c d       pending a, draft (b, c, d), all accepted, then x follows
                       row 1   p │ q r s       q is accepted, then y follows
    pass 2   slot 12   row 0   c d x │ e f     c and d are processed again, x is pending, the draft is (e, f)
                       row 1   y │ z u

Rows are padded on the right; the padding counts as rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer, get_layer_types_and_kwargs

from hf_specgen.targets.cache import MAX_ROLLBACK, RaggedLayer
from hf_specgen.targets.model_parts import ATTENTION_OF_TYPE, INDEXED_TYPES, STATE_TYPES

MAX_UNCACHED = 16
"""More tokens that a recurrent state does not include get a pass of their own: they widen every pass until a draft is
fully accepted."""
MAX_ROW_SKEW = 8
"""With a common start, a row further ahead of the slowest one is left out of passes until then. With 8 rows and 85% of
the draft tokens accepted, 80 tokens per row took 31 passes with a skew of 4, and 26 with 8, 16 and 32; the tokens
processed per row were 222, 244, 408 and 459."""


class StateLayer(LinearAttentionLayer):
    """Convolution windows and recurrent states of one layer; `lengths` are the tokens of each row that they include."""

    is_compileable = False
    is_sliding = False

    def __init__(self, number_of_states: int = 1, **kwargs: object) -> None:
        super().__init__(number_of_states=number_of_states)
        self.record_past = True  # models then leave out kernels that overwrite the window in place
        self.lengths: tuple[int, ...] = ()
        self._start: tuple[int, ...] = ()  # lengths before the last pass
        self._before: dict[int, torch.Tensor | None] = {}  # recurrent states before the last pass

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that are rolled back separately: the layer alone."""
        return (self,)

    @property
    def is_initialized(self) -> bool:
        return bool(self.lengths)

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state besides convolution windows."""
        return any(self.is_recurrent_states_initialized.values())

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        """Append the columns `[batch, channels, new]` of a pass; returns them after the window that precedes them."""
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size)
        columns, size = self.conv_states[state_idx], self.conv_kernel_size[state_idx]
        assert columns is not None and size is not None
        columns, read = torch.cat([columns, conv_states], dim=-1), size + conv_states.shape[-1]
        self.conv_states[state_idx] = columns[..., -(read + MAX_ROLLBACK) :]
        self.has_previous_state[state_idx] = True
        if state_idx == 0:  # once a pass, however many convolutions the layer has
            self._start = self.lengths or (0,) * len(conv_states)
            self.lengths = tuple(length + conv_states.shape[-1] for length in self._start)
        return columns[..., -read:]

    def state_for_pass(self, state_idx: int = 0) -> torch.Tensor:
        """A copy of the state, which is kept for a rollback: kernels for a single token overwrite theirs in place."""
        self._before[state_idx] = state = self.recurrent_states[state_idx]
        assert state is not None
        self.recurrent_states[state_idx] = copied = state.clone()
        return copied

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Replace the state."""
        before = self.recurrent_states[state_idx]
        if before is None:
            self.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        self.recurrent_states[state_idx] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return recurrent_states

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Return to these lengths; raises if a window or a recurrent state was not kept there."""
        removed = [now - length for now, length in zip(self.lengths, lengths, strict=True)]
        if not any(removed):
            return
        most, rows = max(removed), torch.tensor(removed, device=self.device)
        windows = {index: columns for index, columns in self.conv_states.items() if columns is not None}
        reachable = [columns.shape[-1] - (self.conv_kernel_size[index] or 0) for index, columns in windows.items()]
        if most > min(reachable, default=most):
            raise RuntimeError(
                f"{most} tokens cannot be removed: windows of convolutions were kept for {reachable} tokens"
            )
        if self.has_recurrent_state:
            self._return_to_start(rows > 0, lengths)
        for index, columns in windows.items():
            places = torch.arange(columns.shape[-1] - most, device=columns.device) + (most - rows)[:, None]
            self.conv_states[index] = columns.gather(-1, places[:, None].expand(-1, columns.shape[1], -1))
        self.lengths = tuple(lengths)

    def reset(self) -> None:
        super().reset()
        self.lengths = ()
        self._before.clear()

    def _return_to_start(self, rows: torch.Tensor, lengths: Sequence[int]) -> None:
        for row in rows.nonzero().flatten().tolist():
            if lengths[row] != self._start[row]:
                raise RuntimeError(
                    f"row {row} cannot return to {lengths[row]} tokens: its recurrent state was kept at "
                    f"{self._start[row]} and {self.lengths[row]}"
                )
        for index, state in self.recurrent_states.items():
            if state is not None:
                before = self._before.get(index)
                before = torch.zeros_like(state) if before is None else before
                self.recurrent_states[index] = torch.where(rows.view(-1, *[1] * (state.dim() - 1)), before, state)

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Do nothing: only chains are verified, whose accepted tokens need not be moved."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        indices = indices.to(self.device)
        for states in (self.conv_states, self.recurrent_states, self._before):
            for index, state in states.items():
                if state is not None:
                    states[index] = state[indices]
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())
        self._start = tuple(self._start[row] for row in indices.tolist())


STATE_ATTRIBUTES = (
    *("number_of_states", "record_past", "conv_states", "recurrent_states", "has_previous_state", "conv_kernel_size"),
    *("is_conv_states_initialized", "is_recurrent_states_initialized"),
)


class HybridLayer(RaggedLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer with attention and a state."""

    def __init__(self, window: int | None = None, number_of_states: int = 1) -> None:
        RaggedLayer.__init__(self, window)
        self.state = StateLayer(number_of_states)
        for name in STATE_ATTRIBUTES:  # so that `Cache` finds the tensors of the state here
            setattr(self, name, getattr(self.state, name))

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self, self.state)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return self.state.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return self.state.update_recurrent_state(recurrent_states, state_idx, **kwargs)


class IndexedLayer(RaggedLayer):
    """A layer with the keys `[batch, tokens, head_dim]` of an indexer beside its own keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = RaggedLayer()

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self, self.indexer)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer's keys to each row; returns all slots up to the longest row."""
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]


def make_layers(config: Any) -> list[Any]:
    """The cache layers of a model."""
    layers: list[Any] = []
    for layer_type, settings in zip(*get_layer_types_and_kwargs(config), strict=True):
        states, window = settings.get("number_of_states", 1), settings.get("sliding_window")
        if layer_type in INDEXED_TYPES:
            layers.append(IndexedLayer())
        elif layer_type not in STATE_TYPES:
            layers.append(RaggedLayer(window))
        else:
            layers.append(HybridLayer(window, states) if layer_type in ATTENTION_OF_TYPE else StateLayer(states))
    return layers


class ReplayQueue:
    """The tokens of each row after its prompt in `texts`, and how many of them the cache includes in `cached`."""

    def __init__(self, batch: int, common_start: bool = False):
        self.common_start = common_start
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch
        self.is_in_pass = False
        """Whether a pass was made whose outcome is not known yet."""
        self._added = [0] * batch  # tokens since the last `commit`
        # Of the last pass: where each row began, how many tokens it read again, and the length of the longest row.
        self._starts, self._replayed, self._width = [0] * batch, [0] * batch, 0

    @property
    def uncached(self) -> list[int]:
        """How many tokens of each row are not cached."""
        return [len(text) - cached for text, cached in zip(self.texts, self.cached, strict=True)]

    def next_pass(
        self, new: Sequence[Sequence[int]], takes_part: Sequence[bool], most: int | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """Append tokens to the rows that take part; returns where each row begins, after its prompt, and its tokens.

        At most `most` tokens of a row are read. A row that takes no part reads its own text where it is overwritten.
        """
        for row, tokens in enumerate(new):
            if takes_part[row]:
                self.texts[row] += tokens
                self._added[row] += len(tokens)
        members = [row for row, takes in enumerate(takes_part) if takes]
        self._starts = list(self.cached)
        if self.common_start:
            self._starts = [min((self.cached[row] for row in members), default=0)] * len(self.texts)
        ends = [len(self.texts[row]) - self._starts[row] for row in members]
        self._width = min(max(ends, default=0), most or max(ends, default=0))
        reads: list[list[int]] = []
        for row, (text, start) in enumerate(zip(self.texts, self._starts, strict=True)):
            is_read = self.cached[row] >= start if self.common_start else takes_part[row]
            reads.append(text[start : start + self._width] if is_read else [])
            self._replayed[row] = max(0, len(reads[-1]) - len(new[row]))
            if self.common_start:
                self.cached[row] = min(self.cached[row], start) + len(reads[-1])
        self.is_in_pass = True
        return self._starts, reads

    def align(self, values: torch.Tensor, results: int) -> torch.Tensor:
        """`[batch, tokens of the pass, …]` values to `[batch, results, …]` of the new tokens."""
        places = torch.tensor(self._replayed)[:, None] + torch.arange(results)
        rows = torch.arange(len(values))[:, None]
        return values[rows.to(values.device), places.clamp(max=values.shape[1] - 1).to(values.device)]

    def commit(self, counts: Sequence[int | None]) -> None:
        """Keep so many of the tokens that were appended since the last `commit`; None for a row that took no part."""
        for row, count in enumerate(counts):
            text = self.texts[row]
            del text[len(text) - self._added[row] + (count or 0) :]
            if self.common_start:
                self.cached[row] = min(self.cached[row], len(text))
            elif count is not None and self._replayed[row] + count == self._width:
                self.cached[row] = self._starts[row] + self._width
            else:  # a recurrent state returns to where the pass began
                self.cached[row] = self._starts[row]
        self._added = [0] * len(self.texts)
        self.is_in_pass = False

    def cut(self, row: int, length: int) -> None:
        """Keep the first tokens of a row's text; a recurrent state can return to where the last pass began."""
        reachable = length if self.common_start else self._starts[row]
        if length < min(self.cached[row], reachable):
            raise RuntimeError(f"row {row} cannot return to {length} tokens: its state is known at {reachable}")
        if length < self.cached[row]:
            self.cached[row] = reachable
        del self.texts[row][length:]
