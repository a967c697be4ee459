"""Runs an EAGLE head over a batch: over accepted tokens with the target's hidden states, over draft nodes with its own.

The cache keeps only entries computed from the target's features. Entries of draft nodes are appended after them and
dropped before the next `read`, which processes accepted tokens with the features that the target has computed for them.

    position           i-1      i             i+1            i+2
    feature            f(i-1)   f(i)          h(i)           h(i+1)       f: the target's, h: the head's own output
    token embedded     t(i)     t(i+1)        draft node     its child
                       read ────────────────┤ expand ─────────────────►

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_specgen.heads.active_rows import ActiveRows
from hf_specgen.heads.base import AttachedHead, HeadOutput
from hf_specgen.heads.captured_head import CapturedHead, HeadInputs, run_eagerly
from hf_specgen.heads.layers import causal_mask
from hf_specgen.targets import masks
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.tree import DraftTree

READ_CHUNK = 512
"""Positions per pass: the size of a pass's mask then grows linearly with the context, not quadratically."""


class HeadReader:
    """The state of an EAGLE head in one call.

    Args:
        attached: the head, attached to its target.
        batch: number of rows.
        captured: runs passes as CUDA graphs; None to run them as they are.

    Attributes:
        cache: keys and values; the first `lengths[b]` slots of row b are of accepted tokens, others of draft nodes.
        lengths: positions of each row that have been read.
        last: the head's output at the last of these, both parts `[batch, 1, hidden]`.
    """

    last: HeadOutput

    def __init__(self, attached: AttachedHead, batch: int, captured: CapturedHead | None = None):
        self.attached, self.cache, self.lengths = attached, RaggedCache(), [0] * batch
        self._captured = captured
        self._active = ActiveRows(batch)
        self._like = next(attached.head.parameters())
        self._hidden = self._like.new_zeros(batch, 0, 0)

    @property
    def rows(self) -> list[int]:
        """The rows of the call that have not been dropped; `cache` and `lengths` are of these."""
        return self._active.rows

    def read(
        self,
        features: Sequence[torch.Tensor],
        next_tokens: Sequence[Sequence[int]],
        needed: Sequence[bool] | None = None,
    ) -> HeadOutput:
        """Run the head on new accepted positions of each row; cache entries of draft nodes are dropped.

        Args:
            features: for each row `[new, taps * target_hidden]`; rows may have different numbers of them, or none.
            next_tokens: for each row the token after each of these positions.
            needed: the rows that will be read, now or later; the others are dropped, unless passes are captured. None:
                all.

        Returns:
            The output at the last position of each row; zeros for rows that were dropped.
        """
        if needed is not None:
            self._drop(needed)
        self.cache.set_lengths(self.lengths)
        features, next_tokens = self._active.select(features), self._active.select(next_tokens)
        new = [len(tokens) for tokens in next_tokens]
        states = pad_sequence([row.to(self._like) for row in features], batch_first=True)
        tokens = pad_sequence([torch.tensor(row, dtype=torch.long) for row in next_tokens], batch_first=True)
        for start in range(0, max(new), READ_CHUNK):
            chunk = slice(start, start + READ_CHUNK)
            output = self._read_chunk(states[:, chunk], tokens[:, chunk])
            self._advance(output, [min(max(count - start, 0), output.hidden.shape[1]) for count in new])
        self._hidden = self.last.hidden
        return HeadOutput(*map(self._active.spread, self.last))

    def _drop(self, needed: Sequence[bool]) -> None:
        if self._captured is not None:  # another number of rows would be captured anew
            return
        places = self._active.drop(needed, self.cache)
        self.lengths = [self.lengths[place] for place in places]
        if hasattr(self, "last"):
            self.last = HeadOutput(*(part[places] for part in self.last))

    def _read_chunk(self, features: torch.Tensor, tokens: torch.Tensor) -> HeadOutput:
        positions = torch.tensor(self.lengths)[:, None] + torch.arange(tokens.shape[1])
        mask = causal_mask(self.lengths, tokens.shape[1])
        head: Any = self.attached.head
        return self._run(HeadInputs(self.attached.embed(tokens), head.combine(features), positions, mask))

    def _run(self, inputs: HeadInputs) -> HeadOutput:
        if self._captured is not None:
            return self._captured.run(self.attached.head, inputs, self.cache)
        return run_eagerly(self.attached.head, inputs, self.cache)

    def _advance(self, output: HeadOutput, new: Sequence[int]) -> None:
        """Keep the first `new[b]` positions of row b of a pass."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)
        rows = torch.arange(len(new), device=self._like.device)
        ends = torch.tensor(new, device=self._like.device) - 1
        reached = [part[rows, ends.clamp(min=0)][:, None] for part in output]
        if 0 in new and hasattr(self, "last"):
            read = (ends >= 0)[:, None, None]
            reached = [torch.where(read, now, before) for now, before in zip(reached, self.last, strict=True)]
        self.last = HeadOutput(*reached)

    def expand(self, tree: DraftTree, new: int) -> HeadOutput:
        """Run the head on draft nodes, with its own output at their parents in place of the target's features.

        Args:
            tree: all nodes since the last `read`; the same number in every row.
            new: number of new nodes, the last ones of the tree.

        Returns:
            The output at each new node, both parts `[batch, new, hidden]`; zeros for rows that were dropped.
        """
        tree = tree.select(self._active.rows)
        known = tree.nodes - new
        rows = torch.arange(tree.batch)[:, None]
        parents = torch.tensor(tree.parents)[:, known:]
        depths = torch.tensor([tree.depths(row) for row in range(tree.batch)])
        # The root, depth 0, is the last position read.
        roots = torch.tensor(self.lengths) - 1
        layout = masks.StepLayout(
            roots, depths, masks.ancestors(tree), visible=None, width=max(self.lengths) + tree.nodes
        )
        output = self._run(
            HeadInputs(
                self.attached.embed(tree.tokens[:, known:]),
                self._hidden[rows, parents + 1],
                roots[:, None] + depths[:, 1 + known :],
                masks.full_mask(layout)[:, :, 1 + known :],
            )
        )
        self._hidden = torch.cat([self._hidden, output.hidden], dim=1)
        return HeadOutput(*map(self._active.spread, output))

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` of `HeadOutput.output` to `[..., vocab]`; see `AttachedHead.target_logits`."""
        return self.attached.target_logits(output)
