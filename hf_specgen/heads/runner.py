"""Runs draft heads over a batch: one runner for each kind of head, each with the head's cache and its active rows.

The cache keeps only entries computed from the target's features. Entries of draft nodes are appended after them and
dropped before the next accepted tokens are processed with the features that the target has computed for them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from hf_specgen.call import Compile
from hf_specgen.heads.base import BoundHead, HeadOutput
from hf_specgen.heads.block import BlockConfig
from hf_specgen.heads.eagle import EagleConfig
from hf_specgen.heads.layers import causal_mask
from hf_specgen.heads.mtp import MTPConfig
from hf_specgen.heads.path_head import PathHead
from hf_specgen.targets import masks
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.graphs import captured_functions, padded_width
from hf_specgen.targets.inputs import spread_rows
from hf_specgen.tree import DraftTree

T = TypeVar("T")
MAX_CAPTURED = 64
"""Longer passes run eagerly: those over a prompt."""
MAX_CANDIDATES = 2048
"""Tokens of a position that are corrected where the vocabulary is large, as in SGLang's drafter for Domino."""
PREFILL_CHUNK = 512
"""Positions per pass: the size of a pass's mask then grows linearly with the context, not quadratically."""


class HeadRunner:
    """Base class: a head's cache in one call, whose first `lengths[b]` slots are accepted tokens, and active `rows`."""

    def __init__(self, bound: BoundHead, batch: int):
        self.bound, self.cache, self.lengths, self.rows = bound, RaggedCache(), [0] * batch, list(range(batch))
        self._batch, self._like = batch, next(bound.head.parameters())

    def _drop(self, needed: Sequence[bool]) -> list[int]:
        """Drop rows that are not needed any more, unless none is; returns the indices of those that stay."""
        kept = [index for index, row in enumerate(self.rows) if needed[row]]
        if not kept or len(kept) == len(self.rows):
            return list(range(len(self.rows)))
        self.rows, self.lengths = [self.rows[index] for index in kept], [self.lengths[index] for index in kept]
        self.cache.batch_select_indices(torch.tensor(kept))
        return kept

    def _gather(self, values: Sequence[T]) -> list[T]:
        """Of values for each row of the call, those of the active rows."""
        return [values[row] for row in self.rows]

    def _scatter(self, values: torch.Tensor) -> torch.Tensor:
        """`[active, …]` values to `[batch, …]`, with zeros for rows that were dropped."""
        return spread_rows(values, self.rows, self._batch)

    def _positions(self, count: int, device: torch.device | None = None) -> torch.Tensor:
        """`[active, count]` the positions after those in the cache."""
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device)

    def _commit(self, new: Sequence[int]) -> None:
        """Keep the first `new[b]` entries that were appended to row b, and drop the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)


class EagleRunner(HeadRunner):
    """Runs an EAGLE or MTP head over accepted tokens, then over draft nodes with its own output as features."""

    last: HeadOutput

    def __init__(self, bound: BoundHead, batch: int, graphs: Compile = False):
        super().__init__(bound, batch)
        self._graphs = captured_functions(bound.head) if graphs else None
        self._mode, self._hidden = graphs, self._like.new_zeros(batch, 0, 0)

    def first_logits(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool]
    ) -> torch.Tensor:
        """`[batch, vocab]` logits of the first draft token; arguments as for `extend`."""
        return self.bound.target_logits(self.extend(features, next_tokens, needed).output)[:, 0]

    def next_logits(self, tree: DraftTree, new: int) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last `new` nodes of a tree with all nodes since `extend`."""
        return self.bound.target_logits(self.expand(tree, new).output)

    def extend(
        self,
        features: Sequence[torch.Tensor],
        next_tokens: Sequence[Sequence[int]],
        needed: Sequence[bool] | None = None,
    ) -> HeadOutput:
        """Run the head on new accepted positions: by row `[new, layers * target_hidden]`, and the next tokens.

        Returns the output at the last position. Rows that are not needed are dropped, unless passes are captured.
        """
        if needed is not None and self._graphs is None:  # another number of rows would be captured anew
            kept = self._drop(needed)
            if hasattr(self, "last"):
                self.last = HeadOutput(*(part[kept] for part in self.last))
        self.cache.set_lengths(self.lengths)
        rows = self._gather(next_tokens)
        new = [len(row) for row in rows]
        states = pad_sequence([row.to(self._like) for row in self._gather(features)], batch_first=True)
        tokens = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
        head: Any = self.bound.head
        for start in range(0, max(new), PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            count = chunk.shape[1]
            hidden = head.combine(states[:, start : start + PREFILL_CHUNK])
            mask = causal_mask(self.lengths, count)
            output = self._run(HeadInputs(self.bound.embed(chunk), hidden, self._positions(count), mask))
            self._keep_last(output, [min(max(length - start, 0), count) for length in new])
        self._hidden = self.last.hidden
        return HeadOutput(*map(self._scatter, self.last))

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
        """Commit the first `new[b]` positions of row b of a pass."""
        self._commit(new)
        ends = torch.tensor(new, device=self._like.device) - 1
        rows = torch.arange(len(new), device=self._like.device)
        last = [part[rows, ends.clamp(min=0)][:, None] for part in output]
        if 0 in new and hasattr(self, "last"):
            is_new = (ends >= 0)[:, None, None]
            last = [torch.where(is_new, now, before) for now, before in zip(last, self.last, strict=True)]
        self.last = HeadOutput(*last)

    def expand(self, tree: DraftTree, new: int) -> HeadOutput:
        """The output `[batch, new, hidden]` at the last `new` nodes of a tree with all nodes since `extend`."""
        tree = tree if len(self.rows) == tree.batch else tree.select(self.rows)
        first, (parents, depths, ancestors) = tree.nodes - new, tree.structure()
        roots = [length - 1 for length in self.lengths]  # the last accepted position, of depth 0
        layout = masks.StepLayout(roots, depths, ancestors, None, max(self.lengths) + tree.nodes)
        embeddings = self.bound.embed(tree.input_tokens(depths.device)[:, first:])
        index = parents[:, first:, None].expand(-1, -1, self._hidden.shape[2])
        hidden = self._hidden.gather(1, index.to(self._hidden.device))
        positions, mask = depths[:, 1 + first :] + layout.starts, masks.full_mask(layout)[:, :, 1 + first :]
        output = self._run(HeadInputs(embeddings, hidden, positions, mask))
        self._hidden = torch.cat([self._hidden, output.hidden], dim=1)
        return HeadOutput(*map(self._scatter, output))


class ParallelRunner(HeadRunner):
    """Base class of runners of heads that draft all tokens in the pass over new accepted positions, or in one after."""

    def draft(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool], depth: int
    ) -> torch.Tensor:
        """Process new accepted positions as `EagleRunner.extend`, and draft after them: `[batch, depth, vocab]`."""
        self._drop(needed)
        states = [row.to(self._like) for row in self._gather(features)]
        output = self._outputs(states, [list(row) for row in self._gather(next_tokens)], depth)
        return self._scatter(self.bound.target_logits(output))

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
        early = [max(0, len(row) - PREFILL_CHUNK) for row in tokens]
        for start in range(0, max(early), PREFILL_CHUNK):
            parts = [slice(start, min(start + PREFILL_CHUNK, end)) for end in early]
            rows = zip(features, tokens, parts, strict=True)
            self._pass([(states[part], row[part]) for states, row, part in rows], masked=0)
        rest = [(states[end:], row[end:]) for states, row, end in zip(features, tokens, early, strict=True)]
        output = self._pass(rest, masked=depth - 1)
        device = output.device
        first = torch.tensor([len(row) for _, row in rest], device=device) - 1
        indices = first[:, None] + torch.arange(depth, device=device)
        return output[torch.arange(len(rest), device=device)[:, None], indices.clamp(min=0)]

    def _pass(self, rows: Sequence[tuple[torch.Tensor, list[int]]], masked: int) -> torch.Tensor:
        """One pass over new positions of each row and `masked` positions after them: `[rows, new + masked, hidden]`."""
        head: Any = self.bound.head
        unknown = head.mask_hidden[0].expand(masked, -1)
        features = pad_sequence([torch.cat([states, unknown]) for states, _ in rows], batch_first=True)
        mask_tokens = [cast(EagleConfig, head.config).mask_token_id] * masked
        tokens = pad_sequence([torch.tensor([*row, *mask_tokens], dtype=torch.long) for _, row in rows], True)
        positions = self._positions(tokens.shape[1], self._like.device)
        mask = causal_mask(self.lengths, tokens.shape[1], self._like.device)
        output = head(self.bound.embed(tokens), head.combine(features), positions, mask, self.cache).output
        self._commit([len(row) for _, row in rows])
        return cast(torch.Tensor, output)


