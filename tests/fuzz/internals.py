"""Everything that the random tester uses beyond the public API of `hf_specgen`: when modules move, only this file does.

- `Scripted` candidates: how a drafter of one's own plugs in;
- `raise_in_drafter`: how a drafter is reached from outside;
- `medusa_heads`, `exit_adapter`: where the model parts are that heads attach to;
- `MUTATIONS`: faults in the package itself that the random tester must find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn

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

__all__ = ["Fixed", "MUTATIONS", "RandomDepths", "Scripted", "exit_adapter", "medusa_heads", "raise_in_drafter"]

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


def medusa_heads(model: Any, ids: torch.Tensor, mask: torch.Tensor, num_heads: int = 3) -> MedusaHeads:
    """Heads that know a text: output matrices by ridge regression from its states to the tokens h + 2 places on."""
    matrix = output_matrix(model)
    states = _inputs_of(matrix, model, ids, mask)
    heads = MedusaHeads.from_target(model, num_heads=num_heads, own_outputs=True)
    for head in range(num_heads):
        distance = head + 2
        weight = _ridge(states[:, :-distance], ids[:, distance:], matrix.weight.shape[0])
        heads.lm_heads[head].weight.data = weight.to(matrix.weight)
    return heads.eval()


def exit_adapter(model: Any, exit_layer: int, ids: torch.Tensor, mask: torch.Tensor) -> nn.Module | None:
    """A linear layer that reads the next token of a text from the state after its first layers, if that is a vector."""
    states = _inputs_of(decoder_layers(model)[exit_layer], model, ids, mask)
    if states.dim() != 3:
        return None
    weight = _ridge(states[:, :-1], ids[:, 1:], output_matrix(model).weight.shape[0]).to(states)
    adapter = nn.Linear(*weight.T.shape, bias=False)
    adapter.weight.data = weight
    return adapter.eval()


def _inputs_of(module: nn.Module, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[batch, length, hidden]` what a module reads while the model reads a text."""
    read: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read.append(args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, position_ids=positions)
    finally:
        handle.remove()
    return read[0].clone()


def _ridge(states: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    x = states.flatten(0, 1).double()
    y = nn.functional.one_hot(tokens.flatten(), vocab).double()
    solution = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=torch.double), x.T @ y)
    return 20 * solution.T


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
