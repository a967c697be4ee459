"""Runs a P-EAGLE head over a batch: new positions and the masked ones after them in one pass.

    position           i-1    i             i+1      i+2
    feature            f      f             m        m          f: the target's, m: learned, for unknown ones
    token embedded     t(i)   t(i+1)        mask     mask
    prediction                draft 1       draft 2  draft 3

Source: P-EAGLE (2026), https://arxiv.org/abs/2602.01469.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_specgen.heads.active_rows import ActiveRows
from hf_specgen.heads.base import AttachedHead
from hf_specgen.heads.eagle import EagleConfig
from hf_specgen.heads.layers import causal_mask
from hf_specgen.heads.reader import READ_CHUNK
from hf_specgen.targets.cache import RaggedCache


class ParallelReader:
    """The state of a P-EAGLE head in one call.

    Args:
        attached: the head on its target.
        batch: number of rows.

    Attributes:
        cache: keys and values of the text.
        lengths: positions of the text that each row has read.
    """

    def __init__(self, attached: AttachedHead, batch: int):
        self.attached, self.cache, self.lengths = attached, RaggedCache(), [0] * batch
        self._config = cast(EagleConfig, attached.head.config)
        self._active = ActiveRows(batch)
        self._like = next(attached.head.parameters())

    @property
    def rows(self) -> list[int]:
        """The rows of the call that have not been dropped; `cache` and `lengths` are of these."""
        return self._active.rows

    def draft(
        self,
        features: Sequence[torch.Tensor],
        next_tokens: Sequence[Sequence[int]],
        needed: Sequence[bool],
        depth: int,
    ) -> torch.Tensor:
        """Read new positions of each row's text, and draft after them in the same pass.

        Args:
            features: for each row `[new, taps * target_hidden]`; rows may have different numbers of them.
            next_tokens: for each row the token after each of these positions. Without any, the row's logits mean
                nothing.
            needed: the rows that have not ended; the others are dropped.
            depth: draft tokens.

        Returns:
            `[batch, depth, vocab]` logits over the target's vocabulary; zeros for rows that were dropped.
        """
        places = self._active.drop(needed, self.cache)
        self.lengths = [self.lengths[place] for place in places]
        chosen = [row.to(self._like) for row in self._active.select(features)]
        tokens = [list(row) for row in self._active.select(next_tokens)]
        early = [max(0, len(row) - READ_CHUNK) for row in tokens]
        for start in range(0, max(early), READ_CHUNK):
            parts = [slice(start, min(start + READ_CHUNK, end)) for end in early]
            rows = zip(chosen, tokens, parts, strict=True)
            self._run([(states[part], row[part]) for states, row, part in rows], masked=0)
        late = zip(chosen, tokens, early, strict=True)
        output = self._run([(states[end:], row[end:]) for states, row, end in late], masked=depth - 1)
        new = [len(row) - end for row, end in zip(tokens, early, strict=True)]
        columns = torch.tensor(new, device=output.device)[:, None] - 1 + torch.arange(depth, device=output.device)
        columns = columns.clamp(min=0)
        return self._active.spread(
            self.attached.target_logits(output[torch.arange(len(new), device=output.device)[:, None], columns])
        )

    def _run(self, rows: Sequence[tuple[torch.Tensor, list[int]]], masked: int) -> torch.Tensor:
        """One pass over new features and tokens of each row and `masked` positions after them, which are dropped.

        Returns:
            `[rows, new + masked, hidden]` what the output matrix reads; shorter rows are padded.
        """
        head: Any = self.attached.head
        unknown = head.mask_hidden[0].expand(masked, -1)
        features = pad_sequence([torch.cat([states, unknown]) for states, _ in rows], batch_first=True)
        masks = [self._config.mask_token_id] * masked
        tokens = pad_sequence([torch.tensor([*row, *masks], dtype=torch.long) for _, row in rows], batch_first=True)
        device = self._like.device
        positions = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(tokens.shape[1], device=device)
        mask = causal_mask(self.lengths, tokens.shape[1], device)
        output = head(self.attached.embed(tokens), head.combine(features), positions, mask, self.cache).output
        self.lengths = [length + len(row) for length, (_, row) in zip(self.lengths, rows, strict=True)]
        self.cache.set_lengths(self.lengths)
        return cast(torch.Tensor, output)
