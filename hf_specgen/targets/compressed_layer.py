"""A layer whose cache compresses tokens that have left its window, as in DeepSeek-V4, for drafts of one row.

Every few tokens become one entry, so that rejected tokens cannot be cut off. As a recurrent state, the layer returns to
where the last pass began; see `hf_specgen.targets.replay_queue`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from hf_specgen.targets.cache_layer import RaggedLayer


class CompressedLayer(RaggedLayer):
    """A copy of a layer of Transformers' cache, and what it held before the last pass.

    That layer puts new tensors in place of old ones and never writes into them, so the old ones are kept by reference.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.sliding_window)
        self.layer = copy.copy(layer)
        _restore(self.layer, _contents(layer))
        self._before: tuple[tuple[int, ...], dict[str, Any]] = (), {}

    def __getattr__(self, name: str) -> Any:
        """What the model's attention reads and calls beside `update`."""
        if name.startswith("_") or name == "layer":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.layer, name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of a pass, which begins here: entries are added after it."""
        self.lengths = self.lengths or (0,) * len(key_states)
        self._before = self.lengths, _contents(self.layer)
        states: tuple[torch.Tensor, torch.Tensor] = self.layer.update(key_states, value_states)
        self.lengths = tuple(length + key_states.shape[2] for length in self.lengths)
        self._show()
        return states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        sizes: tuple[int, int] = self.layer.get_mask_sizes(query_length)
        return sizes

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Return to where the last pass began, or stay; raises for other lengths."""
        start, contents = self._before
        if tuple(lengths) == self.lengths:
            return
        if tuple(lengths) != start:
            raise RuntimeError(f"a compressed layer was kept at {start} and {self.lengths} tokens, not at {lengths}")
        _restore(self.layer, _copied(contents))
        self.lengths = start
        self._show()

    def take_over(self, layer: Any, slots: int) -> None:
        if layer.get_seq_length():
            self.lengths = (int(layer.get_seq_length()),) * len(layer.keys)
            self._show()

    def hand_over(self, layer: Any) -> None:
        _restore(layer, _contents(self.layer))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.layer.reorder_cache(indices)
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())
        self._show()

    def reserve(self, width: int) -> None:
        """Do nothing: tensors grow by joining them."""

    def _show(self) -> None:
        """Let `keys` and `values` be those of the layer."""
        self.keys, self.values, self.is_initialized = self.layer.keys, self.layer.values, self.layer.is_initialized


def _contents(layer: Any) -> dict[str, Any]:
    """The attributes of a layer, of which later passes change nothing."""
    return _copied(vars(layer))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def _restore(layer: Any, contents: dict[str, Any]) -> None:
    """Set the attributes of a layer."""
    for name, value in contents.items():
        setattr(layer, name, value)
