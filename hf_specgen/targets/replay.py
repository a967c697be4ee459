"""Queues of accepted tokens that must be processed again, in front of the pending token of a later pass.

A recurrent state that has read rejected tokens returns to where the pass began, and the accepted tokens stay uncached
until the next pass, so that no pass is made for them alone (`UncachedTokens`)::

    pass 1   state at 10   reads  a │ b c d      a pending, draft (b, c, d), of which b is accepted, then x follows
    pass 2   state at 10   reads  a b x │ e f    a and b are uncached, x pending, draft (e, f), all accepted
    pass 3   state at 15   reads  g │ …

Rows of a batch are padded on the right; the padding counts as rejected.

A model that takes no positions numbers the tokens of a pass by how many slots the cache has, for all rows alike, so
that rows of different lengths would get wrong positions. There every pass begins at the slot up to which all rows that
take part are cached (`AlignedTexts`)::

    pass 1   slot 10   row 0   a │ b c d       pending a, draft (b, c, d), all accepted, then x follows
                       row 1   p │ q r s       q is accepted, then y follows
    pass 2   slot 12   row 0   c d x │ e f     c and d are processed again, x is pending, the draft is (e, f)
                       row 1   y │ z u
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.tree import DraftTree

MAX_UNCACHED = 16
"""More uncached tokens get a pass of their own: they widen every pass until a draft is fully accepted."""


class UncachedTokens:
    """The accepted tokens of each row that a recurrent state does not include yet, in `tokens`."""

    def __init__(self, batch: int):
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        # Of the pass whose result is not known yet: the tokens of each row, the length of the longest row, the nodes of
        # the draft, and the uncached tokens in front of each row's pending token.
        self._pass: list[list[int]] = []
        self._width, self._nodes = 0, 0
        self._skipped: list[int] = []
        # By row the tokens of the last pass, if it was fully accepted: the state can return to its start only.
        self._last_pass: list[list[int]] = [[] for _ in range(batch)]

    def prepend(
        self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None
    ) -> tuple[DraftTree, list[int]]:
        """The chains of the next pass, uncached tokens, pending token and draft, and the token before each chain."""
        rows = range(len(self.tokens))
        uncached = [self.tokens[row] if active is None or active[row] else [] for row in rows]
        drafts = [tokens[: len(parents)] for tokens, parents in zip(tree.tokens.tolist(), tree.parents, strict=True)]
        self._skipped = list(map(len, uncached))
        self._pass = [[*uncached[row], pending[row], *drafts[row]] for row in rows]
        self._nodes, self._width = tree.nodes, max(map(len, self._pass))
        return DraftTree.chains([tokens[1:] for tokens in self._pass]), [tokens[0] for tokens in self._pass]

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass was made whose outcome is not known yet."""
        return bool(self._pass)

    def align(self, values: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens of the pass, …]` results to `[batch, 1 + nodes, …]` of the pending token and the draft."""
        places = torch.tensor(self._skipped)[:, None] + torch.arange(1 + self._nodes)
        rows = torch.arange(len(values))[:, None]
        return values[rows.to(values.device), places.clamp(max=values.shape[1] - 1).to(values.device)]

    def commit(self, paths: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Record what a step kept of the last pass; returns the paths that stay in the cache, in chains of the pass."""
        kept: list[list[int] | None] = []
        for row, path in enumerate(paths):
            if path is None:
                self._last_pass[row] = []  # the state is only kept at the start of this pass
                kept.append(None)
                continue
            accepted = self._pass[row][: self._skipped[row] + 1 + len(path)]
            is_complete = len(accepted) == self._width
            self.tokens[row], self._last_pass[row] = ([], accepted) if is_complete else (accepted, [])
            kept.append(list(range(self._width - 1)) if is_complete else None)
        self._pass = []
        return kept

    def remove(self, row: int, count: int) -> int:
        """Remove the last tokens of a row; returns by how many tokens the state must return: none, or the last pass."""
        uncached, read = self.tokens[row], self._last_pass[row]
        if count <= len(uncached):
            del uncached[len(uncached) - count :]
            return 0
        count -= len(uncached)
        if count > len(read):
            raise RuntimeError(f"row {row} cannot return by {count} tokens: its state is known {len(read)} tokens ago")
        self.tokens[row], self._last_pass[row] = read[: len(read) - count], []
        return len(read)

    def reachable(self, rows: Sequence[int], lengths: Sequence[int], targets: Sequence[int]) -> list[int]:
        """The largest lengths up to the targets at which states were kept; the tokens between become uncached."""
        return [
            length - self.remove(row, length + len(self.tokens[row]) - target)
            for row, length, target in zip(rows, lengths, targets, strict=True)
        ]

    def replay_pass(self) -> tuple[DraftTree, list[int], list[list[int] | None]]:
        """The next pass without a draft, over equally many uncached tokens of each row that has any.

        Returns the chains, the token before them, and of each row the nodes to keep.
        """
        count = min((len(uncached) for uncached in self.tokens if uncached), default=0)
        rows = [uncached[:count] or [0] * count for uncached in self.tokens]
        kept = [list(range(count - 1)) if uncached else None for uncached in self.tokens]
        self.tokens = [uncached[count:] for uncached in self.tokens]
        self._last_pass = [[] for _ in self.tokens]
        return DraftTree.chains([tokens[1:] for tokens in rows]), [tokens[0] for tokens in rows], kept


class AlignedTexts:
    """The tokens of each row after its prompt in `texts`, and how many of them lie in the cache in `cached`."""

    def __init__(self, batch: int):
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch
        self._added = [0] * batch

    def next_pass(self, new: Sequence[Sequence[int] | None]) -> tuple[int, list[list[int]]]:
        """Append tokens to the texts; returns where the pass begins, from the end of the prompt, and its tokens.

        A row that takes no part has None, but tokens too, since the pass overwrites its slots.
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

    def commit(self, counts: Sequence[int]) -> None:
        """Of the tokens that were appended to each row since the last `commit`, keep so many."""
        self.cut([len(text) - n + count for text, n, count in zip(self.texts, self._added, counts, strict=True)])

    def cut(self, lengths: Sequence[int]) -> None:
        """Keep the first tokens of each text."""
        for row, length in enumerate(lengths):
            del self.texts[row][length:]
            self.cached[row] = min(self.cached[row], length)
        self._added = [0] * len(self.texts)
