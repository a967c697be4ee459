"""A target with one row that may become a row of a common target, which processes several calls in each pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.masks import StepMasks
from hf_specgen.targets.target import Target


class RowTarget(Target):
    """A `Target` with one row, whose forward passes a common target makes once the row has joined it.

    Before, it runs its prefill, and is a target like any other; afterwards it keeps what a drafter and the loop of its
    own call read: the accepted path and the hidden states.

    Attributes:
        has_common: whether the row belongs to a common target.
        path: the accepted nodes of the last step of the common target.
    """

    has_common: bool = False
    path: Sequence[int] = ()

    @property
    def is_joinable(self) -> bool:
        """Whether a common target can process the row; valid after the prefill.

        Not if passes are captured, if there are inputs beside text or states beside keys and values, or if the
        attention kernel takes no mask.
        """
        if self._graphs is not None or self.verifies_chains_only:
            return False
        return self._inputs.rows_can_change(self.cache)

    def as_common_target(self) -> Self:
        """Make a common target with this row as the first one, which shares its cache; `append_rows` adds others."""
        common = self.copy()
        common._layout = self._layout.copy()
        common._masks = StepMasks(self.model, self._masks.padding_mask)
        self.has_common = True
        return common

    def append_rows(self, *new: Target) -> None:
        super().append_rows(*new)
        for row in new:
            assert isinstance(row, RowTarget)
            row.has_common = True
            # The common cache has a copy of its contents, which `take_cache` copies back.
            row.cache = row._model_cache = RaggedCache()

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        if self.has_common:
            self.path = paths[0] or []
        else:
            super().commit(paths)

    def commit_rows(self, rows: Sequence[RowTarget]) -> None:
        """Keep in a common target what `commit` has kept of its rows."""
        self.cache.keep_accepted(self._starts, [row.path for row in rows])

    def take_states(self, common: Target, row: int, tokens: int) -> None:
        """Receive what a pass of the common target has computed for `tokens` tokens of this row, its row `row`."""

    def take_cache(self, common: Target, row: int) -> None:
        """Make the passes of this row alone again, with a copy of the cache of its row `row` of the common target."""
        self.cache = common.cache.row_copy(row)
        self._model_cache = self.cache
        self.has_common = False
