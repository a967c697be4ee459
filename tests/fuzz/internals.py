"""Everything that the random tester uses beyond the public API of `hf_specgen`: when modules move, only this file does.

- `Scripted` candidates: how a drafter of one's own plugs in;
- `raise_in_drafter`: how a drafter is reached from outside;
- `MedusaHeads`, `decoder_layers`, `output_matrix`: where the model parts are that heads attach to;
- `MUTATIONS`: faults in the package itself that the random tester must find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Protocol
from unittest import mock

import torch

import hf_specgen.cache
import hf_specgen.emission
import hf_specgen.noise
import hf_specgen.scoring
import hf_specgen.sequences
import hf_specgen.split_target
import hf_specgen.target
import hf_specgen.verification.base
from hf_specgen import Candidates, DraftTree, Policy
from hf_specgen.adaptive import Fixed
from hf_specgen.candidates import DraftContext, Drafter
from hf_specgen.heads import MedusaHeads
from hf_specgen.heads.anatomy import decoder_layers, output_matrix

__all__ = [
    "MUTATIONS",
    "Fixed",
    "MedusaHeads",
    "Nodes",
    "RandomDepths",
    "Script",
    "Scripted",
    "decoder_layers",
    "output_matrix",
    "raise_in_drafter",
]

Nodes = tuple[list[int], tuple[int, ...]]
"""Tokens and parents of a row's draft tree; parent -1 continues the row."""


class Script(Protocol):
    """Proposes tokens for one row; one object a call."""

    def __call__(self, row: int, prompt: list[int], generated: list[int], depth: int) -> Nodes: ...


class Scripted(Candidates):
    """Proposes what a script says.

    Args:
        start: makes the script of a call.
        k: greatest depth of a draft.
        policy: how much of it is used.
    """

    def __init__(self, start: Callable[[], Script], k: int, policy: Policy | None):
        self._start = start
        self.k = k
        self.policy = policy or Fixed()

    def bind(self, context: DraftContext, model: Any) -> Drafter:
        return _ScriptedDrafter(self._start())


class _ScriptedDrafter(Drafter):
    def __init__(self, script: Script):
        self._script = script

    def draft(self, context: DraftContext) -> DraftTree:
        rows = zip(context.prompts, context.generated, context.budget, strict=True)
        return DraftTree.from_nodes(
            [
                self._script(row, prompt, list(generated), depth) if depth else ([], ())
                for row, (prompt, generated, depth) in enumerate(rows)
            ]
        )

    open = draft


@contextmanager
def raise_in_drafter(candidates: Candidates, call: int, error: BaseException) -> Iterator[None]:
    """Raise `error` in a drafter's `call`-th draft, after it has done its work."""
    bind = candidates.bind

    def bind_and_count(context: DraftContext, model: Any) -> Drafter:
        drafter = bind(context, model)
        calls = 0

        def counted(draft: Callable[[DraftContext], DraftTree]) -> Callable[[DraftContext], DraftTree]:
            def count(context: DraftContext) -> DraftTree:
                nonlocal calls
                calls += 1
                tree = draft(context)
                if calls == call:
                    raise error
                return tree

            return count

        vars(drafter).update(draft=counted(drafter.draft), open=counted(drafter.open))
        return drafter

    with mock.patch.object(candidates, "bind", bind_and_count):
        yield


class RandomDepths(Policy):
    """Any depth in any row at any step, plain steps included."""

    def __init__(self, seed: int):
        self._seed = seed

    def begin(self, state: Any) -> None:
        self._random = Random(self._seed)

    def depths(self, state: Any) -> list[int]:
        if self._random.random() < 0.2:
            return [0] * len(state.room)
        return [self._random.choice((0, 1, 2, state.k, state.k)) for _ in state.room]


# Mutations


def _accept_one_too_many(tokens: Any, parents: Any, chosen: Any) -> tuple[list[int], list[int]]:
    """The path goes on to a token that the target did not choose."""
    path, emitted = _accepted_path(tokens, parents, chosen)
    end = path[-1] if path else -1
    rejected = next((node for node, parent in enumerate(parents) if parent == end), None)
    if rejected is None:
        return path, emitted
    return [*path, rejected], [*emitted[:-1], tokens[rejected], chosen[rejected + 1]]


