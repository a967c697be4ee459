"""Base class of drafters with a head that reads the target's hidden states of all accepted tokens.

The cache keeps only entries computed from the target's features. Entries of draft nodes are appended after them and
dropped before the next accepted tokens are processed with the features that the target has computed for them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_specgen.device_tree import Frontier
from hf_specgen.drafter import DepthLogits, Drafter
from hf_specgen.heads.base import BoundHead, HeadInputs, HeadOutput
from hf_specgen.heads.head_text import FeatureSource, HeadText
from hf_specgen.targets import masks
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.row_layout import scatter_rows

PREFILL_CHUNK = 512
"""Positions per pass: the size of a pass's mask then grows linearly with the context, not quadratically."""


class HeadDrafter(Drafter[HeadText]):
    """Base class: a head's cache in one call, whose first `lengths[b]` slots are accepted tokens, and active `rows`."""

    rows_can_change = True
    reads_all_rows = False
    """Whether the new text of rows that do not draft is read too."""
    keeps_all = False
    """Whether rows that have ended are kept."""

    def __init__(self, bound: BoundHead, source: FeatureSource, batch: int):
        super().__init__()
        self.bound = bound
        self.modules = (bound.head, bound.output_matrix)
        self.cache = RaggedCache()
        self.lengths = [0] * batch
        self.rows = list(range(batch))
        self._source = source
        self._batch = batch
        self._like = next(bound.head.parameters())

    def take_uncached(self, max_depths: Sequence[int]) -> HeadText | None:
        """The features that the head has not processed; None if no row drafts."""
        new = self._source.pop_text(max_depths, of_all_rows=self.reads_all_rows)
        if new is None:
            return None
        for row in new.restarted:
            self._restart(row)
        return new._replace(depths=max_depths, tokens_per_pass=self._passes(new, max_depths))

    def _passes(self, new: HeadText, max_depths: Sequence[int]) -> list[int]:
        """Tokens, over all rows, of the passes that process new text; none for prompts that no block follows."""
        if self.is_one_pass:
            return [sum(new.active) * max(max_depths)]
        if self.single_pass_tokens:
            return [sum(new.active) * self.single_pass_tokens]
        return [] if new.is_first else [sum(map(len, new.tokens))]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Receive the target's hidden states of the accepted tokens; entries of draft nodes are not kept."""
        self._source.receive()

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows of the call, none of which has been dropped."""
        self._source.keep_rows(kept)
        self._batch = len(kept)
        self.rows = list(range(len(kept)))
        self.lengths = [self.lengths[row] for row in kept]
        if kept:
            self._select(list(kept))
        else:
            self.cache = RaggedCache()

    def append_rows(self, new: int) -> None:
        """Add rows, and process their prompts if those of the other rows were processed."""
        first = self._batch
        self._source.append_rows(new)
        self._batch += new
        self.rows = list(range(self._batch))
        self.lengths += [0] * new
        if self.cache.lengths:
            other = type(self)(self.bound, self._source, new)
            other.forward_text(self._source.pop_prompts(first))
            self._add_last(other)

    def forward_text(self, text: HeadText) -> torch.Tensor:
        """`[batch, draft vocab]` logits of the first draft token after new accepted positions.

        Rows that have ended are dropped, unless passes are captured.
        """
        return self._scatter(self._first(*self._new(text)))

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        """`[batch, new, draft vocab]` logits after the last nodes of a tree, after `forward_text`."""
        return self._scatter(self._next(frontier.select(self.rows)))

    def forward_depths(self, text: HeadText, depth: int) -> DepthLogits:
        """Process new accepted positions, and predict `depth` depths independently of each other."""
        output = self._outputs(*self._new(text), depth)
        return DepthLogits(self._scatter(self.bound.target_logits(output)).float()[:, :, None])

    @abstractmethod
    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        """`forward_text` of the active rows."""

    def _next(self, frontier: Frontier) -> torch.Tensor:
        """`forward_nodes` of the active rows; heads that draft all depths in one pass have none."""
        raise NotImplementedError

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        """`[active, depth, hidden]` what the output matrix receives, of heads that draft all depths in one pass."""
        raise NotImplementedError

    def _add_last(self, other: Self) -> None:
        """Use what another drafter has computed for the last rows."""
        self.lengths[len(self.lengths) - len(other.lengths) :] = other.lengths
        self.cache.append_rows(other.cache)

    def _select(self, rows: list[int]) -> None:
        """Continue with what was computed for these rows."""
        self.cache.batch_select_indices(torch.tensor(rows))

    def _restart(self, row: int) -> None:
        """Forget what was computed for a row of the call."""
        if row in self.rows:
            self.lengths[self.rows.index(row)] = 0
            self.cache.set_lengths(self.lengths)

    def _new(self, text: HeadText) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The new features and tokens of the active rows, in the dtype and on the device of the head.

        Drops entries of draft nodes, and rows that have ended unless that would be all of them.
        """
        kept = [index for index, row in enumerate(self.rows) if self.keeps_all or text.active[row]]
        if 0 < len(kept) < len(self.rows):
            self.rows = [self.rows[index] for index in kept]
            self.lengths = [self.lengths[index] for index in kept]
            self._select(kept)
        self.cache.set_lengths(self.lengths)
        features = [text.features[row].to(self._like) for row in self.rows]
        return features, [list(text.tokens[row]) for row in self.rows]

    def _read(
        self, features: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]], masked: int = 0
    ) -> tuple[Any, list[int]]:
        """Run the head over new positions, of which the last `masked` are unknown, in passes of `PREFILL_CHUNK`.

        Returns the output of the last pass, in which all rows end, and how many known positions of each row it has.
        """
        known = [len(row) - masked for row in tokens]
        early = [max(0, count - PREFILL_CHUNK) for count in known]
        for start in [*range(0, max(early), PREFILL_CHUNK), max(early)]:
            parts = [slice(min(start, end), min(start + PREFILL_CHUNK, end)) for end in early]
            if start == max(early):
                parts = [slice(end, len(row)) for end, row in zip(early, tokens, strict=True)]
            output = self._pass(features, tokens, parts)
            counts = [min(part.stop, count) - part.start for part, count in zip(parts, known, strict=True)]
            self._commit(counts)
        return output, counts

    def _pass(self, features: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]], parts: Sequence[slice]) -> Any:
        """One pass over a part of each row's new positions, which appends to the cache."""
        head: Any = self.bound.head
        read = padded([torch.tensor(row, dtype=torch.long) for row in tokens], parts)
        states = head.combine(padded(features, parts))
        return self._run(HeadInputs(self.bound.embed(read), states, *self._places(read.shape[1])))

    def _run(self, inputs: HeadInputs) -> HeadOutput:
        """One pass of the head, which appends to the cache."""
        output: HeadOutput = self.bound.head(inputs, self.cache)
        return output

    def _places(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of `count` tokens after those in the cache, and their mask."""
        return self._positions(count), masks.chain_mask(self.lengths, count, self._like.device)

    def _scatter(self, values: torch.Tensor) -> torch.Tensor:
        """`[active, …]` values to `[batch, …]`, with zeros for rows that were dropped."""
        return scatter_rows(values, self.rows, self._batch)

    def _positions(self, count: int) -> torch.Tensor:
        """`[active, count]` the positions after those in the cache."""
        device = self._like.device
        if len(set(self.lengths)) == 1:  # without a tensor from host data
            first = self.lengths[0]
            return torch.arange(first, first + count, device=device).expand(len(self.lengths), -1)
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device)

    def _commit(self, new: Sequence[int]) -> None:
        """Keep the first `new[b]` entries that were appended to row b, and drop the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)


def padded(rows: Sequence[torch.Tensor], parts: Sequence[slice]) -> torch.Tensor:
    """`[rows, longest, …]` a part of each row, with zeros on the right."""
    if len(rows) == 1:
        return rows[0][parts[0]][None]
    return pad_sequence([row[part] for row, part in zip(rows, parts, strict=True)], batch_first=True)
