"""Rejection sampling at one slot, in plain Python without tensors: written to be verified by reading."""

from collections.abc import Sequence

Distribution = list[float]


def normalised(weights: Sequence[float]) -> Distribution:
    """The weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def accept_or_reject(
    p: Sequence[float], drafts: Sequence[tuple[int, Sequence[float] | None]], uniforms: Sequence[float]
) -> tuple[int, Distribution]:
    """Accept one of the siblings, or none.

    Args:
        p: of the target.
        drafts: of each sibling its token and the q that it was sampled from, before its earlier siblings were removed;
            None for a deterministic proposal.
        uniforms: one number in [0, 1) for each sibling.

    Returns:
        the accepted token or -1, and the distribution of the token to sample if none was accepted.
    """
    p = list(p)
    seen: list[int] = []
    for (token, q), uniform in zip(drafts, uniforms, strict=True):
        if q is None:
            q = [float(other == token) for other in range(len(p))]
        else:
            q = normalised([0.0 if other in seen else q[other] for other in range(len(p))])
        if uniform < p[token] / q[token]:
            return token, p
        p = normalised([max(0.0, p[other] - q[other]) for other in range(len(p))])
        seen.append(token)
    return -1, p
