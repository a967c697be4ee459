"""The losses of Medusa heads: of the heads, and of the target that is adapted together with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from corpus import Batch
from distillation import CHUNK
from draft_loss import draft_loss, gradient_at_once
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.targets.model_parts import output_logits, output_matrix


def medusa_loss(
    target: PreTrainedModel,
    heads: MedusaHeads,
    outputs: Sequence[nn.Module],
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Sum over heads and positions of 0.8^h KL(p || q); see `draft_loss`.

    Args:
        target: for p, which has no gradient.
        heads: are trained.
        outputs: the output matrix of each head.
        hidden: `[positions, hidden]` inputs of the target's output matrix at the answers' positions, row by row.
        tokens: `[positions, tokens, hidden]` embeddings of the tokens that follow those positions, for heads that read
            tokens.
        rows: `[positions]` index of the answer of each position.
    """
    states = [heads.head_state(head, hidden, tokens) for head in range(heads.config.num_heads)]
    logits = [partial(output_logits, target, matrix=output) for output in outputs]
    trained = [parameter for output in outputs for parameter in output.parameters()]
    return draft_loss(target, states, logits, hidden, rows, trained=trained)


def following_tokens(batch: Batch, heads: MedusaHeads) -> torch.Tensor:
    """`[positions, tokens]` the tokens after each predicting position, as many as the heads read.

    Those beyond the end of a row are arbitrary: no head that reads them has a token to predict.
    """
    read = max(1, heads.config.tokens_read(heads.config.num_heads - 1))
    ids, predicts = batch["input_ids"], batch["predicts"]
    return torch.stack([ids.roll(-after, dims=1)[predicts] for after in range(1, read + 1)], dim=1)


def answer_loss(target: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The target's own cross-entropy, summed over positions, in chunks.

    Args:
        target: for the output matrix.
        hidden: `[positions, hidden]`, with a gradient.
        tokens: `[positions]` the tokens to predict.
    """

    def parts(leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for first in range(0, len(hidden), CHUNK):
            logits = output_logits(target, leaves[0][first : first + CHUNK]).float()
            yield cross_entropy(logits, tokens[first : first + CHUNK], reduction="sum")

    return gradient_at_once(parts, [hidden], list(output_matrix(target).parameters()))
