"""A quick measured run: T(q) of the target, and every strategy against plain `generate` on a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import Candidates, CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.evaluation.cost import CostCurve, measure_cost_curve
from hf_specgen.evaluation.measure import Total, Variant, interleave
from hf_specgen.evaluation.workloads import encode

PLAIN = "plain"
PROMPTS = (
    "Rename `x` to `total` in this code and repeat it whole.\n\n"
    "def add(x, y):\n    x = x + y\n    if x > 10:\n        x = 10\n    return x\n",
    "Write a Python function that parses a CSV line, with a docstring and two examples.",
    "Tell a short story about a lighthouse keeper who collects clocks.",
)


class Trial:
    """The models, loaded.

    Args:
        model, draft: Hub ids or folders; "" for no draft.
        dtype, device: how they are loaded.
        batch: prompts per call; the prompts are repeated as needed.
    """

    def __init__(self, model: str, draft: str, dtype: torch.dtype, device: str, batch: int):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model: PreTrainedModel = cast(Any, loaded).to(device).eval()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.strategies: dict[str, Candidates] = {"n-grams": NgramCandidates()}
        if draft:
            network = DraftModelCandidates(draft, dtype=dtype)
            self.strategies["draft model"] = network
            self.strategies["n-grams, draft model"] = CombinedCandidates([NgramCandidates(), network])
        self.batch = batch

    def costs(self) -> CostCurve:
        """T(q) at this batch, with a short context."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        return measure_cost_curve(
            self.model, (1, 2, 4, 8, 16), context=min(128, limit // 2), batch=self.batch, repeats=5
        )

    def race(self, prompts: Sequence[str], max_new_tokens: int, generation: dict[str, Any]) -> dict[str, Total]:
        """Everything on the same prompts, after a call of each to warm up."""
        variants = [Variant(PLAIN, dict)] + [
            Variant(name, partial(dict, candidate_generator=strategy)) for name, strategy in self.strategies.items()
        ]
        texts = list(prompts) if self.batch == 1 else list(prompts) * (-(-self.batch // len(prompts)))
        batches = list(encode(self.tokenizer, texts, self.batch))
        for _ in interleave(self.model, batches[:1], variants, {"max_new_tokens": 16, **generation}):
            pass
        totals = {variant.name: Total() for variant in variants}
        for samples in interleave(self.model, batches, variants, {"max_new_tokens": max_new_tokens, **generation}):
            for name, sample in samples.items():
                totals[name].add(sample, samples[PLAIN])
        return totals
