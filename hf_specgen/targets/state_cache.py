"""State beside keys and values: convolutions, recurrent states, an indexer.

`LayerStates` keep more positions than a convolution's window, so that they can be cut again where accepted tokens end.
A recurrent state can only return to where the last pass began; see `hf_specgen.targets.replay_queue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_ROLLBACK = 64
"""Accepted tokens that may be removed again, besides a step's own, where a stopping criterion cuts them off."""


class LayerStates:
    """Convolutions and recurrent states of one layer, by index; `lengths` are the tokens of each row they include."""

    device: torch.device

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()
        self.convolutions: dict[int, torch.Tensor] = {}  # [batch, channels, window and columns before it]
        self.recurrent: dict[int, torch.Tensor] = {}
        self._windows: dict[int, int] = {}
        self._start: tuple[int, ...] = ()  # lengths before the last pass
        self._before: dict[int, torch.Tensor] = {}  # recurrent states before the last pass

    @classmethod
    def of_layer(cls, layer: Any, length: int) -> LayerStates:
        """The states of a `LinearAttentionLayer` that includes `length` tokens of each row."""
        states = cls()
        states.device = layer.device
        states.convolutions = {index: state for index, state in layer.conv_states.items() if state is not None}
        states.recurrent = {index: state for index, state in layer.recurrent_states.items() if state is not None}
        states._windows = {index: layer.conv_kernel_size[index] for index in states.convolutions}
        states.lengths = (length,) * len(next(iter(states.convolutions.values())))
        return states

    def to_layer(self, layer: Any) -> None:
        """Write the states to a `LinearAttentionLayer` without previous ones."""
        for index, columns in self.convolutions.items():
            window = self._windows[index]
            layer.update_conv_state(columns[..., -window:], index, conv_kernel_size=window)
        for index, state in self.recurrent.items():
            layer.update_recurrent_state(state, index)

    @property
    def is_initialized(self) -> bool:
        return bool(self.lengths)

    def append_to_convolution(self, new: torch.Tensor, index: int, conv_kernel_size: int | None = None) -> torch.Tensor:
        """Append the columns `[batch, channels, new]` of a pass; returns them after the window that precedes them.

        Of the first pass, which is a prompt's, no more is kept than may be removed beside a step's own tokens.
        """
        count = new.shape[-1]
        window = self._windows.setdefault(index, conv_kernel_size or count)
        is_prompt = index not in self.convolutions
        past = self.convolutions[index] if index in self.convolutions else new.new_zeros(*new.shape[:-1], window)
        columns = torch.cat([past, new], dim=-1)
        read = window + count
        if is_prompt:  # a copy, as a part of the columns would keep all of them
            self.convolutions[index] = columns[..., -(window + MAX_ROLLBACK) :].clone()
        else:
            self.convolutions[index] = columns[..., -(read + MAX_ROLLBACK) :]
        if index == 0:  # once a pass, however many convolutions the layer has
            self.device = new.device
            self._start = self.lengths or (0,) * len(new)
            self.lengths = tuple(length + count for length in self._start)
        return columns[..., -read:]

    @property
    def present(self) -> tuple[tuple[int, ...], dict[int, torch.Tensor]]:
        """The lengths, and the recurrent states, which later passes do not overwrite."""
        return self.lengths, dict(self.recurrent)

    def begin_at(self, start: tuple[tuple[int, ...], dict[int, torch.Tensor]]) -> None:
        """Let the last pass have begun at what `present` was before: where it is rolled back to."""
        self._start, self._before = start

    def token_ids(self, index: int) -> torch.Tensor | None:
        """The last token ids of each row, `[batch, window]`, where a model caches them like a convolution's columns."""
        columns = self.convolutions.get(index)
        if columns is None or columns.is_floating_point():
            return None
        return columns[..., -self._windows[index] :]

    def for_pass(self, index: int) -> torch.Tensor | None:
        """A copy of a recurrent state, which is kept for a rollback: kernels for one token overwrite it in place."""
        if index not in self.recurrent:
            return None
        self._before[index] = self.recurrent[index]
        self.recurrent[index] = self._before[index].clone()
        return self.recurrent[index]

    def replace(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """Replace a recurrent state, whose dtype is that of the first one."""
        self.recurrent[index] = state.to(self.recurrent.get(index, state).dtype)
        return state

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Return to these lengths; raises if a window or a recurrent state was not kept there."""
        removed = [now - length for now, length in zip(self.lengths, lengths, strict=True)]
        if not any(removed):
            return
        most = max(removed)
        rows = torch.tensor(removed, device=self.device)
        reachable = [columns.shape[-1] - self._windows[index] for index, columns in self.convolutions.items()]
        if most > min(reachable):
            raise RuntimeError(
                f"{most} tokens cannot be removed: windows of convolutions were kept for {reachable} tokens"
            )
        for row, length in enumerate(lengths if self.recurrent else ()):
            if removed[row] > 0 and length != self._start[row]:
                raise RuntimeError(
                    f"row {row} cannot return to {length} tokens: its recurrent state was kept at {self._start[row]} "
                    f"and {self.lengths[row]}"
                )
        for index, state in self.recurrent.items():
            before = self._before[index] if index in self._before else torch.zeros_like(state)
            self.recurrent[index] = torch.where((rows > 0).view(-1, *[1] * (state.dim() - 1)), before, state)
        for index, columns in self.convolutions.items():
            kept = torch.arange(columns.shape[-1] - most, device=columns.device) + (most - rows)[:, None]
            kept = kept.view(len(kept), *[1] * (columns.dim() - 2), -1)
            self.convolutions[index] = columns.gather(-1, kept.expand(*columns.shape[:-1], -1))
        self.lengths = tuple(lengths)

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Do nothing: only chains are verified, whose accepted tokens need not be moved."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        for states in (self.convolutions, self.recurrent, self._before):
            states.update({index: state[indices.to(self.device)] for index, state in states.items()})
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())
        self._start = tuple(self._start[row] for row in indices.tolist())
