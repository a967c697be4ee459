"""The interface of drafters with a forward pass: a draft model, a draft head, or layers of the target in one call.

A drafter has the passes, caches and states. `DrafterSession` owns it, turns its logits into draft tokens, and chooses
which nodes are expanded and which are verified:

    take_uncached     the text that the drafter has not processed
      forward_text    its pass: logits after each row's last token    a pass a level: draft models, EAGLE, MTP, Hydra,
      forward_nodes   a pass over nodes: logits after each of them    Gemma 4, early exit
    or
      forward_depths  its pass: logits of all depths                  one pass: Medusa, P-EAGLE, DFlash, DSpark, PARD
    commit            the nodes that the target accepted, after the verification
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from hf_specgen.device_tree import Frontier
from hf_specgen.targets.passes import CapturablePasses


class UncachedInput(Protocol):
    """What is new in the texts of the rows, in the form that a drafter processes."""

    @property
    def depths(self) -> Sequence[int]:
        """How deep each row's draft can be at most; 0 for a row that does not draft."""

    @property
    def tokens_per_pass(self) -> Sequence[int]:
        """Tokens, over all rows, of each pass that processes the text; without the drafter's prefill."""


T = TypeVar("T", bound=UncachedInput)


class DepthLogits(NamedTuple):
    """Logits of several depths that one pass predicts, after each of the likely tokens of the depth before."""

    logits: torch.Tensor  # [batch, depths, previous, candidates] float32; one `previous` for heads that do not read it
    # [batch, depths, candidates] the tokens that the logits are of, of which the first ones are the previous tokens of
    # the next depth; None: all tokens of the vocabulary.
    candidates: torch.Tensor | None = None


class Drafter(ABC, Generic[T]):
    """Base class of drafters.

    A subclass has `take_uncached`, and `forward_text` and `forward_nodes`, or `forward_depths`.

    What the other methods do by default is right for drafters that keep nothing from draft to draft.
    """

    modules: Sequence[nn.Module] = ()  # that its passes run, but the target and draft models, which are `Target`s
    max_depth: float = inf  # how many tokens deep a draft can be
    is_one_pass: bool = False  # whether all depths are drafted in one pass, by `forward_depths`
    drafts_chains: bool = False  # whether passes cannot run on the branches of a tree
    rows_can_change: bool = False  # whether rows can join and leave between steps, by `keep_rows` and `append_rows`
    token_ids: torch.Tensor | None = None
    """`[draft vocab]` the target's token id of each logit; None if the logits are of all tokens in their order."""
    expanded_nodes_first: bool = False
    """Whether the nodes of a finished tree must begin with the expanded nodes, in the order of their expansion: where
    the verification reuses what the drafter computed for them (early exit)."""
    single_pass_tokens: int = 0
    """Tokens of each row in the pass of `forward_text`, if deeper levels need no further pass; 0 if each level does."""

    @abstractmethod
    def take_uncached(self, max_depths: Sequence[int]) -> T | None:
        """Return the text that no earlier call has returned, for a draft of these depths; None if no row can draft.

        Called once in every step, with zeros for rows that do not draft.
        """

    def forward_text(self, text: T) -> torch.Tensor:
        """Process new text: `[batch, draft vocab]` logits after each row's last token."""
        raise NotImplementedError

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        """Process the nodes of a frontier: `[batch, new, draft vocab]` logits after each of them."""
        raise NotImplementedError

    def forward_depths(self, text: T, depth: int) -> DepthLogits:
        """Process new text, and predict at least `depth` depths; of each row those up to its own depth are used."""
        raise NotImplementedError

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was computed for accepted nodes, and drop what was computed for others. Called after every step.

        Args:
            paths: of each row the accepted nodes that were expanded: 0 is the node that was expanded first. Empty for
                drafters that expand no nodes.
        """

    def capturable_passes(self, text: T | None = None) -> CapturablePasses | None:
        """What the session needs for several levels in one captured function; with `text`, a pass over it comes first.

        None if these passes cannot be captured: then `forward_text` and `forward_nodes` are used.
        """
        return None

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, in this order; the state of the call has their texts already."""

    def append_rows(self, new: int) -> None:
        """Add new rows after the present ones; the state of the call has their texts already."""
