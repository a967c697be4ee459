"""Runs draft heads over a batch: one runner for each kind of head, each with the head's cache and its active rows.

The cache keeps only entries computed from the target's features. Entries of draft nodes are appended after them and
dropped before the next accepted tokens are processed with the features that the target has computed for them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self, cast

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from hf_specgen.call import Compile
from hf_specgen.device_tree import Frontier
from hf_specgen.heads.base import BoundHead, HeadOutput
from hf_specgen.heads.block import BlockConfig
from hf_specgen.targets import masks
from hf_specgen.targets.cache import RaggedCache, padded_width
from hf_specgen.targets.graphs import captured_functions
from hf_specgen.targets.inputs import spread_rows
from hf_specgen.targets.passes import MAX_CAPTURED, LevelPasses, NewText

PREFILL_CHUNK = 512
"""Positions per pass: the size of a pass's mask then grows linearly with the context, not quadratically."""


@lru_cache(maxsize=16)
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


class HeadRunner:
    """Base class: a head's cache in one call, whose first `lengths[b]` slots are accepted tokens, and active `rows`."""

    token_ids: torch.Tensor | None = None
    """`[draft vocab]` the target's ids of the draft vocabulary; None: logits are of all tokens."""
    keeps_all = False
    """Whether rows that are no longer needed are kept."""

    def __init__(self, bound: BoundHead, batch: int):
        self.bound, self.cache, self.lengths, self.rows = bound, RaggedCache(), [0] * batch, list(range(batch))
        self._batch, self._like = batch, next(bound.head.parameters())

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        """Continue with these rows of the call, and `new` ones after them for which nothing was computed yet.

        None has been dropped before.
        """
        self._batch = len(kept) + new
        self.rows, self.lengths = list(range(self._batch)), [*(self.lengths[row] for row in kept), *[0] * new]
        self._select([*kept, *[0] * new])
        self.cache.set_lengths(self.lengths)

    def read_prompts(self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]]) -> None:
        """Process the prompts of the last rows, for which nothing was computed yet, without the other rows."""
        other = type(self)(self.bound, len(features))
        other.first_logits(features, next_tokens, [True] * len(features))
        self._put_last(other)

    def first_logits(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool]
    ) -> torch.Tensor:
        """`[batch, vocab]` logits of the first draft token after new accepted positions.

        Args:
            features: of each row `[new, layers * target_hidden]`.
            next_tokens: of each row the tokens after these positions.
            needed: rows that are not needed any more are dropped, unless passes are captured.
        """
        return self._scatter(self._first(*self._new(features, next_tokens, needed)))

    def next_logits(self, frontier: Frontier) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the nodes of a frontier, of trees that have grown since `first_logits`."""
        return self._scatter(self._next(frontier.select(self.rows)))

    @abstractmethod
    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        """`first_logits` of the active rows."""

    def _next(self, frontier: Frontier) -> torch.Tensor:
        """`next_logits` of the active rows; heads that draft all depths in one pass have none."""
        raise NotImplementedError

    def _put_last(self, other: Self) -> None:
        """Use what another runner has computed for the last rows."""
        first = len(self.lengths) - len(other.lengths)
        self.lengths[first:] = other.lengths
        self.cache.batch_select_indices(torch.arange(first))
        self.cache.add_rows(other.cache)

    def _select(self, rows: list[int]) -> None:
        """Continue with what was computed for these rows."""
        self.cache.batch_select_indices(torch.tensor(rows))

    def _new(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool]
    ) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The new features and tokens of the active rows, in the dtype and on the device of the head.

        Drops entries of draft nodes, and rows that are no longer needed unless that would be all of them.
        """
        kept = [index for index, row in enumerate(self.rows) if self.keeps_all or needed[row]]
        if 0 < len(kept) < len(self.rows):
            self.rows, self.lengths = [self.rows[index] for index in kept], [self.lengths[index] for index in kept]
            self._select(kept)
        self.cache.set_lengths(self.lengths)
        return [features[row].to(self._like) for row in self.rows], [list(next_tokens[row]) for row in self.rows]

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
        return run_head(self.bound.head, inputs, self.cache)

    def _places(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of `count` tokens after those in the cache, and their mask."""
        return self._positions(count), masks.chain_mask(self.lengths, count, self._like.device)

    def _scatter(self, values: torch.Tensor) -> torch.Tensor:
        """`[active, …]` values to `[batch, …]`, with zeros for rows that were dropped."""
        return spread_rows(values, self.rows, self._batch)

    def _positions(self, count: int) -> torch.Tensor:
        """`[active, count]` the positions after those in the cache."""
        device = self._like.device
        if len(set(self.lengths)) == 1:  # without a tensor from host data
            first = self.lengths[0]
            return torch.arange(first, first + count, device=device).expand(len(self.lengths), -1)
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device)

    def restart(self, row: int) -> None:
        """Forget what was computed for a row of the call."""
        if row in self.rows:
            self.lengths[self.rows.index(row)] = 0
            self.cache.set_lengths(self.lengths)

    def _commit(self, new: Sequence[int]) -> None:
        """Keep the first `new[b]` entries that were appended to row b, and drop the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)


