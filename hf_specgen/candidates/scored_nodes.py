"""What a network proposes after each node that it has read in a pass: the most likely tokens, from its logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.tree_builder import Floats, Ints

MAX_SIBLING_CONFIDENCE = 0.95
"""Assumed limit of a distribution's largest probability, so that later siblings keep a share of what is left."""


class ScoredNodes(NamedTuple):
    """The proposals of a pass, most preferred first.

    Args:
        tokens: `[batch, nodes, count]`.
        confidence: `[batch, nodes, count]` of the network in each, as the verification samples.
        probability: `[batch, nodes, count]` of each by the network, without the noise of the step; the confidences if
            they were not asked for.
        expandable: `[batch, nodes, count]` whether the token may have children; None if all may.
        q: `[batch, nodes, vocab]` probabilities, if verification needs them.
    """

    tokens: Ints
    confidence: Floats
    probability: Floats
    expandable: NDArray[np.bool_] | None
    q: torch.Tensor | None

    def at(self, places: Ints, children: int) -> tuple[Ints, Floats, NDArray[np.bool_] | None]:
        """Tokens, confidences and `expandable` of some nodes.

        Args:
            places: `[batch, n]` of the nodes among those of the pass.
            children: how many tokens of each.
        """
        row = np.arange(len(places))[:, None]
        chosen = row, places, slice(children)
        return (
            self.tokens[chosen],
            self.confidence[chosen],
            None if self.expandable is None else self.expandable[chosen],
        )


class NodeScorer:
    """Reads proposals off the logits of a network.

    Args:
        call: the call, whose verification weighs the tokens.
        vocab: size of the target's vocabulary.
        threshold: probability below which a token is not expanded.
        wants_q: whether verification needs the probabilities.
    """

    def __init__(self, call: DraftCall, vocab: int, threshold: float, wants_q: bool):
        self._call, self._vocab, self._threshold, self._wants_q = call, vocab, threshold, wants_q

    def score(self, logits: torch.Tensor, depth: Ints, count: int, with_probability: bool = False) -> ScoredNodes:
        """The most likely tokens after each node.

        Args:
            logits: `[batch, nodes, vocab]` after each node.
            depth: `[batch, nodes]` of each node, 0 for a row's last token.
            count: how many tokens of each node.
            with_probability: whether their probabilities are needed besides the confidences.
        """
        call, vocab = self._call, self._vocab
        scores = logits[..., :vocab].float()
        if call.verification is not None:
            scores = call.verification.processors.warp(scores.flatten(0, 1)).view(scores.shape)
        texts = zip(call.state.generated, depth.tolist(), strict=True)
        steps = [[len(text) + below for below in row] for text, row in texts]
        weights = (
            scores.softmax(dim=-1) if call.verification is None else call.verification.draft_weights(scores, steps)
        )
        best, tokens = weights.topk(min(count, weights.shape[-1]), dim=-1)
        share = best / weights.sum(dim=-1, keepdim=True)
        probability, expandable, q = share, None, None
        if self._wants_q or self._threshold or (with_probability and call.do_sample):
            probabilities = scores.softmax(dim=-1)
            probability = probabilities.gather(-1, tokens)
            if self._wants_q or self._threshold:
                expandable = (probability >= self._threshold).cpu().numpy()
            if self._wants_q:
                q = pad(probabilities, (0, vocab - probabilities.shape[-1]))
                share = share_by_rank(probabilities.amax(dim=-1), best.shape[-1])
        both = torch.stack([share, probability]) if with_probability else share[None]
        numbers = both.cpu().numpy().astype(np.float64)
        return ScoredNodes(tokens.cpu().numpy(), numbers[0], numbers[-1], expandable, q)


def share_by_rank(largest: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[…]` largest probabilities of distributions to `[…, ranks]` confidences in samples drawn from them.

    In rejection sampling a node must not be left out because of its token, only because of its rank: otherwise the
    sampled tokens would not have the distribution q.
    """
    left = 1 - largest.clamp(max=MAX_SIBLING_CONFIDENCE)
    powers = torch.arange(ranks, device=largest.device)
    return largest[..., None] * left[..., None] ** powers
