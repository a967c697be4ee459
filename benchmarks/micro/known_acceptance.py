"""The loop's own cost: a scripted target, and guesses that are right with a probability of our choice.

Everything but the loop is free here, so what a step takes is what the loop takes; and since acceptance is known, so is
the number of tokens per step that must come out.
"""

from __future__ import annotations

import random
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from benchmarks.common import Rows
from benchmarks.replay import ScriptedTarget
from hf_specgen import Candidates, DraftTree
from hf_specgen.candidates import DraftContext, Drafter
from hf_specgen.evaluation.analysis import estimated_alpha, expected_accepted
from hf_specgen.statistics import Statistics

VOCAB, LENGTH, K = 1000, 200, 5


def synthetic(texts: int, alphas: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0), batches: tuple[int, ...] = (1, 8)) -> Rows:
    """Tokens per step against the formula, and milliseconds of a step beside the forward pass.

    Args:
        texts: how many texts of 200 tokens are written for each row of the table.
        alphas: probability that a guess is right, given that those before it in the draft were.
        batches: rows at once.
    """
    rows: Rows = []
    target = ScriptedTarget(VOCAB)
    for batch in batches:
        for alpha in alphas:
            counts = Statistics([])
            for seed in range(texts):
                counts += _write(target, alpha, batch, seed)
            loop = counts.seconds["total"] - counts.seconds["prefill"] - counts.seconds["forward"]
            forwards = counts.seconds["forwards"]
            rows.append(
                {
                    "alpha": alpha,
                    "batch": batch,
                    "alpha found": estimated_alpha(counts),
                    "tokens/step": counts.tokens_per_step,
                    "expected": 1 + expected_accepted(alpha, K),
                    "loop, ms a step": 1000 * loop / forwards,
                    "draft": 1000 * counts.seconds["draft"] / forwards,
                    "verify": 1000 * counts.seconds["verify"] / forwards,
                }
            )
    return rows


def _write(target: ScriptedTarget, alpha: float, batch: int, seed: int) -> Statistics:
    target.script = torch.randint(VOCAB, (LENGTH + 8,), generator=torch.Generator().manual_seed(seed))
    guesses = RightSometimes(target.script.tolist(), alpha, K, seed)
    target.forwards = 0
    prompt = target.script[:8].expand(batch, -1)
    ids = cast(Any, target).generate(prompt, max_new_tokens=LENGTH, candidate_generator=guesses)
    assert torch.equal(ids, target.script.expand(batch, -1)), "the loop did not write the text"
    assert guesses.speculation is not None
    guesses.speculation.seconds["forwards"] = target.forwards - 1  # the first read the prompt
    return guesses.speculation


class RightSometimes(Candidates):
    """Guesses what comes next in a known text, each token right with probability alpha.

    Args:
        script: the text, prompt included.
        alpha: probability that a guess is right.
        k: length of a draft.
        seed: of the draws.
    """

    def __init__(self, script: list[int], alpha: float, k: int, seed: int):
        self.script, self.alpha, self.k, self.seed = script, alpha, k, seed

    def bind(self, context: DraftContext, model: PreTrainedModel | None) -> Drafter:
        return _RightSometimes(self, len(context.prompts[0]))


class _RightSometimes(Drafter):
    def __init__(self, settings: RightSometimes, prompt: int):
        self._settings, self._prompt = settings, prompt
        self._random = random.Random(settings.seed)

    def draft(self, context: DraftContext) -> DraftTree:
        return DraftTree.chains([self._row(row, context) for row in range(len(context.generated))])

    def _row(self, row: int, context: DraftContext) -> list[int]:
        start = self._prompt + len(context.generated[row])
        truth = self._settings.script[start : start + min(self._settings.k, context.budget[row])]
        return [token if self._random.random() < self._settings.alpha else (token + 1) % VOCAB for token in truth]
