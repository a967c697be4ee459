"""Verification of whole paths: rejection sampling, and typical acceptance, which is lossy.

In rejection sampling the output has the target's distribution, but is not what plain `generate` samples.

A draft token sampled from q is accepted with probability min(1, p/q). If it is rejected, p is replaced by the residual
distribution norm(max(0, p - q)). Accepted or not, the emitted token then has distribution p, and a draft token is
accepted with probability sum_v min(p_v, q_v), the maximum for a token with distribution q. Siblings are verified in
order: each against the residual that its earlier siblings left, with their tokens removed from q.

Whole paths are accepted jointly, which accepts more tokens of the same drafts: a token that is less likely in q than in
p makes up for one before it that is more likely. The weight w of a node is the probability that the text continues
through it: w(child) = min(1, w p / q), and 1 for the row's last token. Nodes are visited from the leaves up, and the
first one that is accepted ends the path. A node is accepted with the weight that its children have left, all of which
were rejected before: each leaves the excess e = max(0, w p - q) of the next token, so that w becomes
sum(e) / (sum(e) + 1 - w), and p becomes norm(e). What is accepted at a node or below it then has probability w in all,
and continues with distribution p. For the children of the row's last token alone this is the rule above. So a node
whose scores depend on the choice before it (logits processors that read the text) is verified as the root of a tree of
its children.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 2.3; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023); for siblings Miao et al., "SpecInfer"
(2023), section 4.3, and Jeon et al., "Recursive Speculative Decoding" (2024), without replacement; for whole paths Sun
et al., "Block Verification Accelerates Speculative Decoding" (2024), algorithm 2, and on trees Weng et al., "Traversal
Verification for Speculative Tree Decoding" (2025).
"""

from __future__ import annotations

from functools import lru_cache
from numbers import Real

import torch
from torch.nn.functional import pad

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree, Parents, children
from hf_specgen.verification.base import VerificationSession, Verifier, argmax, exponential_noise, sample_with_noise
from hf_specgen.verification.exact import ExactVerifier, ReusedNoiseSession
from hf_specgen.verification.path_session import Nodes, PathSession


class RejectionVerifier(Verifier):
    """Accepts with probability min(1, p/q): lossless in distribution, but not token for token with the same seed.

    For drafts that carry `DraftTree.q`; a deterministic proposal (point-mass q) is accepted with probability p. In
    greedy decoding it is the same as exact verification. With `history=` it samples with the noise of earlier answers,
    see `hf_specgen.verification.exact`.
    """

    def start(self, call: Call) -> VerificationSession:
        if call.do_sample and call.settings.seeds is not None:
            return ReusedNoiseSession(call, call.settings.seeds)
        return RejectionSession(call) if call.do_sample else ExactVerifier().start(call)


