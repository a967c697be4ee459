"""Chi-square tests of the tokens that a verifier emits.

The target is a Markov chain over 16 tokens; the draft has its logits negated, so that p and q are far apart.

Each trial is a row of one large batch. The distribution of a token is known given the token before it, so the counts
are compared separately for each previous token.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_specgen.call import GenerationState
from hf_specgen.tree import DraftTree, Parents, depths
from hf_specgen.verification import VerificationResult, VerificationSession, Verifier
from tests.helpers.calls import make_call, make_state

VOCAB = 16
FIRST = 3
"""The last token of the prompt, in every trial."""
MIN_EXPECTED_COUNT = 8.0
"""Cells that are expected to hold fewer counts are pooled: there the chi-square approximation is poor."""
MIN_DEGREES_OF_FREEDOM = 8
"""Minimum degrees of freedom of a test; with fewer it has little power."""

Draw = Callable[[int, Parents], tuple[torch.Tensor, torch.Tensor | None]]
"""From the number of trials and the parents to `[trials, nodes]` tokens and `[trials, nodes, VOCAB]` q."""


@lru_cache
def target_logits() -> torch.Tensor:
    """`[VOCAB, VOCAB]`: row v holds the logits after token v. The draft's are their negation."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


def warpers() -> LogitsProcessorList:
    """Temperature and top-k."""
    return LogitsProcessorList([TemperatureLogitsWarper(1.2), TopKLogitsWarper(13)])


def warped(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities after temperature and top-k."""
    return warpers()(None, logits).softmax(dim=-1)


def previous_tokens(tokens: torch.Tensor, parents: Parents, node: int) -> torch.Tensor:
    """`[trials]` the token that the node follows."""
    return tokens[:, parents[node]] if parents[node] >= 0 else torch.full((len(tokens),), FIRST)


def start_session(
    verifier: Verifier, trials: int, processors: LogitsProcessorList | None = None, *, do_sample: bool = True
) -> VerificationSession:
    """The verifier's session in a call of `trials` rows, whose prompts are the token `FIRST`."""
    return verifier.start(make_call(_state(trials), processors=processors, do_sample=do_sample))


@lru_cache
def _state(trials: int) -> GenerationState:
    """The state of all trials, which one step does not change: the tokens that it emits are not appended."""
    return make_state([[FIRST]] * trials)


def verify_once(
    verifier: Verifier, tree: DraftTree, logits: torch.Tensor, processors: Any = None, **call: bool
) -> VerificationResult:
    """The outcome of one step in which all rows take part."""
    session = start_session(verifier, tree.batch, processors, **call)
    return session.verify(tree, logits, [True] * tree.batch)


def emitted(verifier: Verifier, draw: Draw, parents: Parents, trials: int, *processors: Any) -> torch.Tensor:
    """`[trials, 1 + depth]` the tokens that each trial emits in one step, -1 after its last."""
    tokens, q = draw(trials, parents)
    tree = DraftTree(tokens, (parents,) * trials, q)
    both = LogitsProcessorList([*warpers(), *processors])
    result = verify_once(verifier, tree, target_logits()[_tokens_before(tokens)], both)
    width = 1 + max(depths(parents))
    return torch.tensor([text + [-1] * (width - len(text)) for text in result.tokens])


def _tokens_before(tokens: torch.Tensor) -> torch.Tensor:
    """`[trials, 1 + nodes]` the token that the target's logits follow: the prompt's, then each node's own."""
    return torch.cat([torch.full((len(tokens), 1), FIRST), tokens], dim=1)


def p_values(texts: torch.Tensor) -> list[float]:
    """For each output position, the p-value of the hypothesis that its token has the target's distribution."""
    p = warped(target_logits()).double().numpy()
    before = _tokens_before(texts)
    values = []
    for position in range(texts.shape[1]):
        reached = texts[:, position] >= 0
        pairs = before[reached, position] * VOCAB + texts[reached, position]
        counts = pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB).double().numpy()
        values.append(goodness_of_fit(counts, p * counts.sum(axis=1, keepdims=True)))
    return values


def goodness_of_fit(observed: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of Pearson's chi-square test of `[strata, cells]` counts; small cells of a stratum are pooled."""
    if observed[expected == 0].any():
        return 0.0
    found, wanted, strata = [], [], 0
    for counts, means in zip(observed, expected, strict=True):
        small = means < MIN_EXPECTED_COUNT
        cells, expectations = [*counts[~small], counts[small].sum()], [*means[~small], means[small].sum()]
        if expectations[-1] < MIN_EXPECTED_COUNT:  # too few even together: left out
            cells, expectations = cells[:-1], expectations[:-1]
        if len(cells) > 1:
            scale = sum(cells) / sum(expectations)
            found += cells
            wanted += [scale * value for value in expectations]
            strata += 1
    assert len(found) - strata >= MIN_DEGREES_OF_FREEDOM, "too few trials reached this position for a test"
    return float(chisquare(found, wanted, ddof=strata - 1).pvalue)


def fit_of_two_tokens(target: Any, ids: torch.Tensor, candidates: Any, calls: int) -> float:
    """The p-value of the first two tokens after the prefill, by rejection sampling in calls with 500 texts each."""
    vocab = target.config.vocab_size
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
        two = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
        logits = target(torch.cat([ids.expand(len(two), -1), two], dim=1)).logits.softmax(-1)
        second, third = logits[::vocab, -2].repeat_interleave(vocab, 0), logits[:, -1]
        second = second.gather(1, two[:, 1:])  # [vocab**2, 1] the probability of the second token after the first
        path = first[two[:, :1]] * second * third  # [vocab**2, vocab] path probability of the three tokens
        expected = path.view(vocab, vocab**2).sum(dim=0)
    torch.manual_seed(11)
    counts, arguments = torch.zeros(vocab**2), {"max_new_tokens": 4, "do_sample": True, "verification": "rejection"}
    for _ in range(calls):
        ids_of_call = target.generate(ids, num_return_sequences=500, candidate_generator=candidates, **arguments)
        counts += torch.bincount(ids_of_call[:, -3] * vocab + ids_of_call[:, -2], minlength=vocab**2)
    assert candidates.speculation is not None and candidates.speculation.accepted > 100
    return goodness_of_fit(counts.numpy()[None], (expected * counts.sum()).numpy()[None])
