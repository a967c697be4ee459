"""Drafters with EAGLE heads and MTP layers: a pass a level (EAGLE, a single MTP layer), or one pass (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_specgen.call import Compile
from hf_specgen.device_tree import Frontier
from hf_specgen.heads.base import BoundHead, HeadInputs, HeadOutput
from hf_specgen.heads.drafter import HeadDrafter, padded
from hf_specgen.heads.head_text import FeatureSource, HeadText
from hf_specgen.targets import masks
from hf_specgen.targets.cache import padded_tokens
from hf_specgen.targets.graphs import Capturable, graphs_of_call
from hf_specgen.targets.passes import MAX_CAPTURED, CapturablePasses, DrafterInputs, DrafterPassOutput, NewText


@lru_cache(maxsize=16)
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE or MTP head: over accepted tokens, then over draft nodes with its own output as features.

    A head with a mask token (P-EAGLE) drafts in one pass: masks and a learned feature m stand for unknown positions.

    position           i-1    i             i+1      i+2
    feature            f      f             m        m
    token embedded     t(i)   t(i+1)        mask     mask
    prediction                draft 1       draft 2  draft 3
    """

    def __init__(self, bound: BoundHead, source: FeatureSource, batch: int, graphs: Compile = False):
        super().__init__(bound, source, batch)
        self.token_ids = bound.head.draft_to_target
        self.is_one_pass = getattr(bound.head.config, "mask_token_id", None) is not None
        self.reads_all_rows = not self.is_one_pass
        self._graphs = graphs_of_call(bound.head, graphs) if graphs and not self.is_one_pass else None
        self.keeps_all = self._graphs is not None  # another number of rows would be captured anew
        if self._graphs is not None:
            self.modules = ()  # a captured pass repeats the products of its capture
        self._last: HeadOutput | None = None  # at the last accepted position of each row
        self._hidden = self._like.new_zeros(batch, 0, 0)  # of the nodes of the last pass

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        self._last = self._last_outputs(*self._read(features, tokens))
        self._hidden = self._last.hidden
        return self.bound.logits(self._last.output)[:, 0]

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        head: Any = self.bound.head
        masked = depth - 1
        device = self._like.device
        states = [torch.cat([row, head.mask_hidden[0].expand(masked, -1)]) for row in features]
        output, counts = self._read(states, [[*row, *[head.config.mask_token_id] * masked] for row in tokens], masked)
        places = torch.tensor(counts, device=device)[:, None] - 1 + torch.arange(depth, device=device)
        return cast(torch.Tensor, output.output[torch.arange(len(counts), device=device)[:, None], places.clamp(min=0)])

    def keep_rows(self, kept: Sequence[int]) -> None:
        super().keep_rows(kept)
        if not kept:
            self._last = None

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        if self._last is not None:
            self._last = HeadOutput(*(states[rows] for states in self._last))

    def _add_last(self, other: Self) -> None:
        super()._add_last(other)
        if self._last is not None and other._last is not None:
            pairs = zip(self._last, other._last, strict=True)
            self._last = HeadOutput(*(torch.cat(states) for states in pairs))

    def _run(self, inputs: HeadInputs) -> HeadOutput:
        """One pass of the head, which appends to the cache; as a graph if it is short."""
        batch, length = inputs.positions.shape
        if self._graphs is None or not self._graphs.is_active or length > MAX_CAPTURED or not self.cache.lengths:
            return super()._run(inputs)
        width = padded_tokens(length)
        lengths = self.cache.lengths
        capacity = self._graphs.move_to_static_buffers(self.cache, width)
        if not capacity:
            return super()._run(inputs)
        more = (0, width - length)
        mask = inputs.mask.new_zeros(batch, 1, width, capacity)
        mask[:, :, :length, : inputs.mask.shape[3]] = inputs.mask
        mask[:, :, length:, 0] = True  # a query that sees nothing would write NaN into the cache
        embeddings, hidden = (pad(part, (0, 0, *more)) for part in (inputs.embeddings, inputs.hidden))
        padded = HeadInputs(embeddings, hidden, pad(inputs.positions, more), mask)
        eager = padded._replace(mask=mask[..., : max(lengths) + width])
        eager_pass = partial(super()._run, eager)
        output = self._graphs.run(HeadPass(), padded, self.cache, width, eager_pass)
        self.cache.set_lengths([before + length for before in lengths])
        return HeadOutput(*(part[:, :length] for part in output))

    def _last_outputs(self, output: HeadOutput, new: Sequence[int]) -> HeadOutput:
        """The output at the last of `new[b]` positions of row b of a pass; of a row without any, the one before."""
        if 0 < new[0] == max(new) == min(new):
            return HeadOutput(*(states[:, new[0] - 1 : new[0]] for states in output))
        ends = torch.tensor(new, device=self._like.device) - 1
        rows = torch.arange(len(new), device=self._like.device)
        last = HeadOutput(*(states[rows, ends.clamp(min=0)][:, None] for states in output))
        if 0 not in new or self._last is None:
            return last
        is_new = (ends >= 0)[:, None, None]
        pairs = zip(last, self._last, strict=True)
        return HeadOutput(*(torch.where(is_new, states, before) for states, before in pairs))

    def capturable_passes(self, text: HeadText | None = None) -> CapturablePasses | None:
        """Passes over several levels, and over new text before them; None if they are not captured.

        Text is not captured where a row has no new position or too many of them.
        """
        if self._graphs is None or not self._graphs.is_active:
            return None
        drafter_pass = EaglePass(self.bound.weights, self.bound.of_head(None))
        capturable = CapturablePasses(self._graphs, self.cache, drafter_pass, self._store_levels, self._hidden)
        if text is None:
            return capturable
        counts = [len(row) for row in text.tokens]
        if not self.cache.lengths or not 0 < min(counts) <= max(counts) <= MAX_CAPTURED:
            return None
        features, tokens = self._new(text)
        new_text = NewText.of(tokens, padded(features, [slice(0, count) for count in counts]))
        return capturable._replace(text=new_text, store_text=partial(self._store_text, counts))

    def _store_text(self, counts: Sequence[int], results: Sequence[torch.Tensor]) -> None:
        """Store the results of new positions, `counts` of each row, that a captured function has processed."""
        self._last = HeadOutput(*results)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _store_levels(self, states: torch.Tensor | None, expanded: int) -> None:
        """Store the states of passes that were made by a captured function."""
        assert states is not None
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
            position = _numbers(padded_tokens(1 + position), depths.device)[position]
        positions = position.expand(frontier.batch, new)
        mask = masks.full_mask(layout)[:, :, -new:]
        output = self._run(HeadInputs(embeddings, hidden, positions, mask))
        self._hidden = output.hidden
        return self.bound.logits(output.output)


@dataclass(frozen=True)
class HeadPass(Capturable[HeadInputs, HeadOutput]):
    """A pass of a head as a function that can be captured."""

    def __call__(self, module: nn.Module, inputs: HeadInputs, cache: Cache) -> HeadOutput:
        return cast(HeadOutput, module(inputs, cache))


@dataclass(frozen=True)
class EaglePass:
    """One pass of a head over nodes of a draft tree, see `CapturablePasses`; equal for the same weights.

    It does not hold the head, which would never be freed: the graphs of a module last as long as the module.
    """

    weights: tuple[int, ...]
    bound: BoundHead = field(compare=False)

    def __call__(self, module: nn.Module, inputs: DrafterInputs, cache: Cache) -> DrafterPassOutput:
        bound = self.bound.of_head(module)
        tokens, layout, states, _, is_text = inputs
        positions = layout.depths[:, -tokens.shape[1] :] + layout.starts
        assert states is not None
        states = bound.head.combine(states) if is_text else states
        output = module(HeadInputs(bound.embed(tokens), states, positions, masks.full_mask(layout)), cache)
        return DrafterPassOutput(bound.logits(output.output), output.hidden, output.output)
