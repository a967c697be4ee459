"""Goodness of fit of what a verifier emits: a Markov target with 16 tokens, and a draft with its logits negated.

Each trial is a row of one large batch. The distribution of a token is known given the token before it, so the counts
are compared stratum by stratum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_specgen.state import GenerationState
from hf_specgen.tree import DraftTree, Parents, children, depths
from hf_specgen.verification import Verifier
from hf_specgen.verification.processors import LogitsPipeline

VOCAB = 16
FIRST = 3
"""The last token of the prompt, in every trial."""

Draw = Callable[[int, Parents], tuple[torch.Tensor, torch.Tensor | None]]
"""From the number of trials and the parents to `[trials, nodes]` tokens and `[trials, nodes, VOCAB]` q."""


@lru_cache
def target_logits() -> torch.Tensor:
    """`[VOCAB, VOCAB]`: row v holds the logits after token v. The draft's are their negation."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


def warpers() -> LogitsProcessorList:
    return LogitsProcessorList([TemperatureLogitsWarper(1.2), TopKLogitsWarper(13)])


def processed(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities after temperature and top-k."""
    return warpers()(None, logits).softmax(dim=-1)


def previous_tokens(tokens: torch.Tensor, parents: Parents, node: int) -> torch.Tensor:
    """`[trials]` the token that the node follows."""
    return tokens[:, parents[node]] if parents[node] >= 0 else torch.full((len(tokens),), FIRST)


def emitted(verifier: Verifier, draw: Draw, parents: Parents, trials: int) -> torch.Tensor:
    """`[trials, 1 + depth]` the tokens that each trial emits in one step, -1 behind its last."""
    tokens, q = draw(trials, parents)
    tree = DraftTree(tokens, (parents,) * trials, q)
    verifier.begin(None, None, True, False)  # type: ignore[arg-type]
    scores = warpers()(None, target_logits())[_slot_tokens(tokens)]
    nodes = [range(-1, len(parents))] * trials
    chosen = verifier.choose(scores, [], tree, nodes)
    return _follow(chosen, tokens, parents)


def emitted_by_verify(
    verifier: Verifier, draw: Draw, parents: Parents, trials: int, processors: LogitsProcessorList
) -> torch.Tensor:
    """The same through `verify`, which applies the processors itself and follows the choices row by row."""
    tokens, q = draw(trials, parents)
    sequences = GenerationState(torch.full((trials, 1), FIRST), None, (), float("inf"), None)
    verifier.begin(LogitsPipeline(processors, sequences), sequences, True, False)
    logits = target_logits()[_slot_tokens(tokens)]
    verdict = verifier.verify(DraftTree(tokens, (parents,) * trials, q), logits, [True] * trials)
    width = 1 + max(depths(parents))
    return torch.tensor([text + [-1] * (width - len(text)) for text in verdict.tokens])


def _slot_tokens(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((len(tokens), 1), FIRST), tokens], dim=1)


def _follow(chosen: torch.Tensor, tokens: torch.Tensor, parents: Parents) -> torch.Tensor:
    """Go down the tree with every trial at once, level by level; a trial that has left it stays at slot -1."""
    trials = torch.arange(len(tokens))
    slot = torch.zeros(len(tokens), dtype=torch.long)
    columns = []
    for _ in range(1 + max(depths(parents))):
        picked = torch.where(slot >= 0, chosen[trials, slot.clamp(min=0)], -1)
        columns.append(picked)
        following = torch.full_like(slot, -1)
        for place, below in enumerate(children(parents)):
            for node in below:
                following[(slot == place) & (tokens[:, node] == picked)] = node + 1
        slot = following
    return torch.stack(columns, dim=1)


def p_values(texts: torch.Tensor) -> list[float]:
    """For each output position, the p-value of the hypothesis that the token there has the target's distribution."""
    p = processed(target_logits()).double()
    before = _slot_tokens(texts)
    values = []
    for position in range(texts.shape[1]):
        reached = texts[:, position] >= 0
        pairs = before[reached, position] * VOCAB + texts[reached, position]
        values.append(_chi_square(pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB).double(), p))
    return values


def _chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's test, one stratum per row; the cells of a row that expect fewer than 8 are taken together."""
    if bool(counts[p == 0].any()):
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, expected in zip(counts, p * counts.sum(dim=1, keepdim=True), strict=True):
        small = expected < 8
        cells = list(zip(observed[~small].tolist(), expected[~small].tolist(), strict=True))
        if float(expected[small].sum()) >= 8:
            cells.append((float(observed[small].sum()), float(expected[small].sum())))
        if len(cells) > 1:
            total_observed, total_expected = (sum(column) for column in zip(*cells, strict=True))
            scale = total_observed / total_expected  # 1, unless cells too small to count were left out
            statistic += sum((o - e * scale) ** 2 / (e * scale) for o, e in cells)
            freedom += len(cells) - 1
    assert freedom >= VOCAB / 2, "too few trials came here to test anything"
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))
