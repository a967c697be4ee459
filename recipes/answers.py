"""The target's own answers to prompts, in batches with a seed each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from conversations import ChatFormat, Row, prompt_of


def batches_by_domain(rows: Sequence[Row], batch_size: int) -> list[list[Row]]:
    """Batches of similar prompt length, each within one domain, as decoding settings belong to the domain."""
    domains: dict[str, list[Row]] = {}
    for row in rows:
        domains.setdefault(str(row.get("domain") or "all"), []).append(row)
    batches = []
    for members in domains.values():
        members = sorted(members, key=lambda row: len(str(prompt_of(row))))
        batches += [members[first : first + batch_size] for first in range(0, len(members), batch_size)]
    return batches


def generation_of(generation: dict[str, Any], row: Row) -> dict[str, Any]:
    """The arguments of `generate` for the domain of a row."""
    return dict(generation.get(str(row.get("domain") or "all"), generation.get("default", {})))


def answered(row: Row, answer: str, finished: bool) -> Row:
    """A row with the answer after its prompt, in the format of the prompt."""
    kept = {name: row[name] for name in ("domain", "tools") if row.get(name)}
    if isinstance(row.get("prompt"), str) and not row.get("system"):
        return {**kept, "prompt": row["prompt"], "response": answer, "finished": finished}
    messages = [*prompt_of(row), {"role": "assistant", "content": answer}]
    return {**kept, "messages": messages, "finished": finished}


@torch.no_grad()
def answer_batch(
    model: PreTrainedModel,
    chat: ChatFormat,
    rows: Sequence[Row],
    generation: dict[str, Any],
    max_new_tokens: int,
    seed: int,
) -> list[Row]:
    """Generate the answers of one batch of one domain.

    Args:
        model: the target.
        chat: its chat format.
        rows: with prompts.
        generation: decoding settings by domain, "default" for all others.
        max_new_tokens: per answer.
        seed: of this batch; the answers do not depend on the process that generates them.
    """
    tokenizer = chat.tokenizer
    prompts = [chat.ids(chat.prompt(prompt_of(row), row.get("tools")), True) for row in rows]
    width, pad = max(map(len, prompts)), tokenizer.pad_token_id or 0
    device: Any = model.get_input_embeddings().weight.device
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    torch.manual_seed(seed)
    output: Any = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        **generation_of(generation, rows[0]),
    )
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in output[:, width:].tolist()]
    finished = [not ends.isdisjoint(answer) for answer in output[:, width:].tolist()]
    return [answered(*each) for each in zip(rows, texts, finished, strict=True)]
