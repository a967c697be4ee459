"""Tokens per step after long prompts, with and without the draft window.

A prompt is a conversation of unrelated questions with the target's own answers, up to the length, and a last question.
The bundled head was trained on 256 tokens, the draft model on 320.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from statistics import fmean
from typing import Any, cast

import torch

from hf_specgen import Candidates, DraftModelCandidates, EagleCandidates
from hf_specgen.evaluation.workloads import ASSETS, BUNDLED_DRAFT, BUNDLED_EAGLE, domain_prompts, load, prompt_text

LENGTHS, NEW_TOKENS, TREE = (200, 1000, 1800), 48, 32
DOMAINS = ("math", "code", "json", "prose")
"""Those whose questions are short."""


def draft_window(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Greedy decoding in draft trees of 32 nodes; means over conversations. Counted, so one run is exact."""
    model, tokenizer = load()
    questions = domain_prompts(2)
    rows = []
    for length in LENGTHS[:1] if quick else LENGTHS:
        answered, prompts = _conversations(), []
        for question in (questions[domain][number] for number in range(2) for domain in DOMAINS):
            messages = [{"role": "user", "content": question}]
            ids: Any = tokenizer(prompt_text(tokenizer, messages), return_tensors="pt")["input_ids"]
            while True:
                longer = [*next(answered), *messages]
                more: Any = tokenizer(prompt_text(tokenizer, longer), return_tensors="pt")["input_ids"]
                if more.shape[1] > length:
                    break
                messages, ids = longer, more
            prompts.append(ids)
        for name, window in (("off", None), ("auto", "auto")):
            row: dict[str, Any] = {"prompt tokens": fmean(ids.shape[1] for ids in prompts), "draft window": name}
            drafters: dict[str, Candidates] = {
                "draft model": DraftModelCandidates(
                    BUNDLED_DRAFT, k=6, tree=TREE, dtype=torch.float32, draft_window=cast(Any, window)
                ),
                "EAGLE-3": EagleCandidates(BUNDLED_EAGLE, k=6, tree=TREE, draft_window=cast(Any, window)),
            }
            rows.append(row | {kind: _tokens_per_step(model, prompts, one) for kind, one in drafters.items()})
    return rows


def _conversations() -> Iterator[list[dict[str, str]]]:
    """Questions with the target's own answers, each as two messages."""
    with gzip.open(ASSETS / "distillation.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]


def _tokens_per_step(model: Any, prompts: list[torch.Tensor], candidates: Candidates) -> float:
    tokens = steps = 0
    for ids in prompts:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            candidate_generator=candidates,
        )
        assert candidates.speculation is not None
        tokens += candidates.speculation.emitted_in_steps
        steps += candidates.speculation.steps
    return tokens / steps