class BlockRunner(ParallelRunner):
    """Runs a block head (DFlash, JetSpec): new features extend the context, then a block is drafted after it.

    cache              c0 … c(n-1)  |  anchor  mask  mask  mask        c: context, from the target's features
    """

    def __init__(self, bound: BoundHead, batch: int):
        super().__init__(bound, batch)
        self._config = cast(BlockConfig, bound.head.config)
        self.depth = self._config.depth

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        first = self._config.first_proposing_position
        # Unless all attention inside the block is causal, the mask tokens attend to each other: a whole block.
        causal = all(attention.causal for attention in self._config.attention)
        size = min(first + depth, self._config.block_size) if causal else self._config.block_size
        return self._block(features, self._anchors(tokens), size)[:, first : first + depth]

    def _anchors(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[active]` the last known token of each row."""
        return torch.tensor([row[-1] if row else 0 for row in tokens], device=self._like.device)

    def _block(self, features: list[torch.Tensor], anchors: torch.Tensor, size: int) -> torch.Tensor:
        """`[active, size, hidden]` outputs at the positions of a block after the new accepted ones."""
        head: Any = self.bound.head
        device = self._like.device
        states = pad_sequence(features, batch_first=True)
        head.extend(states, self._positions(states.shape[1], device), self.cache)
        self._commit([len(row) for row in features])
        blocks = torch.full((len(features), size), self._config.mask_token_id, device=device)
        blocks[:, 0] = anchors
        output: HeadOutput = head(self.bound.embed(blocks), self._positions(size, device), self.cache, self.lengths)
        self.cache.set_lengths(self.lengths)
        return output.output


class LayoutVotes:
    """Which position of a block proposes first, counted on texts where the checkpoint leaves it open.

    Attributes:
        first: the position that has proposed the right next token most often, 0 or 1.
    """

    def __init__(self, guess: int):
        self.first, self._hits = guess, [0, 0]

    @property
    def are_clear(self) -> bool:
        """Whether one layout has won: in the other one, a head is right about as rarely as a random one."""
        return abs(self._hits[0] - self._hits[1]) >= 4

    def count(self, proposed: Sequence[int], token: int) -> None:
        """Count what position 0 and position 1 proposed for a token that is known by now."""
        for first in (0, 1):
            self._hits[first] += proposed[first] == token
        if self._hits[0] != self._hits[1]:
            self.first = self._hits.index(max(self._hits))

    def copy(self) -> LayoutVotes:
        """A copy for another call."""
        copied = LayoutVotes(self.first)
        copied._hits = list(self._hits)
        return copied


class PathRunner(BlockRunner):
    """Runs a block head with a correction: one pass of the block, then logits after any path without another pass.

    Args:
        bound: the head on its target.
        batch: rows of the call.
        full_vocabulary: whether the correction is computed for all tokens; otherwise only for those of the highest
            base logits at their position, where the vocabulary is large.
        votes: for a head whose layout is measured.

    Attributes:
        max_candidates: how many tokens of a position can be drafted.
        confidence: `[batch, nodes]` logits of the confidence head for what was computed last; None without one.
    """

    confidence: torch.Tensor | None = None

    def __init__(self, bound: BoundHead, batch: int, full_vocabulary: bool = True, votes: LayoutVotes | None = None):
        super().__init__(bound, batch)
        self._head = cast(PathHead, bound.head)
        self._first, self._votes = self._config.first_proposing_position, votes
        limit, vocab = self._head.max_candidates, self._config.draft_vocab_size
        if limit is None and not full_vocabulary and vocab > 4 * MAX_CANDIDATES:
            limit = MAX_CANDIDATES
        self.max_candidates = vocab if limit is None else min(limit, vocab)
        self._proposed: dict[int, list[int]] = {}

    def first_logits(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool]
    ) -> torch.Tensor:
        """`[batch, vocab]` logits of the first draft token; arguments as for `EagleRunner.extend`."""
        self._drop(needed)
        tokens, anchors = self._gather(next_tokens), self._anchors(self._gather(next_tokens))
        states = [row.to(self._like) for row in self._gather(features)]
        hidden = self._block(states, anchors, self._config.block_size)
        if self._votes is not None and not self._votes.are_clear:
            self._measure(self._votes, hidden, anchors, tokens)
        self._begin(hidden, anchors)
        logits = self._step(anchors[:, None], torch.zeros_like(anchors)[:, None], self._states)
        return logits[:, 0]

    def next_logits(self, tree: DraftTree, new: int) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last `new` nodes of a tree with all nodes since `first_logits`."""
        tree = tree if len(self.rows) == tree.batch else tree.select(self.rows)
        device, first = self._like.device, tree.nodes - new
        parents, depths, _ = tree.structure()
        above = parents[:, first:, None].to(device).expand(-1, -1, self._states.shape[2])
        tokens = tree.input_tokens(device)[:, first:]
        return self._step(tokens, depths[:, 1 + first :].to(device), self._states.gather(1, above))

    def _begin(self, hidden: torch.Tensor, anchors: torch.Tensor) -> None:
        """Compute what all paths of a block share."""
        self._states = self._head.first_state(hidden, anchors, self.bound.embed, self._first)[:, None]
        self._hidden = hidden[:, self._first :]
        self._base, self._keys = self.bound.logits(self._hidden), self._head.keys()
        if self.max_candidates < self._base.shape[-1]:
            self._base, self._tokens = self._base.topk(self.max_candidates, dim=-1)
            self._keys = self._keys[self._tokens]  # [active, positions, candidates, rank]
        self._begun = False

    def _step(self, tokens: torch.Tensor, depths: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits after nodes of these tokens, depths and states of their parents, all `[active, nodes, …]`."""
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        places = depths.clamp(max=self._hidden.shape[1] - 1)  # a node that only fills up its row may be deeper
        hidden = self._hidden[rows, places]
        query, states = self._head.step(hidden, tokens, states, depths, self.bound.embed)
        self._states = torch.cat([self._states, states], dim=1) if self._begun else states
        self._begun = True
        confidence = self._head.confidence_logits(hidden, tokens)
        self.confidence = None if confidence is None else self._scatter(confidence)
        logits = self._base[rows, places]
        if self._keys.dim() == 2:
            logits = logits + query @ self._keys.T
        else:
            corrected = logits + (self._keys[rows, places] @ query[..., None])[..., 0]
            logits = logits.new_full((*logits.shape[:2], self._config.draft_vocab_size), -torch.inf)
            logits.scatter_(2, self._tokens[rows, places], corrected)
        return self._scatter(self.bound.to_target_vocabulary(logits))

    def _measure(
        self, votes: LayoutVotes, hidden: torch.Tensor, anchors: torch.Tensor, tokens: Sequence[Sequence[int]]
    ) -> None:
        """Compare what both layouts proposed after each row's last anchor with the token that followed it."""
        for row, known in zip(self.rows, tokens, strict=True):
            if known and row in self._proposed:
                votes.count(self._proposed[row], known[0])
        logits = []
        for first in (0, 1):
            state = self._head.first_state(hidden, anchors, self.bound.embed, first)
            query = self._head.step(hidden[:, first], anchors, state, torch.zeros_like(anchors), self.bound.embed).query
            logits.append(self.bound.logits(hidden[:, first]) + query @ self._head.keys().T)
        best = self.bound.target_ids(torch.stack(logits, dim=1).argmax(dim=-1)).tolist()
        self._proposed = dict(zip(self.rows, best, strict=True))
        self._first = votes.first


class LayeredRunner(HeadRunner):
    """Runs several MTP layers, each for one further draft token, over accepted positions and then over draft nodes.

    Layer k reads at position p the token of p + 1 + k and the output of layer k - 1. For the last k of n known
    positions that token is a draft token, so a node of depth k is computed by layer k at these k positions:

        position           n-2       n-1
        layer 0            x(n-1)    x(n)           all known; predicts d1
        layer 1            x(n)      d1             predicts d2
        layer 2            d1        d2             predicts d3

    The last positions are computed again with the next accepted tokens.
    """

    def __init__(self, bound: BoundHead, batch: int):
        super().__init__(bound, batch)
        self.layers = cast(MTPConfig, bound.head.config).num_layers
        self._features = [self._like.new_zeros(0, bound.head.config.hidden_size)] * batch  # to compute again
        self._tokens: list[list[int]] = [[] for _ in range(batch)]

    def first_logits(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool]
    ) -> torch.Tensor:
        """`[batch, vocab]` logits of the first draft token; arguments as for `EagleRunner.extend`."""
        kept = self._drop(needed)
        states = [
            torch.cat([self._features[place], new.to(self._like)])
            for place, new in zip(kept, self._gather(features), strict=True)
        ]
        tokens = [[*self._tokens[place], *new] for place, new in zip(kept, self._gather(next_tokens), strict=True)]
        self.cache.set_lengths(self.lengths)
        early = [max(0, len(row) - PREFILL_CHUNK - self.layers) for row in tokens]
        for start in range(0, max(early), PREFILL_CHUNK):
            parts = [slice(min(start, end), min(start + PREFILL_CHUNK, end)) for end in early]
            self._read(states, tokens, parts)
            self._commit([part.stop - part.start for part in parts])
        outputs = self._read(states, tokens, [slice(end, len(row)) for end, row in zip(early, tokens, strict=True)])
        counts = [len(row) - end for end, row in zip(early, tokens, strict=True)]
        rows, device = torch.arange(len(counts), device=self._like.device), self._like.device
        self._last = [  # by layer, the output at the last position whose tokens are all known
            hidden[rows, torch.tensor([max(0, count - 1 - layer) for count in counts], device=device)]
            for layer, hidden in enumerate(outputs)
        ]
        self._ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        again = [min(self.layers - 1, count) for count in counts]
        self._features = [row[len(row) - count :] for row, count in zip(states, again, strict=True)]
        self._tokens = [row[len(row) - count :] for row, count in zip(tokens, again, strict=True)]
        self._commit([count - back for count, back in zip(counts, again, strict=True)])
        hidden = outputs[0]
        # Of each node the outputs and tokens at the last `layers` positions.
        self._hidden = hidden.new_zeros(len(rows), 1, self.layers, hidden.shape[-1])
        self._paths = torch.zeros(len(rows), 1, self.layers, dtype=torch.long, device=device)
        return self._scatter(self.bound.target_logits(self._last[0]))

    def next_logits(self, tree: DraftTree, new: int) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last `new` nodes of a tree with all nodes since `first_logits`."""
        tree = tree if len(self.rows) == tree.batch else tree.select(self.rows)
        device, first = self._like.device, tree.nodes - new
        parents, depths, _ = (part.to(device) for part in tree.structure())
        rows, above = torch.arange(len(self.rows), device=device)[:, None], parents[:, first:]
        own = tree.input_tokens(device)[:, first:, None]
        paths = torch.cat([self._paths[rows, above][:, :, 1:], own], dim=2)
        before, hidden = self._hidden[rows, above], self._hidden.new_zeros(len(rows), new, *self._hidden.shape[2:])
        depths = depths[:, 1 + first :]
        for depth in range(1, self.layers):  # a node that only fills up its row may be deeper
            if bool((depths == depth).any()):
                computed = self._layer(depth, paths, before)
                hidden = torch.where((depths == depth)[..., None, None], computed, hidden)
        self._hidden, self._paths = torch.cat([self._hidden, hidden], dim=1), torch.cat([self._paths, paths], dim=1)
        return self._scatter(self.bound.target_logits(hidden[:, :, -1]))

    def _read(
        self, states: Sequence[torch.Tensor], tokens: Sequence[list[int]], parts: Sequence[slice]
    ) -> list[torch.Tensor]:
        """Run all layers over a part of each row's new positions; the outputs of each layer `[active, new, hidden]`."""
        head: Any = self.bound.head
        hidden = pad_sequence([row[part] for row, part in zip(states, parts, strict=True)], batch_first=True)
        device, count = self._like.device, hidden.shape[1]
        positions, mask = self._positions(count, device), causal_mask(self.lengths, count, device)
        outputs = []
        for layer in range(self.layers):
            ahead = [row[part.start + layer : part.stop + layer] for row, part in zip(tokens, parts, strict=True)]
            read = torch.tensor([[*row, *[0] * (count - len(row))] for row in ahead])
            hidden = head(self.bound.embed(read), hidden, positions, mask, self.cache, step=layer).hidden
            outputs.append(hidden)
        return outputs

    def _layer(self, depth: int, paths: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The outputs of a layer for nodes of its depth, `[active, nodes, layers, hidden]`; other positions are 0."""
        head: Any = self.bound.head
        (rows, nodes), device = paths.shape[:2], paths.device
        tokens, states = paths[:, :, -depth:], before[:, :, -depth:].clone()
        states[:, :, 0] = self._last[depth - 1][:, None]
        starts = (torch.tensor(self._ends, device=device)[:, None] - depth).clamp(min=0)
        steps = torch.arange(depth, device=device).repeat(nodes)
        owners = torch.arange(nodes, device=device).repeat_interleave(depth)
        slots = torch.arange(max(self._ends) - depth + nodes * depth, device=device)
        place = (slots - starts)[:, None]  # counted from the first slot of the nodes
        itself = (place.div(depth, rounding_mode="floor") == owners[:, None]) & (place % depth <= steps[:, None])
        self.cache.set_lengths([max(0, end - depth) for end in self._ends])
        output = head(
            self.bound.embed(tokens.flatten(1)),
            states.flatten(1, 2),
            starts + steps,
            ((place < 0) | itself)[:, None],
            self.cache,
            step=depth,
        )
        self.cache.set_lengths(self.lengths)
        return pad(output.hidden.view(rows, nodes, depth, -1), (0, 0, self.layers - depth, 0))


class HeadInputs(NamedTuple):
    """The inputs of a pass, as for `Eagle3Head.forward`; positions and mask are on the CPU."""

    embeddings: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def run_head(head: Any, inputs: HeadInputs, cache: Any) -> HeadOutput:
    """One pass of a head over the entries of a cache."""
    embeddings, hidden, positions, mask = inputs
    output: HeadOutput = head(embeddings, hidden, positions.to(hidden.device), mask.to(hidden.device), cache)
    return output
