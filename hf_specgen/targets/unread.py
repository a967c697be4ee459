"""Accepted tokens that a recurrent state has not read, because it had read rejected ones with them.

After a pass of which only a part is accepted, the state returns to where the pass began, and the accepted tokens stay
unread. They come first in the next pass, so that no pass is made for them alone::

    pass 1   state at 10   reads  a │ b c d      a pending, draft (b, c, d), of which b is accepted, then x follows
    pass 2   state at 10   reads  a b x │ e f    a and b are unread, x pending, draft (e, f), all accepted
    pass 3   state at 15   reads  g │ …

Rows of a batch are padded on the right; the padding counts as rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.tree import DraftTree

MAX_UNREAD = 16
"""More unread tokens are read in a pass of their own: they widen every pass until a draft is fully accepted."""


class UnreadTokens:
    """The unread tokens of each row.

    Args:
        batch: number of rows.

    Attributes:
        tokens: by row, in the order of the text.
    """

    def __init__(self, batch: int):
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        # Of the pass whose result is not known yet: the tokens of each row, the length of the longest row, the nodes of
        # the draft, and the unread tokens in front of each row's pending token.
        self._pass: list[list[int]] = []
        self._width, self._nodes = 0, 0
        self._skipped: list[int] = []
        # By row the tokens of the last pass, if it was fully accepted: the state can return to its start only.
        self._read_last: list[list[int]] = [[] for _ in range(batch)]

    def put_first(
        self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None
    ) -> tuple[DraftTree, list[int]]:
        """The draft of the next pass: the unread tokens, the pending token and the chains of a draft.

        Args:
            tree, pending, active: as for `Target.forward`; of an inactive row nothing is read.

        Returns:
            the chains of the pass, and the token before them.
        """
        rows = range(len(self.tokens))
        unread = [self.tokens[row] if active is None or active[row] else [] for row in rows]
        drafts = [tokens[: len(parents)] for tokens, parents in zip(tree.tokens.tolist(), tree.parents, strict=True)]
        self._skipped = list(map(len, unread))
        self._pass = [[*unread[row], pending[row], *drafts[row]] for row in rows]
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

    def keep(self, paths: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Record what a step kept of the last pass.

        Args:
            paths: accepted nodes of each row's chain; None for a row that keeps nothing.

        Returns:
            what stays in the cache, in the same form, for the chains of the pass.
        """
        kept: list[list[int] | None] = []
        for row, path in enumerate(paths):
            if path is None:
                self._read_last[row] = []  # the state is known only at the start of this pass
                kept.append(None)
                continue
            accepted = self._pass[row][: self._skipped[row] + 1 + len(path)]
            whole = len(accepted) == self._width
            self.tokens[row], self._read_last[row] = ([], accepted) if whole else (accepted, [])
            kept.append(list(range(self._width - 1)) if whole else None)
        self._pass = []
        return kept

    def remove(self, row: int, count: int) -> int:
        """Remove the last tokens of a row.

        Returns:
            by how many tokens the state must return: none, or those of the last pass.

        Raises:
            RuntimeError: if the state before these tokens is not known any more.
        """
        unread, read = self.tokens[row], self._read_last[row]
        if count <= len(unread):
            del unread[len(unread) - count :]
            return 0
        count -= len(unread)
        if count > len(read):
            raise RuntimeError(f"row {row} cannot return by {count} tokens: its state is known {len(read)} tokens ago")
        self.tokens[row], self._read_last[row] = read[: len(read) - count], []
        return len(read)

    def reachable(self, rows: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """The largest lengths up to the wanted ones that states are known of; the tokens between become unread.

        Args:
            rows: the rows that are in the cache.
            lengths, wanted: of each of them, the tokens that its state has read, and how many it shall have.
        """
        return [
            length - self.remove(row, length + len(self.tokens[row]) - less)
            for row, length, less in zip(rows, lengths, wanted, strict=True)
        ]

    def to_read(self) -> tuple[DraftTree, list[int], list[list[int] | None]]:
        """The next pass without a draft: it reads equally many unread tokens of each row that has any.

        Returns:
            the chains of the pass, the token before them, and of each row the nodes to keep; None for a row that reads
            nothing.
        """
        count = min((len(unread) for unread in self.tokens if unread), default=0)
        rows = [unread[:count] or [0] * count for unread in self.tokens]
        kept = [list(range(count - 1)) if unread else None for unread in self.tokens]
        self.tokens = [unread[count:] for unread in self.tokens]
        self._read_last = [[] for _ in self.tokens]
        return DraftTree.chains([tokens[1:] for tokens in rows]), [tokens[0] for tokens in rows], kept
