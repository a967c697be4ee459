"""Workloads of demo, doctor, tuning and benchmarks: the embedded models, prompts by domain, settings, comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.evaluation.measure import Sample

ASSETS = Path(__file__).resolve().parents[2] / "benchmarks" / "assets"
EMBEDDED_MODEL = ASSETS / "reference-lm"
EMBEDDED_PROMPTS = ASSETS / "validation.jsonl"
EMBEDDED_DRAFT = ASSETS / "draft-lm"
EMBEDDED_ADAPTER = ASSETS / "exit-adapter"
EMBEDDED_HEADS = ASSETS / "medusa-heads"
PLAIN, PEER, NGRAM, DRAFT, SKIP, MEDUSA = "plain", "prompt lookup", "n-grams", "draft model", "layer skip", "Medusa"
OURS = (NGRAM, DRAFT, SKIP, MEDUSA)

# Greedy decoding of a small model falls into repetition where the answer is open, which flatters every n-gram method:
# those domains are sampled, with a seed, so that identity can still be checked token by token.
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
DOMAINS = {"math": SAMPLED, "code": SAMPLED, "edit": GREEDY, "json": GREEDY, "prose": SAMPLED}


@dataclass(frozen=True)
class WorkloadSettings:
    """What to run; every field is an option of `hf-specgen demo`."""

    model: str = ""
    prompts: tuple[str, ...] = ()
    k: int = 16
    branches: int = 1
    draft: str = ""
    adapter: str = ""
    heads: str = ""
    batch_size: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    max_new_tokens: int = 128
    prompts_per_domain: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Difference:
    """The first token at which our text leaves the plain one, and the target's logits of both tokens there."""

    row: int
    position: int
    plain_token: int
    our_token: int
    plain_logit: float
    our_logit: float


def load(settings: WorkloadSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, ready for left-padded batches.

    Raises:
        FileNotFoundError: if no model was named and the embedded one is not there (it comes with the repository).
    """
    name = settings.model or str(EMBEDDED_MODEL)
    if not settings.model and not EMBEDDED_MODEL.exists():
        raise FileNotFoundError("the embedded model comes with the repository, not the package; name one with --model")
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, settings.dtype))
    return cast(Any, model).to(settings.device).eval(), tokenizer


def domain_prompts(settings: WorkloadSettings) -> dict[str, list[str]]:
    """The prompts of each domain: the user's own, or the embedded ones."""
    if settings.prompts:
        return {"prompt": list(settings.prompts)}
    rows = [json.loads(line) for line in EMBEDDED_PROMPTS.read_text(encoding="utf-8").splitlines()]
    return {
        domain: [row["prompt"] for row in rows if row["domain"] == domain][: settings.prompts_per_domain]
        for domain in DOMAINS
    }


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of prompts, in the model's chat format if it has one."""
    for first in range(0, len(prompts), batch_size):
        texts = list(prompts[first : first + batch_size])
        if tokenizer.chat_template:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = cast(list[str], tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False))
        encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not tokenizer.chat_template)
        yield {name: encoded[name] for name in ("input_ids", "attention_mask")}


def first_difference(model: PreTrainedModel, plain: Sample, ours: Sample) -> Difference | None:
    """Where our ids first differ from the plain ones, with both tokens' logits; None where they are identical."""
    width = min(plain.ids.shape[1], ours.ids.shape[1])
    differs = (plain.ids[:, :width] != ours.ids[:, :width]).nonzero()
    if len(differs) == 0:
        return None
    row, position = min(((int(r), int(p)) for r, p in differs), key=lambda place: place[1])
    with torch.no_grad():
        logits = model(plain.ids[row : row + 1, :position].to(model.device)).logits[0, -1].float()
    tokens = int(plain.ids[row, position]), int(ours.ids[row, position])
    return Difference(row, position, *tokens, *(float(logits[token]) for token in tokens))
