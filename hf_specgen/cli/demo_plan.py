"""Plan of the demo: length of the answers, order of the prompts, their batches, and order of the variants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from hf_specgen.evaluation.measure import Variant

PROMPTS_WANTED = 5
"""Prompts for which the time is to suffice: one of each embedded domain."""
MIN_TOKENS = 24
"""Answers are not shortened to fewer tokens, so that speculation has several steps."""


def answer_length(longest: int, seconds: float, speed: float, compared: int) -> int:
    """Tokens per answer with which `PROMPTS_WANTED` prompts fit into the time.

    Args:
        longest: the maximum.
        seconds: for all prompts and variants.
        speed: tokens per second of plain `generate`; every variant is assumed to be as slow.
        compared: number of variants, at least plain `generate`.

    Example:
        >>> answer_length(64, seconds=30, speed=200, compared=6), answer_length(64, seconds=40, speed=40, compared=6)
        (64, 53)
        >>> answer_length(64, seconds=40, speed=8, compared=6), answer_length(16, seconds=40, speed=8, compared=6)
        (24, 16)
    """
    return int(min(longest, max(MIN_TOKENS, seconds * speed / max(1, compared) / PROMPTS_WANTED)))


def order(compared: Sequence[Variant], number: int, rows: int) -> list[Variant]:
    """Plain `generate` first, then the others in an order that rotates from prompt to prompt."""
    plain, *others = (variant for variant in compared if variant.batched or rows == 1)
    first = number % max(1, len(others))
    return [plain, *others[first:], *others[:first]]


def round_robin(domains: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """The first prompt of every domain, then the second of every domain, and so on."""
    columns = [[(domain, prompt) for prompt in prompts] for domain, prompts in domains.items()]
    yield from (pair for pair in chain.from_iterable(zip_longest(*columns)) if pair is not None)


def batches(prompts: Sequence[tuple[str, str]], size: int) -> Iterator[tuple[str, list[str]]]:
    """Batches of `size` prompts of one domain; the rest of each domain at the end."""
    incomplete: dict[str, list[str]] = {}
    for domain, prompt in prompts:
        incomplete.setdefault(domain, []).append(prompt)
        if len(incomplete[domain]) == size:
            yield domain, incomplete.pop(domain)
    yield from incomplete.items()
