"""Latency of one n-gram proposal, by context length."""

from __future__ import annotations

import random
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from hf_specgen import DraftBatch, FixedDepth, NgramCandidates
from hf_specgen.call import Call, GenerationState

CONTEXTS, TREES, DEPTH = (1_000, 10_000, 100_000), (None, 32), 10


def ngram_lookup(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Microseconds of one proposal, and milliseconds to index the prompt."""
    rows = []
    generator = random.Random(0)
    for length in CONTEXTS:
        text = [generator.randrange(8192) if generator.random() < 0.5 else 7 for _ in range(length)]
        for tree in TREES:
            candidates = NgramCandidates(k=DEPTH, tree=tree)
            state = GenerationState(torch.tensor([text]))
            begin = perf_counter()
            session = candidates.start(_batch(state, candidates))
            indexing = perf_counter() - begin
            times = []
            for _ in range(200 if quick else 700 * repeats):
                state.append(0, [text[generator.randrange(length)]])
                begin = perf_counter()
                session.draft([DEPTH])
                times.append(1e6 * (perf_counter() - begin))
            percentiles = {"median us": median(times), "p99 us": sorted(times)[int(0.99 * len(times))]}
            rows.append({"context": length, "tree": tree or "chain", **percentiles, "indexing ms": 1000 * indexing})
    return rows


def _batch(state: GenerationState, candidates: NgramCandidates) -> DraftBatch:
    """A row without a target, of which n-grams read nothing."""
    text_config = SimpleNamespace(vocab_size=2**31)
    config = SimpleNamespace(get_text_config=lambda: text_config)
    model: Any = SimpleNamespace(get_output_embeddings=lambda: None, config=config)
    target: Any = SimpleNamespace(pass_shape=lambda tokens: (1, tokens), verifies_chains_only=False)
    verification: Any = SimpleNamespace(wants_q=False, predicted_tokens=())
    call = Call(model, state, GenerationConfig(), candidates.settings())
    return DraftBatch(call, target, verification, FixedDepth().start(call))
