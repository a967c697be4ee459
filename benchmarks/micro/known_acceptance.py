"""Speed of drafts whose acceptance is known, in batches: what verification yields apart from any drafter.

The drafts are the answers of plain decoding, each token replaced by another one with a given probability. They take no
time, so that the speedup is that of the verification alone; with all tokens right it is the most that drafts of this
length can gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.harness.variants import PLAIN
from benchmarks.micro.large_target import large_setup
from hf_specgen import Candidates, DraftSession, DraftTree, FixedDepth, NgramCandidates
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.evaluation.measure import Comparison, Variant, measure_call
from hf_specgen.evaluation.workloads import domain_prompts, encode

K = 12
ACCEPTANCE = (1.0, 0.8, 0.6)
BATCHES = (1, 8, 32)
NEW_TOKENS = 64


class KnownAnswers(Candidates):
    """Drafts from the answers of plain decoding.

    Args:
        answers: generated tokens of each row.
        acceptance: probability of each draft token that it is the answer's.
    """

    negligible_draft_cost = True

    def __init__(self, answers: Sequence[Sequence[int]], acceptance: float):
        super().__init__(K, FixedDepth(K))
        self.answers = answers
        self.acceptance = acceptance

    def start(self, batch: DraftBatch) -> DraftSession:
        return _KnownAnswersSession(self, batch)


class _KnownAnswersSession(DraftSession):
    tokens_per_pass = ()

    def __init__(self, settings: KnownAnswers, batch: DraftBatch):
        super().__init__(batch)
        self._settings = settings
        self._random = torch.Generator().manual_seed(0)

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        chains = []
        for answer, text, depth in zip(self._settings.answers, self.batch.state.generated, max_depths, strict=True):
            chain = list(answer[len(text) : len(text) + min(K, depth)])
            is_right = torch.rand(len(chain), generator=self._random) < self._settings.acceptance
            chains.append([token if right else 0 for token, right in zip(chain, is_right.tolist(), strict=True)])
        return DraftTree.chains(chains)


def known_acceptance(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed over calls that draft nothing and over plain `generate`, by batch size and acceptance."""
    setup = large_setup(quick)
    mode = "graphs" if setup.device == "cuda" else "auto"
    tokens = 16 if quick else NEW_TOKENS
    rows = []
    for batch in BATCHES[:2] if quick else BATCHES:
        texts = [text for texts in domain_prompts(8).values() for text in texts][:batch]
        encoded = next(encode(setup.tokenizer, texts, batch))
        inputs = {name: tensor.to(setup.device) for name, tensor in encoded.items()}
        generation = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        plain: Any = setup.model
        output = plain.generate(**inputs, **generation)
        answers = output[:, inputs["input_ids"].shape[1] :].tolist()
        strategies: dict[str, Candidates] = {"no drafts": NgramCandidates(policy=FixedDepth(0))}
        strategies |= {f"acceptance {value}": KnownAnswers(answers, value) for value in ACCEPTANCE}
        variants = [PLAIN]
        for name, candidates in strategies.items():
            variants.append(Variant(name, partial(dict, candidate_generator=candidates, compile=mode)))
        for variant in variants:  # the first call captures
            measure_call(setup.model, inputs, variant, generation, 0)
        measured = Comparison(variants, requests=1)
        for _ in range(repeats):
            list(measured.measure(setup.model, inputs, generation))
        for name in measured.samples:
            row: dict[str, Any] = {"variant": name, "batch": batch, "tokens/s": measured.tokens_per_second(name)}
            row["over no drafts"] = measured.speed(name, "no drafts").value
            rows.append(row | {"over plain": measured.speed(name).value})
    return rows
