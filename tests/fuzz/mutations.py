"""Faults in the package itself that the random tester must find: `MUTATIONS`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from hf_specgen.state import GenerationState
from hf_specgen.targets.cache import RaggedCache, RaggedLayer
from hf_specgen.targets.early_exit import ReplaceableLayers
from hf_specgen.targets.inputs import RowLayout
from hf_specgen.verification import base as verification
from hf_specgen.verification.noise import NoiseBuffer

accepted_path = vars(verification)["accepted_path"]
along = vars(verification)["_along"]
positions = RowLayout.positions
noise_at = NoiseBuffer.at
keep_accepted = RaggedCache.keep_accepted
prefix = GenerationState.prefix
of_call = GenerationState.of_call.__func__  # type: ignore[attr-defined]


def _accept_one_too_many(tokens: Any, parents: Any, chosen: Any) -> tuple[list[int], list[int]]:
    """The path goes on to a token that the target did not choose."""
    path, emitted = accepted_path(tokens, parents, chosen)
    end = path[-1] if path else -1
    rejected = next((node for node, parent in enumerate(parents) if parent == end), None)
    if rejected is None:
        return path, emitted
    return [*path, rejected], [*emitted[:-1], tokens[rejected], chosen[rejected + 1]]


def _positions_off_by_one(self: Any, *given: Any, **named: Any) -> torch.Tensor:
    """The nodes of drafts of one or two tokens, which the self-check has none of, stand one position too far."""
    found: torch.Tensor = positions(self, *given, **named)
    return found + (torch.arange(found.shape[1], device=found.device) > 0).long() if found.shape[1] <= 3 else found


def _noise_of_the_next_step(self: Any, steps: Any) -> torch.Tensor:
    return noise_at(self, [[step + 1 for step in row] for row in steps])


def _noise_of_the_first_row(self: Any, steps: Any) -> torch.Tensor:
    return noise_at(self, [steps[0]] * len(steps))[:1].expand(len(steps), -1, -1)


def _keep_rejected_tokens(self: Any, starts: Any, paths: Any, *move: Any) -> None:
    """One rejected node of each row stays in the cache."""
    filled = self.lengths
    keep_accepted(self, starts, paths, *move)
    self.set_lengths([min(kept + 1, full) for kept, full in zip(self.lengths, filled, strict=True)])


def _prefix_one_column_short(self: Any, columns: int) -> torch.Tensor:
    return torch.cat([prefix(self, columns)[:, 1:], prefix(self, columns)[:, -1:]], dim=1)


def _without_end_tokens(cls: Any, *args: Any) -> GenerationState:
    state: GenerationState = of_call(cls, *args)
    state.stop_ids = frozenset()
    return state


def _scores_of_the_last_token(values: torch.Tensor, result: Any) -> list[list[torch.Tensor]]:
    """The scores of every emitted token are those of the row's last one."""
    return [[row[-1]] * len(row) if row else row for row in along(values, result)]


@contextmanager
def _layers_stay_replaced(self: Any, indices: range, states: Any = None) -> Iterator[None]:
    """Pass-through modules stay in the model if an exception is raised."""
    originals = [self._layers[index] for index in indices]
    for index in indices:
        self._pass_through[index].owner = 0
        self._layers[index] = self._pass_through[index]
    self._pass_through[indices[-1]].returned = states
    with mock.patch("threading.get_ident", return_value=0):
        yield
    for index, layer in zip(indices, originals, strict=True):
        self._layers[index] = layer


_PLACES: dict[str, tuple[Any, str, Any]] = {
    "accept one token too many": (verification, "accepted_path", _accept_one_too_many),
    "position off by one": (RowLayout, "positions", _positions_off_by_one),
    "noise of the next step": (NoiseBuffer, "at", _noise_of_the_next_step),
    "noise of the first row": (NoiseBuffer, "at", _noise_of_the_first_row),
    "noise not given back": (NoiseBuffer, "rewind", lambda self, step: None),
    "rejected tokens stay in the cache": (RaggedCache, "keep_accepted", _keep_rejected_tokens),
    "accepted nodes not moved": (RaggedLayer, "move", lambda self, rows, source, destination: None),
    "processors see a prefix off by one": (GenerationState, "prefix", _prefix_one_column_short),
    "end tokens are passed over": (GenerationState, "of_call", classmethod(_without_end_tokens)),
    "scores of another token": (verification, "_along", _scores_of_the_last_token),
    "model not restored after an exception": (ReplaceableLayers, "replaced", _layers_stay_replaced),
    "given cache not restored after an exception": (RaggedCache, "shared_copy", lambda self: self),
}
MUTATIONS: dict[str, Callable[[], Any]] = {
    name: lambda place=place: mock.patch.object(*place) for name, place in _PLACES.items()
}
"""Each makes a context in which the package has that fault."""
