"""Rejection sampling of paths, in plain Python without tensors: written to be verified by reading."""

from collections.abc import Sequence

Distribution = list[float]


def normalised(weights: Sequence[float]) -> Distribution:
    """The weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def path_weights(
    p: Sequence[Distribution], q: Sequence[Distribution | None], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[float], list[Distribution]]:
    """Acceptance of whole paths: `rejection.path_weights` for one row, slot by slot from the root down.

    Returns:
        for each slot (the row's last token, then each node) the probability that it is accepted if everything below it
        was rejected, and the distribution of the next token then.
    """
    weights, rest = [1.0] * (len(tokens) + 1), [list(values) for values in p]
    for slot in range(len(tokens) + 1):
        seen: list[int] = []
        for node in (node for node, parent in enumerate(parents) if parent == slot - 1):
            given, token, weight = q[node], tokens[node], weights[slot]
            if given is None:
                drawn = [float(other == token) for other in range(len(rest[slot]))]
            else:
                drawn = normalised([0.0 if other in seen else value for other, value in enumerate(given)])
            weights[node + 1] = min(1.0, weight * rest[slot][token] / drawn[token])
            excess = [max(0.0, weight * one - other) for one, other in zip(rest[slot], drawn, strict=True)]
            seen.append(token)
            weights[slot] = sum(excess) / (sum(excess) + 1 - weight)
            if weights[slot]:  # otherwise the slot is never reached, or its child never rejected
                rest[slot] = normalised(excess)
    return weights, rest