class EagleRunner(HeadRunner):
    """Runs an EAGLE or MTP head over accepted tokens, then over draft nodes with its own output as features."""

    last: HeadOutput

    def __init__(self, bound: BoundHead, batch: int, graphs: Compile = False):
        super().__init__(bound, batch)
        self.token_ids = bound.head.draft_to_target
        self._graphs = captured_functions(bound.head) if graphs else None
        self.keeps_all = self._graphs is not None  # another number of rows would be captured anew
        self._mode, self._hidden = graphs, self._like.new_zeros(batch, 0, 0)

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        self._keep_last(*self._read(features, tokens))
        self._hidden = self.last.hidden
        return self.bound.logits(self.last.output)[:, 0]

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        if hasattr(self, "last"):
            self.last = HeadOutput(*(part[rows] for part in self.last))

    def _run(self, inputs: HeadInputs) -> HeadOutput:
        """One pass of the head, which appends to the cache; as a graph if it is short."""
        batch, length = inputs.positions.shape
        if self._graphs is None or self._graphs.failure is not None or length > MAX_CAPTURED or not self.cache.lengths:
            return run_head(self.bound.head, inputs, self.cache)
        width, lengths = padded_width(length), self.cache.lengths
        capacity = self._graphs.capacity(self.bound.head, self.cache, width, self._mode)
        if not capacity:
            return run_head(self.bound.head, inputs, self.cache)
        more = (0, width - length)
        mask = inputs.mask.new_zeros(batch, 1, width, capacity)
        mask[:, :, :length, : inputs.mask.shape[3]] = inputs.mask
        mask[:, :, length:, 0] = True  # a query that sees nothing would write NaN into the cache
        embeddings, hidden = (pad(part, (0, 0, *more)) for part in (inputs.embeddings, inputs.hidden))
        padded = HeadInputs(embeddings, hidden, pad(inputs.positions, more), mask)
        eager = padded._replace(mask=mask[..., : max(lengths) + width])
        run = lambda: run_head(self.bound.head, eager, self.cache)  # noqa: E731
        output = self._graphs.run(run_head, self.bound.head, padded, self.cache, width, mode=self._mode, eagerly=run)
        self.cache.set_lengths([before + length for before in lengths])
        return HeadOutput(*(part[:, :length] for part in output))

    def _keep_last(self, output: HeadOutput, new: Sequence[int]) -> None:
        """Keep the output at the last of `new[b]` positions of row b of a pass; of a row without any, what was kept."""
        if 0 < new[0] == max(new) == min(new):
            self.last = HeadOutput(*(part[:, new[0] - 1 : new[0]] for part in output))
            return
        ends = torch.tensor(new, device=self._like.device) - 1
        rows = torch.arange(len(new), device=self._like.device)
        last = [part[rows, ends.clamp(min=0)][:, None] for part in output]
        if 0 in new and hasattr(self, "last"):
            is_new = (ends >= 0)[:, None, None]
            last = [torch.where(is_new, now, before) for now, before in zip(last, self.last, strict=True)]
        self.last = HeadOutput(*last)

    def level_passes(self) -> LevelPasses | None:
        """What passes over several levels in one captured function need; None if nothing is captured."""
        if self._graphs is None or self._graphs.failure is not None:
            return None
        level = EagleLevel(self.bound.weights, self.bound.of_head(None))
        return LevelPasses(self._graphs, self._mode, self.bound.head, self.cache, level, self._hidden)

    def new_text(self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]]) -> NewText | None:
        """New accepted positions of every row, for a captured function; None if a row has none or too many."""
        counts = [len(row) for row in next_tokens]
        if not self.cache.lengths or not 0 < min(counts) <= max(counts) <= MAX_CAPTURED:
            return None
        states, rows = self._new(features, next_tokens, ())
        self._counts = counts
        return NewText.of(rows, padded(states, [slice(0, count) for count in counts]))

    def after_text(self, hidden: torch.Tensor, output: torch.Tensor) -> None:
        """Store the results of new positions that a captured function has processed."""
        self.last = HeadOutput(hidden, output)
        self.lengths = [length + count for length, count in zip(self.lengths, self._counts, strict=True)]

    def after_levels(self, states: torch.Tensor) -> None:
        """Store the states of passes that were made by a captured function."""
        self._hidden = states

    def _next(self, frontier: Frontier) -> torch.Tensor:
        depths, ancestors = frontier.structure()
        new = frontier.tokens.shape[1]
        roots = [length - 1 for length in self.lengths]  # the last accepted position, of depth 0
        layout = masks.StepLayout.after(roots, depths, ancestors)
        embeddings = self.bound.embed(frontier.tokens.to(depths.device))
        hidden = frontier.gather_parents(self._hidden)
        position: Any = layout.starts + frontier.depth
        if isinstance(position, int):  # without an operation
            position = _numbers(padded_width(1 + position), depths.device)[position]
        positions, mask = position.expand(frontier.batch, new), masks.full_mask(layout)[:, :, -new:]
        output = self._run(HeadInputs(embeddings, hidden, positions, mask))
        self._hidden = output.hidden
        return self.bound.logits(output.output)


