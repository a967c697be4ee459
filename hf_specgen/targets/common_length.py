"""A target whose rows have one common length in the cache, for models that take no positions.

Such a model numbers the tokens of a pass by how many slots the cache has, for all rows alike, so that rows of different
lengths would get wrong positions. Here every pass begins at the slot up to which all rows that take part are cached.
What a row has accepted beyond it is read again, in front of its pending token::

    pass 1   slot 10   row 0   a │ b c d       pending a, draft (b, c, d), all accepted, then x follows
                       row 1   p │ q r s       q is accepted, then y follows
    pass 2   slot 12   row 0   c d x │ e f     c and d are read again, x is pending, the draft is (e, f)
                       row 1   y │ z u

Nothing that was accepted is lost: as with rows of different lengths, the slowest row decides how many passes there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specgen.targets.base import Target
from hf_specgen.tree import DraftTree

MAX_LEAD = 8
"""Tokens by which a row may be ahead of the slowest one; a row further ahead is left out of passes until then. With 8
rows and 85% of the draft tokens accepted, 80 tokens per row took 31 passes with a lead of 4, and 26 with 8, 16 and 32;
the tokens read per row were 222, 244, 408 and 459."""


class AlignedTexts:
    """The tokens of each row after its prompt, and how many of them are cached.

    Args:
        batch: number of rows.

    Attributes:
        texts: the tokens of each row.
        cached: how many of them lie in the cache.

    Example:
        >>> rows = AlignedTexts(2)
        >>> rows.next_pass([[1, 2, 3], [6, 7, 8]])
        (0, [[1, 2, 3], [6, 7, 8]])
        >>> rows.keep([3, 1])
        >>> rows.next_pass([[4], [9]])
        (1, [[2, 3, 4], [9]])
    """

    def __init__(self, batch: int):
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch
        self._added = [0] * batch

    def next_pass(self, new: Sequence[Sequence[int] | None]) -> tuple[int, list[list[int]]]:
        """Append tokens to the texts.

        Args:
            new: tokens for each row; None for a row that takes no part.

        Returns:
            Where the pass begins, counted in tokens from the end of the prompt, and the tokens that it reads of each
            row. A row that takes no part reads its tokens too, up to the width of the pass, since the pass overwrites
            its slots.
        """
        for row, tokens in enumerate(new):
            self.texts[row] += tokens or ()
            self._added[row] += len(tokens or ())
        rows = [row for row, tokens in enumerate(new) if tokens is not None]
        start = min((self.cached[row] for row in rows), default=0)
        width = max((len(self.texts[row]) for row in rows), default=start) - start
        reads = []
        for row, text in enumerate(self.texts):
            read = text[start : start + width] if self.cached[row] >= start else []
            self.cached[row] = min(self.cached[row], start) + len(read)
            reads.append(read)
        return start, reads

    def keep(self, counts: Sequence[int]) -> None:
        """Of the tokens that were appended to each row since the last `keep`, keep so many."""
        self.cut([len(text) - n + count for text, n, count in zip(self.texts, self._added, counts, strict=True)])

    def cut(self, lengths: Sequence[int]) -> None:
        """Keep the first tokens of each text."""
        for row, length in enumerate(lengths):
            del self.texts[row][length:]
            self.cached[row] = min(self.cached[row], length)
        self._added = [0] * len(self.texts)


class CommonLengthTarget(Target):
    """A `Target` for models that take no positions; verifies chains."""

    max_row_skew = MAX_LEAD

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._rows = AlignedTexts(self.batch)
        self._reads_pending = True

    @property
    def verifies_chains_only(self) -> bool:
        return True

    @property
    def supports_prefill_drafts(self) -> bool:
        return False

    def forward(
        self, tree: DraftTree, pending: Sequence[int] | torch.Tensor, active: Sequence[bool] | None = None
    ) -> torch.Tensor:
        self._reads_pending = True
        drafts = [tokens[: len(parents)] for tokens, parents in zip(tree.tokens.tolist(), tree.parents, strict=True)]
        first = torch.as_tensor(pending).tolist()
        return self._read([[token, *draft] for token, draft in zip(first, drafts, strict=True)], 1 + tree.nodes, active)

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool] | None = None) -> torch.Tensor:
        self._reads_pending = False
        return self._read([tokens[tree.nodes - new :] for tokens in tree.tokens.tolist()], new, active)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        self._rows.keep([0 if path is None else self._reads_pending + len(path) for path in paths])

    def rewind(self, read: Sequence[int]) -> None:
        self._rows.cut(read)

    def finish(self) -> Any:
        """Return the cache, once everything is in it; all rows have as many tokens."""
        lengths = [len(text) for text in self._rows.texts]
        if self._rows.cached != lengths:
            self._read([[]] * self.batch, 1, None)
        self._set_length(max(lengths))
        return super().finish()

    def _set_length(self, length: int) -> None:
        """Cut the cache to the prompt and so many tokens after it."""
        self.cache.set_lengths([slot + length for slot in self._layout.prompt_slots])

    def _read(self, new: list[list[int]], results: int, active: Sequence[bool] | None) -> torch.Tensor:
        """One pass over what is not cached of the rows that take part.

        Args:
            new: tokens that are appended to each row.
            results: so many logits per row are returned.
            active: the rows that take part; all that are present if left out.

        Returns:
            `[batch, results, vocab]` logits after each of the new tokens; the last ones repeated in shorter rows.
        """
        present = set(self.rows)
        takes_part = [row in present and (active is None or active[row]) for row in range(self.batch)]
        start, reads = self._rows.next_pass(
            [tokens if takes else None for tokens, takes in zip(new, takes_part, strict=True)]
        )
        self._set_length(start)
        # Padding on the right is overwritten by the next pass.
        filled = [tokens or [0] for tokens in reads]
        chains = DraftTree.chains([tokens[1:] for tokens in filled])
        inputs = {"input_ids": self._step_tokens(chains, [tokens[0] for tokens in filled])}
        logits = self._layout.spread(self._run(self.model, chains, inputs, takes_part).logits, self.batch)
        first = torch.tensor([len(tokens) - len(added) for tokens, added in zip(filled, new, strict=True)])
        last = torch.tensor([len(tokens) - 1 for tokens in filled])
        places = (first[:, None] + torch.arange(results)).clamp(min=0).minimum(last[:, None]).to(logits.device)
        return logits[torch.arange(self.batch, device=logits.device)[:, None], places]
