"""A quick benchmark: T(q) of the target, and every strategy against plain `generate` on a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specgen.candidates.head_candidates import HeadCandidates
from hf_specgen.depth.cost import CostCurve
from hf_specgen.evaluation.cost import measure_cost_curve
from hf_specgen.evaluation.measure import Total, Variant, interleave
from hf_specgen.evaluation.strategies import Strategy
from hf_specgen.evaluation.taps import TapsResult, compare_taps
from hf_specgen.evaluation.workloads import PLAIN, encode, load_model

QUERIES = (1, 2, 4, 8, 16)
"""Tokens per row of the timed passes."""
CONTEXT = 128
"""Cached tokens at which T(q) is measured: that of a short prompt with half an answer."""
PROMPTS = (
    "Rename `x` to `total` in this code and repeat it whole.\n\n"
    "def add(x, y):\n    x = x + y\n    if x > 10:\n        x = 10\n    return x\n",
    "Write a Python function that parses a CSV line, with a docstring and two examples.",
    "Tell a short story about a lighthouse keeper who collects clocks.",
)


class QuickBenchmark:
    """The target, loaded, and the strategies.

    Args:
        model: Hub id or folder of the target.
        strategies: compared with plain `generate`.
        dtype, device: of the target.
        batch: prompts per call; the prompts are repeated as needed.

    Raises:
        OSError, ValueError: if the model cannot be loaded.
    """

    def __init__(self, model: str, strategies: Sequence[Strategy], dtype: torch.dtype, device: str, batch: int):
        self.model, self.tokenizer = load_model(model, dtype, device)
        self.strategies, self.batch = strategies, batch

    def cost_curve(self) -> CostCurve:
        """T(q) at this batch size, with a short context."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        return measure_cost_curve(self.model, QUERIES, context=min(CONTEXT, limit // 2), batch=self.batch, repeats=5)

    def compare_taps(self, prompts: Sequence[str], generation: dict[str, Any]) -> list[TapsResult]:
        """The acceptance of heads with their configured taps and with neighbours; empty without such heads."""
        heads = next((one.candidates for one in self.strategies if isinstance(one.candidates, HeadCandidates)), None)
        if heads is None:
            return []
        return compare_taps(self.model, heads, list(encode(self.tokenizer, prompts, 1)), generation)

    def run(self, prompts: Sequence[str], rounds: int, generation: dict[str, Any]) -> tuple[dict[str, Total], Total]:
        """Time every strategy and plain `generate` on the same prompts, one after the other for each batch.

        A whole uncounted call of each comes first: it prepares kernels, and latency profiles are learnt in it.

        Args:
            prompts: texts.
            rounds: runs of each batch; the variant that runs first changes from run to run.
            generation: arguments of `generate` that all share.

        Returns:
            the totals of each strategy by name, and those of plain `generate`.
        """
        variants = [Variant(PLAIN, dict), *(strategy.variant() for strategy in self.strategies)]
        texts = list(prompts) if self.batch == 1 else list(prompts) * (-(-self.batch // len(prompts)))
        batches = list(encode(self.tokenizer, texts, self.batch))
        for _ in interleave(self.model, batches[:1], variants, generation):
            pass
        totals = {variant.name: Total() for variant in variants}
        for samples in interleave(self.model, batches * rounds, variants, generation, seed=1):
            for name, sample in samples.items():
                totals[name].add(sample, samples[PLAIN])
        plain = totals.pop(PLAIN)
        return totals, plain
