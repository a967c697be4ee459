"""From conversations to token ids: first turns in batches, further turns of chats, prompts of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from hf_specgen.evaluation.workloads import encode

ANSWER = "THE-ANSWER-GOES-HERE"


def first_turns(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """One left-padded batch of `input_ids` and `attention_mask`, in the model's chat format if it has one."""
    return next(encode(tokenizer, prompts, len(prompts)))


def followups(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> list[torch.Tensor]:
    """For every turn but the first, the tokens `[1, length]` from the end of the answer before it to the next answer.

    Args:
        tokenizer: with a chat template.
        turns: what the user says.

    Raises:
        ValueError: if the template does not show where an answer stands.

    Example:
        With a template that writes `<|user|>…<|assistant|>…<|end|>`, the tokens of `<|end|><|user|>…<|assistant|>`.
    """
    found = []
    for count in range(2, len(turns) + 1):
        messages = [{"role": "user", "content": turns[0]}]
        for turn in turns[1:count]:
            messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": turn}]
        text = cast(str, tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        if ANSWER not in text:
            raise ValueError("the chat template does not repeat earlier answers; leave domains of several turns out")
        suffix = text.rsplit(ANSWER, 1)[1]
        found.append(torch.tensor([tokenizer(suffix, add_special_tokens=False)["input_ids"]]))
    return found


def of_length(
    tokenizer: PreTrainedTokenizerBase, prompt: str, filler: Sequence[str], length: int
) -> dict[str, torch.Tensor]:
    """The prompt behind as much other text as makes `length` tokens; a prompt that is longer loses its beginning.

    Returns:
        `input_ids` and `attention_mask` `[1, length]`.

    Raises:
        ValueError: if there is not enough text.
    """
    ids = first_turns(tokenizer, [prompt])["input_ids"][0].tolist()
    before: list[int] = []
    for text in filler:
        if len(before) + len(ids) >= length:
            break
        before += cast(Any, tokenizer)(text + "\n\n", add_special_tokens=False)["input_ids"]
    if len(before) + len(ids) < length:
        raise ValueError(f"the domains' prompts make a context of {len(before) + len(ids)} tokens only, not {length}")
    missing = max(0, length - len(ids))
    row = torch.tensor([before[:missing] + ids[len(ids) - (length - missing) :]])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}
