"""Rejection sampling for one slot, in plain Python: written to be believed by reading. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

Distribution = list[float]


def normalised(weights: Sequence[float]) -> Distribution:
    total = sum(weights)
    return [weight / total for weight in weights]


def judge(
    p: Sequence[float], guesses: Sequence[tuple[int, Sequence[float] | None]], uniforms: Sequence[float]
) -> tuple[int, Distribution]:
    """Accept one of the siblings, or none.

    Args:
        p: of the target.
        guesses: of each sibling its token and the q that it was drawn from, before its elder siblings were taken out
            of it; None if nothing was left to chance.
        uniforms: one number in [0, 1) for each guess.

    Returns:
        the accepted token or -1, and the distribution of the token to draw if none was accepted.
    """
    p = list(p)
    seen: list[int] = []
    for (token, q), uniform in zip(guesses, uniforms, strict=True):
        if q is None:
            q = [float(other == token) for other in range(len(p))]
        else:
            q = normalised([0.0 if other in seen else q[other] for other in range(len(p))])
        if uniform < p[token] / q[token]:
            return token, p
        p = normalised([max(0.0, p[other] - q[other]) for other in range(len(p))])
        seen.append(token)
    return -1, p
