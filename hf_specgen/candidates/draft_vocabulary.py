"""A smaller vocabulary for a drafter: its output matrix is restricted to frequent tokens.

With vocabularies of 150,000 to 250,000 tokens most of a small drafter's pass is its output matrix. Tokens that are left
out are never drafted; the target generates them itself, so that the text is the same. q is the softmax over the tokens
that are left, which rejection sampling needs.

Source: Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling"
(2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.call import as_count
from hf_specgen.heads.base import BoundHead
from hf_specgen.targets.model_parts import sharing_copy, with_part

DraftVocabulary = Literal["frequent"] | Sequence[int] | None
"""Token ids; or "frequent": a quarter of the vocabulary, the most frequent tokens; None: all tokens."""


class TokenIds(tuple[int, ...]):
    """Ids of tokens in ascending order, without repetitions."""

    def __repr__(self) -> str:
        return f"{len(self)} tokens"


def check_vocabulary(setting: DraftVocabulary) -> Literal["frequent"] | TokenIds | None:
    """The setting; `ValueError` if it is none."""
    if setting is None or (isinstance(setting, str) and setting == "frequent"):
        return setting
    given: Any = setting.tolist() if hasattr(setting, "tolist") else setting
    ids = [as_count(token, 0) for token in given] if isinstance(given, Iterable) else []
    if not ids or None in ids:
        raise ValueError(f'draft_vocabulary must be "frequent", None or token ids, got {setting!r:.80}')
    return TokenIds(sorted({token for token in ids if token is not None}))


def vocabulary_ids(
    setting: Literal["frequent"] | TokenIds, prompts: Sequence[Sequence[int]], size: int
) -> torch.Tensor:
    """The ids of a draft vocabulary, in ascending order, out of `size`.

    "frequent" are those of the prompts, the most frequent first, and then the lowest: byte-pair encodings number tokens
    in the order in which they were merged, which is about that of their frequency.

    Example:
        >>> vocabulary_ids("frequent", [[9, 9, 30]], 16).tolist()
        [0, 1, 2, 9]
    """
    if setting != "frequent":
        if setting[-1] >= size:
            raise ValueError(f"draft_vocabulary has token {setting[-1]}, but the drafter has {size} tokens")
        return torch.tensor(setting)
    seen = (token for token, _ in Counter(chain.from_iterable(prompts)).most_common() if 0 <= token < size)
    return torch.tensor(sorted(list(dict.fromkeys(chain(seen, range(size))))[: max(1, size // 4)]))


def restricted_model(model: PreTrainedModel, ids: torch.Tensor) -> tuple[PreTrainedModel, torch.Tensor]:
    """A model that shares all modules but the output matrix, and the tokens of that, on its device."""
    matrix: Any = model.get_output_embeddings()
    rows = _rows(matrix, ids)
    return with_part(model, matrix, rows), ids.to(rows.weight.device)


def restricted_head(bound: BoundHead, ids: torch.Tensor) -> BoundHead:
    """A head that shares all modules but the output matrix."""
    head = sharing_copy(bound.head)
    rows = _rows(bound.output_matrix, ids)
    head.config = replace(bound.head.config, draft_vocab_size=len(ids), own_lm_head=True)
    head.draft_to_target = ids.to(rows.weight.device)
    return replace(bound, head=head, output_matrix=rows)


def _rows(matrix: Any, ids: torch.Tensor) -> nn.Linear:
    """Some rows of an output matrix."""
    if not isinstance(matrix, nn.Linear) or type(matrix.weight.data) is not torch.Tensor:
        raise ValueError(f"draft_vocabulary needs a drafter with a plain output matrix, not {type(matrix).__name__}")
    ids = ids.to(matrix.weight.device)
    rows = nn.Linear(matrix.in_features, len(ids), bias=matrix.bias is not None, device="meta")
    rows.weight = nn.Parameter(matrix.weight.detach()[ids], requires_grad=False)
    if matrix.bias is not None:
        rows.bias = nn.Parameter(matrix.bias.detach()[ids], requires_grad=False)
    return rows
