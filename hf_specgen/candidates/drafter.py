"""The interfaces of drafters with a forward pass, and what their sessions have in common.

A drafter has the passes, caches and states of a draft model or draft head in one call. The session that owns it turns
logits into draft tokens, and chooses which nodes are expanded and which are verified:

| session | passes | drafter |
|---|---|---|
| `LevelSession` | one for each level of a tree | `LevelDrafter`: draft models, EAGLE, MTP, Hydra, Gemma 4, early exit |
| `OnePassSession` | one for all depths | `OnePassDrafter`: Medusa, P-EAGLE, DFlash, DSpark, PARD |

A draft begins with `take`, which returns the text that the drafter has not processed, for `read` or `read_depths`.
After the verification, `commit` receives the nodes that the target accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from hf_specgen.call import memory
from hf_specgen.candidates.base import DraftSession, vocabulary_size
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_window import warn_of_length
from hf_specgen.device_tree import Frontier
from hf_specgen.heads.head_text import DepthLogits
from hf_specgen.targets.passes import CapturablePasses
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult


class Text(Protocol):
    """What is new in the texts of the rows, in the form that a drafter reads."""

    @property
    def depths(self) -> Sequence[int]:
        """How deep each row's draft can be at most; 0 for a row that does not draft."""

    @property
    def passes(self) -> Sequence[int]:
        """Tokens, over all rows, of each pass that processes the text; without the drafter's prefill."""


T = TypeVar("T", bound=Text)
T_co = TypeVar("T_co", bound=Text, covariant=True)


class Drafter(Protocol[T_co]):
    """What drafters of both kinds have: new text, accepted nodes, and rows that join and leave."""

    @property
    def rows_can_change(self) -> bool:
        """Whether rows can join and leave between steps, by `keep_rows` and `append_rows`."""

    def take(self, max_depths: Sequence[int]) -> T_co | None:
        """The text that was not taken before, for a draft of these depths; None if no row can draft.

        Called once in every step, with zeros for rows that do not draft.
        """

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was computed for accepted nodes, and drop what was computed for others. Called after every step.

        Args:
            paths: of each row the accepted nodes that were expanded: 0 is the node that was expanded first. Empty for
                drafters that expand no nodes.
        """

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, in this order; the state of the call has their texts already."""

    def append_rows(self, new: int) -> None:
        """Add new rows after the present ones; the state of the call has their texts already."""


class LevelDrafter(Drafter[T], Protocol[T]):
    """A drafter with a forward pass for each level of a draft tree."""

    @property
    def token_ids(self) -> torch.Tensor | None:
        """`[draft vocab]` the target's token id of each logit; None if the logits are of all tokens in their order."""

    @property
    def expanded_nodes_first(self) -> bool:
        """Whether the nodes of a finished tree must begin with the expanded nodes, in the order of their expansion.

        True where the verification reuses what the drafter computed for them (early exit).
        """

    @property
    def single_pass_tokens(self) -> int:
        """Tokens of each row in the pass of `read`, if deeper levels need no further pass; 0 if each level does."""

    def read(self, text: T) -> torch.Tensor:
        """Process new text: `[batch, draft vocab]` logits after each row's last token."""

    def expand(self, frontier: Frontier) -> torch.Tensor:
        """Process the nodes of a frontier: `[batch, new, draft vocab]` logits after each of them."""

    def capture(self, text: T | None = None) -> CapturablePasses | None:
        """What the session needs for several levels in one captured function; with `text`, a pass over it comes first.

        None if these passes cannot be captured: then `read` and `expand` are used.
        """


class OnePassDrafter(Drafter[T], Protocol[T]):
    """A drafter that predicts all depths in one pass."""

    def read_depths(self, text: T, depth: int) -> DepthLogits:
        """Process new text, and predict at least `depth` depths."""


D = TypeVar("D", bound=Drafter)


class DrafterSession(DraftSession, Generic[D]):
    """Base class of sessions that own a drafter with a forward pass.

    Args:
        batch: the rows.
        drafter: runs the passes.
        k, tree: maximum depth and size of a draft.
        watches_length: whether to warn where acceptance falls with the length of the texts, as for drafters that could
            have a window.
    """

    def __init__(self, batch: DraftBatch, drafter: D, k: int, tree: str | int | None, watches_length: bool = False):
        super().__init__(batch)
        self.drafter = drafter
        self.passes: Sequence[int] = []
        self.wants_q = batch.wants_q
        self._k = k
        self._size = tree
        self._vocab = vocabulary_size(batch.model)
        self._tree = DraftTree.empty(batch.state.batch)
        self._by_length: Counter[tuple[int, bool]] | None = None
        self._length_key = "length", batch.call.drafting.key
        if watches_length:
            model = batch.model if batch.call.settings.memory else None
            self._by_length = memory.recall(model, self._length_key, Counter)

    @property
    def rows_can_change(self) -> bool:
        return self.drafter.rows_can_change

    def keep_rows(self, kept: Sequence[int]) -> None:
        self.drafter.keep_rows(kept)

    def append_rows(self, new: int) -> None:
        self.drafter.append_rows(new)

    def observe(self, result: VerificationResult) -> None:
        """Count the outcome, and keep what was computed for accepted nodes."""
        self._count_by_length(result)
        self.drafter.commit(self._expanded_paths(result))

    def _expanded_paths(self, result: VerificationResult) -> list[list[int]]:
        """What `Drafter.commit` receives; here no nodes, as for drafters that expand none."""
        return [[] for _ in result.paths]

    def not_drafted(self, batch: int) -> DraftTree:
        """An empty draft."""
        self._tree = DraftTree.empty(batch)
        return self._tree

    def _count_by_length(self, result: VerificationResult) -> None:
        """Count the drafts, by the bits of the length of their text and by whether a draft token was accepted."""
        if self._by_length is None or not self._tree.nodes:
            return
        for row, path in enumerate(result.paths):
            if path is not None and self._tree.parents[row]:
                length = len(self.batch.state.prompts[row]) + len(self.batch.state.generated[row])
                self._by_length[length.bit_length(), result.accepted[row] > 0] += 1

    def end(self) -> None:
        if self._by_length is not None:
            warn_of_length(self._by_length, self.batch.call.drafting.name)
            if self.batch.call.settings.memory:
                memory.store(self.batch.model, self._length_key, self._by_length)