def _positions_off_by_one(self: DraftTree, row: int) -> tuple[int, ...]:
    """The nodes of a draft stand one position too far."""
    first, *others = _depths(self, row)
    return (first, *(depth + 1 for depth in others))


def _noise_of_the_next_step(self: Any, steps: Any) -> torch.Tensor:
    return _noise_at(self, [[step + 1 for step in row] for row in steps])


def _noise_of_the_first_row(self: Any, steps: Any) -> torch.Tensor:
    return _noise_at(self, [steps[0]] * len(steps))[:1].expand(len(steps), -1, -1)


def _keep_rejected_tokens(self: Any, starts: Any, paths: Any) -> None:
    """One rejected node of each row stays in the cache."""
    filled = self.lengths
    _compact(self, starts, paths)
    self.set_lengths([min(kept + 1, full) for kept, full in zip(self.lengths, filled, strict=True)])


def _prefix_one_column_short(self: Any, columns: int) -> torch.Tensor:
    return torch.cat([_prefix(self, columns)[:, 1:], _prefix(self, columns)[:, -1:]], dim=1)


def _without_end_tokens(cls: Any, *args: Any) -> Any:
    sequences = _of_call(*args)
    sequences.stop_ids = frozenset()
    return sequences


def _scores_of_the_last_token(values: torch.Tensor, verdict: Any) -> list[list[torch.Tensor]]:
    """The scores of every emitted token are those of the row's last one."""
    return [[row[-1]] * len(row) if row else row for row in _along(values, verdict)]


@contextmanager
def _passing_without_finally(self: Any, indices: range) -> Iterator[None]:
    originals = [self._layers[index] for index in indices]
    for index in indices:
        self._layers[index] = self._pass_through[index]
    yield
    for index, layer in zip(indices, originals, strict=True):
        self._layers[index] = layer


_accepted_path = hf_specgen.verification.base.accepted_path
_along = hf_specgen.verification.base._along
_depths = DraftTree.depths
_noise_at = hf_specgen.noise.NoiseTape.at
_compact = hf_specgen.cache.SlotCache.compact
_prefix = hf_specgen.sequences.Sequences.prefix
_of_call = hf_specgen.sequences.Sequences.of_call

MUTATIONS: dict[str, Callable[[], Any]] = {
    "accept one token too many": lambda: mock.patch.object(
        hf_specgen.verification.base, "accepted_path", _accept_one_too_many
    ),
    "position off by one": lambda: mock.patch.object(DraftTree, "depths", _positions_off_by_one),
    "noise of the next step": lambda: mock.patch.object(hf_specgen.noise.NoiseTape, "at", _noise_of_the_next_step),
    "noise of the first row": lambda: mock.patch.object(hf_specgen.noise.NoiseTape, "at", _noise_of_the_first_row),
    "noise not given back": lambda: mock.patch.object(hf_specgen.noise.NoiseTape, "rewind", lambda self, step: None),
    "rejected tokens stay in the cache": lambda: mock.patch.object(
        hf_specgen.cache.SlotCache, "compact", _keep_rejected_tokens
    ),
    "accepted nodes not moved": lambda: mock.patch.object(
        hf_specgen.cache.SlotLayer, "move", lambda self, rows, source, destination: None
    ),
    "processors see a prefix off by one": lambda: mock.patch.object(
        hf_specgen.sequences.Sequences, "prefix", _prefix_one_column_short
    ),
    "end tokens are passed over": lambda: mock.patch.object(
        hf_specgen.sequences.Sequences, "of_call", classmethod(_without_end_tokens)
    ),
    "scores of another token": lambda: mock.patch.object(
        hf_specgen.verification.base, "_along", _scores_of_the_last_token
    ),
    "model not restored after an exception": lambda: mock.patch.object(
        hf_specgen.split_target.SplitTarget, "_passing", _passing_without_finally
    ),
    "given cache not restored after an exception": lambda: mock.patch.object(
        hf_specgen.target.Target, "abandon", lambda self: None
    ),
}
