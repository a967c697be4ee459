"""Generation of the target's own answers, in batches with a seed each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus import chat_prompt

Rows = list[dict[str, Any]]
# Open-ended answers of a small model become repetitive with greedy decoding; see the card of the embedded model.
DEFAULT_GENERATION: dict[str, Any] = {
    "edit": {"do_sample": False},
    "json": {"do_sample": False},
    "default": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}


def batches_by_domain(rows: Sequence[dict[str, Any]], batch_size: int) -> list[Rows]:
    """Batches of similar prompt length, each within one domain, as decoding settings belong to the domain."""
    domains: dict[str, Rows] = {}
    for row in rows:
        domains.setdefault(str(row.get("domain", "")), []).append(row)
    batches = []
    for members in domains.values():
        members = sorted(members, key=lambda row: len(row["prompt"]))
        batches += [members[first : first + batch_size] for first in range(0, len(members), batch_size)]
    return batches


@torch.no_grad()
def answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    generation: dict[str, Any],
    max_new_tokens: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Generate the answers of one batch of one domain.

    Args:
        model: the target.
        tokenizer: of the target.
        rows: {domain, prompt}.
        generation: decoding settings by domain, "default" for all others.
        max_new_tokens: per answer.
        seed: of this batch; the answers do not depend on the process that generates them.

    Yields:
        rows {domain, prompt, response, finished}.
    """
    domain = str(rows[0].get("domain", ""))
    prompts = [chat_prompt(tokenizer, row["prompt"]) for row in rows]
    inputs = tokenizer(
        prompts,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=not tokenizer.chat_template,
    ).to(model.device)
    torch.manual_seed(seed)
    ids: Any = model.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id or 0,
        **generation.get(domain, generation["default"]),
    )
    for row, answer in zip(rows, ids[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        finished = tokenizer.eos_token_id in answer
        text = str(tokenizer.decode(answer, skip_special_tokens=True))
        yield {"domain": domain, "prompt": row["prompt"], "response": text, "finished": finished}