@dataclass(frozen=True)
class EagleLevel:
    """One pass of a head over nodes of a draft tree, see `LevelPasses`; equal for the same weights.

    It does not hold the head, which would never be freed: the graphs of a module last as long as the module.
    """

    weights: tuple[int, ...]
    bound: BoundHead = field(compare=False)

    def __call__(
        self,
        head: Any,
        tokens: torch.Tensor,
        layout: masks.StepLayout,
        states: torch.Tensor,
        offsets: None,
        cache: Any,
        is_text: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bound, positions = self.bound.of_head(head), layout.depths[:, -tokens.shape[1] :] + layout.starts
        states = head.combine(states) if is_text else states
        output = run_head(head, HeadInputs(bound.embed(tokens), states, positions, masks.full_mask(layout)), cache)
        return bound.logits(output.output), output.hidden, output.output


class ParallelRunner(HeadRunner):
    """Base class of runners of heads that draft all tokens in the pass over new accepted positions, or in one after."""

    def draft(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool], depth: int
    ) -> torch.Tensor:
        """Process new accepted positions, as `first_logits`, and draft: `[batch, depth, vocab]`."""
        output = self._outputs(*self._new(features, next_tokens, needed), depth)
        return self._scatter(self.bound.target_logits(output))

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        return self.bound.target_logits(self._outputs(features, tokens, 1)[:, 0])

    @abstractmethod
    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        """`[active, depth, hidden]` what the output matrix receives."""


class PEagleRunner(ParallelRunner):
    """Runs a P-EAGLE head: mask tokens and a learned feature m stand for unknown positions.

    position           i-1    i             i+1      i+2
    feature            f      f             m        m
    token embedded     t(i)   t(i+1)        mask     mask
    prediction                draft 1       draft 2  draft 3
    """

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        head: Any = self.bound.head
        masked, device = depth - 1, self._like.device
        states = [torch.cat([row, head.mask_hidden[0].expand(masked, -1)]) for row in features]
        output, counts = self._read(states, [[*row, *[head.config.mask_token_id] * masked] for row in tokens], masked)
        places = torch.tensor(counts, device=device)[:, None] - 1 + torch.arange(depth, device=device)
        return cast(torch.Tensor, output.output[torch.arange(len(counts), device=device)[:, None], places.clamp(min=0)])


class BlockRunner(ParallelRunner):
    """Runs a block head (DFlash, JetSpec): new features extend the context, then a block is drafted after it.

    cache              c0 … c(n-1)  |  anchor  mask  mask  mask        c: context, from the target's features
    """

    def __init__(self, bound: BoundHead, batch: int):
        super().__init__(bound, batch)
        self.config = cast(BlockConfig, bound.head.config)
        self.depth = self.config.depth

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        first = self.config.first_proposing_position
        # Unless all attention inside the block is causal, the mask tokens attend to each other: a whole block.
        causal = all(attention.causal for attention in self.config.attention)
        size = min(first + depth, self.config.block_size) if causal else self.config.block_size
        return self._block(features, tokens, size)[:, first : first + depth]

    def _block(self, features: list[torch.Tensor], tokens: Sequence[Sequence[int]], size: int) -> torch.Tensor:
        """`[active, size, hidden]` outputs at the positions of a block after the new accepted ones."""
        head: Any = self.bound.head
        device = self._like.device
        self._anchor = torch.tensor([row[-1] if row else 0 for row in tokens], device=device)
        states = padded(features, [slice(None)] * len(features))
        head.extend(states, self._positions(states.shape[1]), self.cache)
        self._commit([len(row) for row in features])
        blocks = torch.full((len(features), size), self.config.mask_token_id, device=device)
        blocks[:, 0] = self._anchor
        output: HeadOutput = head(self.bound.embed(blocks), self._positions(size), self.cache, self.lengths)
        self.cache.set_lengths(self.lengths)
        return output.output


def padded(rows: Sequence[torch.Tensor], parts: Sequence[slice]) -> torch.Tensor:
    """`[rows, longest, …]` a part of each row, with zeros on the right."""
    if len(rows) == 1:
        return rows[0][parts[0]][None]
    return pad_sequence([row[part] for row, part in zip(rows, parts, strict=True)], batch_first=True)


class HeadInputs(NamedTuple):
    """The inputs of a pass, as for `Eagle3Head.forward`."""

    embeddings: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def run_head(head: Any, inputs: HeadInputs, cache: Any) -> HeadOutput:
    """One pass of a head over the entries of a cache."""
    output: HeadOutput = head(*inputs, cache)
    return output
