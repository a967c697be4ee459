"""The fixed shapes of compiled passes: padded numbers of tokens, and masks for all slots that attention reads."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hf_specgen.targets.attention import fold_mask
from hf_specgen.tree import DraftTree

FIRST_WIDTHS = (1, 4)
"""Smallest widths; from 8 on they double. A pass over one token is the most frequent one of a draft model."""


def padded_width(tokens: int) -> int:
    """The number of tokens that a compiled pass over so many tokens is padded to.

    Example:
        >>> [padded_width(tokens) for tokens in (1, 2, 5, 9, 33)]
        [1, 4, 8, 16, 64]
    """
    for width in FIRST_WIDTHS:
        if tokens <= width:
            return width
    return 1 << (tokens - 1).bit_length()


def padded_pass(
    tree: DraftTree, inputs: dict[str, torch.Tensor], tokens: int
) -> tuple[DraftTree, dict[str, torch.Tensor]]:
    """The draft and the inputs of a pass over so many tokens, padded to the width of a compiled pass.

    Inputs are `[batch, tokens]`; padded ones lie in memory of their own, as compiled passes also fix strides.
    """
    width = padded_width(tokens)
    padded = {}
    for name, given in inputs.items():
        padded[name] = given.new_zeros(len(given), width)
        padded[name][:, :tokens] = given
    return DraftTree(pad(tree.tokens, (0, width - tokens)), tree.parents), padded


def fixed_mask(mask: torch.Tensor, batch: int, columns: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask of fixed shape: for all rows, with columns for all slots that attention reads.

    Args:
        mask: `[batch or 1, 1, queries, slots]`, bool or numbers to add to the scores.
        batch, columns: of the result.
        groups: fold the mask for so many query heads per key/value head; 0 if not.
        dtype: of the folded mask.
    """
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    fixed = mask.new_full((batch, 1, mask.shape[2], columns), hidden)
    fixed[..., : mask.shape[3]] = mask
    return fold_mask(fixed, groups, dtype) if groups else fixed
