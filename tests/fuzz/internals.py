"""Everything that the random tester uses beyond the public API of `hf_specgen`: when modules move, only this file does.

- `raise_in_drafter`: how a drafter is reached from outside;
- `given_latency`: a latency model, so that an adaptive depth does not depend on measured times;
- `MedusaHeads`, `decoder_layers`, `output_matrix`: heads, and the model parts that they attach to;
- `Eagle1Head`, `BlockHead` and so on: the classes of draft heads; `steer`: how their sessions get right tokens;
- `MUTATIONS`: faults in the package itself that the random tester must find.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from hf_specgen import Call, Candidates, DraftSession, DraftTree
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.heads import MedusaHeads
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.dflash2 import DFlash2Config, DFlash2Head
from hf_specgen.heads.domino import DominoConfig, DominoHead
from hf_specgen.heads.dspark import DSparkConfig, DSparkHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.state import GenerationState
from hf_specgen.targets.cache import RaggedCache, RaggedLayer
from hf_specgen.targets.early_exit import ReplaceableLayers
from hf_specgen.targets.inputs import RowLayout
from hf_specgen.targets.model_parts import decoder_layers, output_matrix
from hf_specgen.verification import base as verification
from hf_specgen.verification.noise import NoiseBuffer
from hf_specgen.verification.top_tokens import TopTokens

__all__ = [
    "MUTATIONS",
    "BlockAttention",
    "BlockConfig",
    "BlockHead",
    "DFlash2Config",
    "DFlash2Head",
    "DSparkConfig",
    "DSparkHead",
    "DominoConfig",
    "DominoHead",
    "DraftHead",
    "Eagle1Head",
    "Eagle3Head",
    "EagleConfig",
    "LayerConfig",
    "MedusaHeads",
    "TopTokens",
    "decoder_layers",
    "given_latency",
    "output_matrix",
    "raise_in_drafter",
    "steer",
]

RAISED = 50.0
"""Added to the score of a token that a head is to propose."""


@contextmanager
def raise_in_drafter(candidates: Candidates, call: int, error: BaseException) -> Iterator[None]:
    """Raise `error` in a drafter's `call`-th draft, after it has done its work."""
    start = candidates.start

    def start_and_count(made_call: Call) -> DraftSession:
        session = start(made_call)
        calls = 0

        def counted(draft: Callable[[Sequence[int]], DraftTree]) -> Callable[[Sequence[int]], DraftTree]:
            def count(budget: Sequence[int]) -> DraftTree:
                nonlocal calls
                calls += 1
                tree = draft(budget)
                if calls == call:
                    raise error
                return tree

            return count

        at_prefill = counted(session.draft_at_prefill)
        vars(session).update(draft=counted(session.draft), draft_at_prefill=at_prefill)
        return session

    with mock.patch.object(candidates, "start", start_and_count):
        yield


def steer(session: Any, texts: Sequence[Sequence[int | None]]) -> Any:
    """Let the session of a head prefer certain tokens; everything that the head does is done.

    Args:
        session: drafts token by token or all depths at once.
        texts: by row the tokens that will be generated; None where the head chooses.
    """
    state = session.call.state

    def raise_score(scores: torch.Tensor, row: int, place: int) -> None:
        token = texts[row][place] if place < len(texts[row]) else None
        if token is not None:
            scores[token] += RAISED

    def first_scores() -> torch.Tensor:
        scores: torch.Tensor = own_first()
        for row, generated in enumerate(state.generated):
            raise_score(scores[row], row, len(generated))
        return scores

    def next_scores(tree: DraftTree, new: int) -> torch.Tensor:
        scores: torch.Tensor = own_next(tree, new)
        for row, generated in enumerate(state.generated):
            for node, depth in enumerate(tree.depths(row)[-new:]):
                raise_score(scores[row, node], row, len(generated) + depth)
        return scores

    def depth_logits(depth: int) -> torch.Tensor:
        scores: torch.Tensor = own_depths(depth)
        for row, generated in enumerate(state.generated):
            for place in range(scores.shape[1]):
                raise_score(scores[row, place], row, len(generated) + place)
        return scores

    if hasattr(session, "depth_logits"):
        own_depths = session.depth_logits
        vars(session)["depth_logits"] = depth_logits
    else:
        own_first, own_next = session.first_scores, session.next_scores
        vars(session).update(first_scores=first_scores, next_scores=next_scores)
    return session


def given_latency() -> LatencyModel:
    """Latencies with which drafting is sometimes faster than plain decoding, and sometimes not."""
    curve = CostCurve((1, 32), (0.010, 0.015), context=256, batch=1)
    return LatencyModel.from_curves(curve, draft_token=0.001)


# Mutations

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
def _layers_stay_replaced(self: Any, indices: range) -> Iterator[None]:
    """Pass-through modules stay in the model if an exception is raised."""
    originals = [self._layers[index] for index in indices]
    for index in indices:
        self._pass_through[index].owner = 0
        self._layers[index] = self._pass_through[index]
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
