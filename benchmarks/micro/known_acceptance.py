"""Overhead of the decoding loop alone: a scripted target, and drafts with a known acceptance probability.

The target takes next to no time, so the time of a step is that of the loop; and as acceptance is known, so is the
expected number of tokens per step.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from benchmarks.harness.analysis import estimated_alpha, expected_accepted
from benchmarks.workloads.scripted import KnownAcceptance, ScriptedTarget
from hf_specgen import Statistics

VOCAB, LENGTH, K = 1000, 200, 5


def known_acceptance(
    repeats: int,
    quick: bool = False,
    texts: int | None = None,
    alphas: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0),
    batches: tuple[int, ...] = (1, 8),
) -> list[dict[str, Any]]:
    """Tokens per step beside the formula, and milliseconds of a step outside the forward pass.

    Args:
        repeats: five texts each, if `texts` is None.
        quick: one text.
        texts: texts of 200 tokens for each row of the table.
        alphas: probabilities that a draft token is accepted, given that all before it were.
        batches: numbers of rows.
    """
    target = ScriptedTarget(VOCAB)
    count = texts or (1 if quick else 5 * repeats)
    rows = []
    for batch in batches:
        for alpha in alphas:
            counts, steps = Statistics([]), 0
            for seed in range(count):
                statistics, forwards = _generate(target, alpha, batch, seed)
                counts, steps = counts + statistics, steps + forwards
            loop = counts.seconds["total"] - counts.seconds["prefill"] - counts.seconds["forward"]
            rows.append(
                {
                    "alpha": alpha,
                    "batch": batch,
                    "estimated alpha": estimated_alpha(counts),
                    "tokens/step": counts.tokens_per_step,
                    "expected": 1 + expected_accepted(alpha, K),
                    "loop, ms a step": 1000 * loop / steps,
                    "draft": 1000 * counts.seconds["draft"] / steps,
                    "verify": 1000 * counts.seconds["verify"] / steps,
                }
            )
    return rows


def _generate(target: ScriptedTarget, alpha: float, batch: int, seed: int) -> tuple[Statistics, int]:
    """The statistics of one call, and the number of its decoding steps."""
    target.script = torch.randint(VOCAB, (LENGTH + 8,), generator=torch.Generator().manual_seed(seed))
    candidates = KnownAcceptance(target.script.tolist(), alpha, K, VOCAB, seed)
    target.forwards = 0
    prompt = target.script[:8].expand(batch, -1)
    ids = cast(Any, target).generate(prompt, max_new_tokens=LENGTH, candidate_generator=candidates)
    assert torch.equal(ids, target.script.expand(batch, -1)), "the output differs from the script"
    assert candidates.speculation is not None
    return candidates.speculation, target.forwards - 1
