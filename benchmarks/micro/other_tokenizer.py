"""Tokens per pass of the target with a draft model of another tokenizer, by how much of the vocabulary is shared.

The bundled draft model gets other tokenizers: its own with fewer merges and with the tokens in another order. A token
whose merge was removed is never written, and its text becomes two or more other tokens. The model is not trained anew,
so all drafts lose acceptance with every merge that is removed; the ways of translating them are compared.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen import DraftModelCandidates
from hf_specgen.candidates.cross_tokenizer import SharedVocabulary, shared_ids
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT, BUNDLED_MODEL, domain_prompts, encode, load

PROMPTS_PER_DOMAIN, NEW_TOKENS = 2, 32
SEED = 0
"""Of the merges that are removed."""


@dataclass(frozen=True)
class Tokenizer:
    """Which merges of the draft's own tokenizer are kept."""

    first: int | None = None  # how many are kept, the most frequent ones; None: all
    removed: float = 0.0  # probability with which each of these is removed


TOKENIZERS = {
    "same tokens in another order": Tokenizer(),
    "10% of the merges removed": Tokenizer(removed=0.1),
    "the first 2,000 merges": Tokenizer(first=2000),
    "20% of the merges removed": Tokenizer(removed=0.2),
    "40% of the merges removed": Tokenizer(removed=0.4),
    "60% of the merges removed": Tokenizer(removed=0.6),
}
QUICK = ("same tokens in another order", "40% of the merges removed")
WAYS: dict[str, dict[str, Any]] = {"tree of 16": {"k": 6, "tree": 16}, "chain of 4": {"k": 4}}


def other_tokenizer(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Tokens per pass of the target, of greedy decoding. Counted, so one run is exact."""
    model, tokenizer = load()
    texts = list(chain(*domain_prompts(1 if quick else PROMPTS_PER_DOMAIN).values()))
    prompts = [one["input_ids"][0].tolist() for one in encode(tokenizer, texts, 1)]
    new_tokens = NEW_TOKENS // 4 if quick else NEW_TOKENS
    rows = []
    for name in QUICK if quick else TOKENIZERS:
        with TemporaryDirectory(prefix="other-tokenizer-") as folder:
            draft = with_tokenizer(TOKENIZERS[name], Path(folder) / "draft")
            ids = shared_ids(str(BUNDLED_MODEL), str(draft))
            size = model.config.vocab_size
            shared = SharedVocabulary(ids, size, size)
            row: dict[str, Any] = {
                "draft's tokenizer": name,
                "shared vocabulary": sum(index >= 0 for index in ids) / size,
                "shared prompt tokens": mean(shared.draft_token(token) is not None for token in chain(*prompts)),
            }
            for way, settings in WAYS.items():
                candidates = DraftModelCandidates(draft, dtype=torch.float32, **settings)
                row[way] = _tokens_per_pass(model, prompts, new_tokens, candidates)
        rows.append(row)
    return rows


def with_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Save the bundled draft model with another tokenizer; its weights are in the order of the new tokens."""
    shutil.copytree(BUNDLED_DRAFT, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    special = {token["id"] for token in content["added_tokens"]}
    content["model"]["merges"], written = _kept_merges(content["model"], tokenizer)
    vocabulary = {
        token if token in written or index in special else f"\u0120unused{index}": index
        for token, index in content["model"]["vocab"].items()
    }
    ordinary = sorted(index for index in vocabulary.values() if index not in special)
    moved = dict(zip(ordinary, reversed(ordinary), strict=True))
    content["model"]["vocab"] = {token: moved.get(index, index) for token, index in vocabulary.items()}
    file.write_text(json.dumps(content), encoding="utf-8")
    model: Any = AutoModelForCausalLM.from_pretrained(BUNDLED_DRAFT, dtype=torch.float32)
    order = torch.tensor([moved.get(index, index) for index in range(model.config.vocab_size)])
    tables = {id(module.weight): module.weight for module in (model.get_input_embeddings(), model.lm_head)}
    with torch.no_grad():
        for weight in tables.values():
            weight.copy_(weight[order].clone())
    model.save_pretrained(folder)
    return folder


def _kept_merges(model: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[Any], set[str]]:
    """The merges that are kept, and the tokens that can still be written; a merge needs both of its parts."""
    draws = random.Random(SEED)
    written = {token for token in model["vocab"] if len(token) == 1}
    kept = []
    for merge in model["merges"][: tokenizer.first]:
        first, second = merge if isinstance(merge, list) else merge.split(" ")
        if draws.random() >= tokenizer.removed and first in written and second in written:
            kept.append(merge)
            written.add(first + second)
    return kept, written


def _tokens_per_pass(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, candidates: DraftModelCandidates
) -> float:
    """Generated tokens of all prompts for each forward pass of the target, that of the prompt among them."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def generate(prompt: list[int], tokens: int) -> None:
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        cast(Any, model).generate(torch.tensor([prompt]), candidate_generator=candidates, **settings)

    handle = model.register_forward_pre_hook(count)
    try:
        generate(prompts[0], 1)  # the first call with a model, and with a hook on it, checks it
        passes = 0
        for prompt in prompts:
            generate(prompt, new_tokens)
    finally:
        handle.remove()
    return len(prompts) * new_tokens / passes
