"""Grows the most probable chain of continuations of a text, as `ngram_tree` grows a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice, takewhile
from operator import mul

from hf_specgen.candidates.ngram_odds import FREQUENT, MatchOdds
from hf_specgen.candidates.ngram_tree import Frequent, Limits, NgramTree
from hf_specgen.candidates.ngram_votes import MAX_VOTERS, Occurrence, frequent_tokens, unanimous, vote


def grow_chain(
    occurrences: Sequence[Occurrence],
    odds: MatchOdds,
    limits: Limits,
    frequent: Frequent = (),
    find: Callable[[int], Sequence[Occurrence]] = lambda token: (),
) -> NgramTree:
    """Grow a chain of the most probable next token, the most probable one after it, and so on.

    Args:
        occurrences, odds, limits, frequent, find: see `grow_tree`.

    Example:
        >>> from hf_specgen.candidates.ngram_odds import OWN
        >>> text = [1, 2, 3, 1, 2, 4, 1, 2]
        >>> grow_chain([(text, 8, 5, 2, OWN), (text, 8, 2, 2, OWN)], MatchOdds(), Limits(depth=2, nodes=4)).first(2)
        ([4, 1], (-1, 0))
    """
    tree, voters, depth, joint = NgramTree(), occurrences, 0, 1.0
    max_depth, min_joint = min(limits.depth, limits.nodes), limits.min_joint
    while depth < max_depth:
        values, proposers, total = vote(voters, depth, odds)
        token, probability = _most_probable(values, total)
        voters = proposers[token][:MAX_VOTERS] if values else []
        # No frequent token is more probable than its share of the text allows.
        if depth == 0 and frequent and probability < odds.values[FREQUENT] * frequent[0][1]:
            for other, other_probability in islice(frequent_tokens(frequent, values, total, odds), 1):
                if other_probability > probability:
                    token, probability, voters = other, other_probability, []
        joint *= probability
        if joint <= min_joint:
            break
        tree.add(token, depth - 1, joint, voters)
        voters = voters or find(token)
        depth += 1
        if (len(values) == 1 or len(voters) == 1) and voters:
            tokens, probabilities = unanimous(voters, depth, max_depth - depth, odds)
            joints = list(takewhile(min_joint.__lt__, accumulate(probabilities, mul, initial=joint)))[1:]
            depth += tree.add_chain(tokens, joints, voters)
            joint = tree.joint[-1]
            if len(joints) < len(tokens):
                break
    return tree


def _most_probable(values: dict[int, float], total: float) -> tuple[int, float]:
    """The token with the largest share of the total, the first of several, and this share; 0 if there is none."""
    highest = max(values.values(), default=0.0) / total
    for token, value in values.items():
        if value / total == highest:
            return token, highest
    return -1, 0.0