class RejectionSession(PathSession):
    """Rejection sampling in one call."""

    wants_q = True

    def accept(self, scores: torch.Tensor, tree: DraftTree, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        p = scores.softmax(dim=-1)
        batch, queries, vocab = p.shape
        q = tree.q
        if q is not None:
            if q.shape[-1] < vocab:
                q = pad(q, (0, vocab - q.shape[-1]))
            q = q.to(p.device, torch.float32)
        weights, remaining = path_weights(p, q, *nodes)
        accepted = torch.rand(batch, queries, dtype=p.dtype, device=p.device) < weights
        accepted[:, 0] = True  # the row's last token
        # Of the accepted queries the one that is visited first; padding is visited last.
        order = torch.tensor([(*visit_times(row), *[queries] * (queries - 1 - len(row))) for row in tree.parents])
        last = order.to(p.device).masked_fill(~accepted, queries).argmin(dim=1)
        left = remaining[torch.arange(batch, device=p.device), last]
        return last, sample_with_noise(left, exponential_noise(left.shape, p.device))[:, None]


def path_weights(
    p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor, parents: torch.Tensor, is_node: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query, the probability of accepting it, and p after it, given that all nodes below it are rejected.

    These are the w and p above: `[batch, queries]`, and `[batch, queries, vocab]`. Query 0 is the row's last token,
    query ``i + 1`` its node ``i``. `parents` are the queries of the parents, `[batch, nodes]`; where `is_node` is False
    the weight is 0.
    """
    rows = torch.arange(len(p), device=p.device)
    remaining = p.clone()
    is_left = torch.ones_like(p, dtype=torch.bool)  # of each query, the tokens that none of its children so far has
    weights = p.new_zeros(p.shape[:2])
    weights[:, 0] = 1
    # A node gets its weight from its parent, as that is after the rejection of earlier siblings. Its own children come
    # later, and lower it.
    for node, (token, parent, is_real) in enumerate(zip(tokens.T, parents.T, is_node.T, strict=True)):
        query = torch.where(is_real, parent, node + 1)  # of the parent; padding changes its own values only
        token = token[:, None]
        drawn_from = draft_distribution(None if q is None else q[:, node], is_left[rows, query], token)
        is_left[rows, query, token[:, 0]] = False
        reached = weights[rows, query, None] * remaining[rows, query]
        excess = (reached - drawn_from).clamp_(min=0)  # 0 at a rejected token, which has no more than q
        mass = excess.sum(dim=-1)
        rest = 1 - weights[rows, query]
        accepted = (reached.gather(-1, token) / drawn_from.gather(-1, token))[:, 0].clamp(max=1)
        weights[:, node + 1] = torch.where(is_real, accepted, 0)
        # The parent gets the values after the rejection of this node. Without mass w becomes 0, and p is not used:
        # but for the row's last token, where p = q then, and a rejection could only come from rounding.
        has_mass = mass > 0
        weights[rows, query] = torch.where(has_mass, mass / (mass + rest), 0)
        left = excess / mass[:, None]
        remaining[rows, query] = torch.where(has_mass[:, None], left, remaining[rows, query])
    return weights, remaining


@lru_cache(maxsize=4096)
def visit_times(parents: Parents) -> tuple[int, ...]:
    """For each query of a tree, its place in post-order: after all queries below it, and after earlier siblings.

    Example:
        >>> visit_times((-1, -1, 0))  # the first child's child, the first child, the second, the row's last token
        (3, 1, 2, 0)
    """
    lists = children(parents)
    order = list[int]()
    stack = [0]
    while stack:
        order.append(stack.pop())
        stack += [node + 1 for node in lists[order[-1]]]
    times = {query: time for time, query in enumerate(reversed(order))}
    return tuple(times[query] for query in range(len(order)))


def draft_distribution(q: torch.Tensor | None, is_left: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`[…, vocab]` the distribution of draft tokens: q without the tokens of their earlier siblings.

    Where the `[…, 1]` token has probability 0 in it, it was proposed deterministically: a point mass.
    """
    point_mass = torch.zeros_like(is_left, dtype=torch.float32).scatter_(-1, token, 1.0)
    if q is None:
        return point_mass
    remaining = q * is_left
    remaining = remaining / remaining.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(remaining.dtype).tiny)
    return torch.where(remaining.gather(-1, token) > 0, remaining, point_mass)


class TypicalVerifier(Verifier):
    """LOSSY: accepts a draft token with p > min(epsilon, alpha * exp(-entropy(p))); the output distribution differs.

    Of several such siblings, the one with the longest accepted path below it is chosen. The most likely token is always
    accepted if alpha is below 1; with alpha = 1 it is rejected where all possible tokens are equally likely and have a
    probability of at most epsilon. The bonus token is the argmax in greedy decoding, otherwise sampled from p.

    Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024),
    section 2.3.1.

    Args:
        epsilon: a draft token with more than this probability is always accepted.
        alpha: scales the threshold where the target's distribution has high entropy.
    """

    def __init__(self, epsilon: float = 0.3, alpha: float = 0.09):
        super().__init__()
        for name, value in (("epsilon", epsilon), ("alpha", alpha)):
            if not isinstance(value, Real) or not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")
        self.epsilon = epsilon
        self.alpha = alpha

    def start(self, call: Call) -> VerificationSession:
        return _TypicalSession(self, call)

    def threshold(self, p: torch.Tensor) -> torch.Tensor:
        """`[…, vocab]` to `[…]`: the probability above which a draft token is accepted."""
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(dim=-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.epsilon)


class _TypicalSession(PathSession):
    def __init__(self, settings: TypicalVerifier, call: Call):
        super().__init__(call)
        self._settings = settings

    def accept(self, scores: torch.Tensor, tree: DraftTree, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        p = scores.softmax(dim=-1)
        probability = p[torch.arange(len(p), device=p.device)[:, None], nodes.parents, nodes.tokens]
        accepted = (probability > self._settings.threshold(p).gather(1, nodes.parents)) & nodes.are_real
        # The deepest node of which all ancestors are accepted, and it itself; the row's last token always is.
        depths, ancestors = (part.to(p.device) for part in tree.structure())
        is_reached = (pad(accepted, (1, 0), value=True)[:, None] | ~ancestors).all(dim=2)
        last = depths.masked_fill(~is_reached, -1).argmax(dim=1)
        return last, sample_with_noise(p, exponential_noise(p.shape, p.device)) if self.call.do_sample else argmax(
            scores
        )
