"""Levels of growing draft trees packed into few tensors: what captured functions receive and return.

Level 1 has the candidates after each row's last token, level n + 1 those after the nodes of expansion n. So only the
first `LevelTensors` of a tree begin with a level, such as level 1, expansion 1, level 2; later ones with an expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TreeLevel(NamedTuple):
    """The candidates of a level, `[rows, candidates]`: tokens, and logarithms of their path probabilities."""

    tokens: Tensor
    log_paths: Tensor


class Expansion(NamedTuple):
    """Nodes that were expanded in one pass, `[rows, width]`."""

    scores: Tensor  # expansion scores, see `TreeBuilder`; so low for padding that its children have probability 0
    indices: Tensor | None = None  # of the nodes in their level; None in a chain


class LevelTensors(NamedTuple):
    """Consecutive levels of growing trees, and the expansions before each of them."""

    widths: tuple[int, ...]  # nodes of each expansion
    log_paths: Tensor
    """`[rows, …]` of the candidates of each level, of the nodes of each expansion, then the expansion scores."""
    integers: Tensor  # `[rows, …]` the tokens of each level, then the indices of each expansion
    ancestors: Tensor | None  # the matrix of the last frontier; None before the first expansion

    @classmethod
    def pack(
        cls, levels: Sequence[TreeLevel], expansions: Sequence[Expansion], scores: Tensor, ancestors: Tensor | None
    ) -> LevelTensors:
        """Pack levels; `scores` are the expansion scores, log path probabilities by which the last one is expanded."""
        widths = tuple(expansion.scores.shape[1] for expansion in expansions)
        log_paths = [level.log_paths for level in levels]
        log_paths += [expansion.scores for expansion in expansions]
        integers = [level.tokens for level in levels]
        integers += [expansion.indices for expansion in expansions if expansion.indices is not None]
        return cls(widths, torch.cat([*log_paths, scores], dim=1), torch.cat(integers, dim=1), ancestors)

    def unpack(self, children: int, is_first: bool) -> tuple[list[TreeLevel], list[Expansion], Tensor]:
        """Levels, expansions and expansion scores, of trees in which a node has `children` children.

        `is_first`: these are the first tensors of the tree, so they begin with level 1, which has no expansion before
        it.
        """
        level_sizes = [width * children for width in self.widths]
        if is_first:
            level_sizes.insert(0, children)
        levels = len(level_sizes)
        index_sizes = self.widths if children > 1 else ()
        *log_paths, scores = self.log_paths.split([*level_sizes, *self.widths, level_sizes[-1]], dim=1)
        integers = self.integers.split([*level_sizes, *index_sizes], dim=1)
        tokens = integers[:levels]
        indices: Sequence[Tensor | None] = integers[levels:] if children > 1 else [None] * len(self.widths)
        expansions = list(map(Expansion, log_paths[levels:], indices))
        return list(map(TreeLevel, tokens, log_paths[:levels])), expansions, scores
