"""Tokenization of prompts: first turns in batches, further turns of chats, prompts of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from hf_specgen.evaluation.workloads import encode

ANSWER = "ANSWER-PLACEHOLDER"
"""Stands for an answer in a chat template, so that the text after it can be found."""


def first_turns(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """One left-padded batch of `input_ids` and `attention_mask`, in the model's chat format if it has one."""
    return next(encode(tokenizer, prompts, len(prompts)))


def followups(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> list[torch.Tensor]:
    """For every turn of the user but the first, the tokens `[1, length]` between the previous answer and the next one.

    With a template that writes `<|user|>…<|assistant|>…<|end|>`, the tokens of `<|end|><|user|>…<|assistant|>`.
    """
    found = []
    for count in range(2, len(turns) + 1):
        messages = [{"role": "user", "content": turns[0]}]
        for turn in turns[1:count]:
            messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": turn}]
        text = cast(str, tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        if ANSWER not in text:
            raise ValueError("the chat template leaves earlier answers out; use domains with one turn only")
        suffix = text.rsplit(ANSWER, 1)[1]
        found.append(torch.tensor([tokenizer(suffix, add_special_tokens=False)["input_ids"]]))
    return found


def of_length(
    tokenizer: PreTrainedTokenizerBase, prompt: str, filler: Sequence[str], length: int
) -> dict[str, torch.Tensor]:
    """A prompt, padded on the left with texts of `filler` to `[1, length]` tokens; a longer one loses its beginning."""
    ids = first_turns(tokenizer, [prompt])["input_ids"][0].tolist()
    before: list[int] = []
    for text in filler:
        if len(before) + len(ids) >= length:
            break
        before += cast(Any, tokenizer)(text + "\n\n", add_special_tokens=False)["input_ids"]
    if len(before) + len(ids) < length:
        raise ValueError(
            f"the prompts of the domains have {len(before) + len(ids)} tokens, not {length}; use shorter contexts"
        )
    missing = max(0, length - len(ids))
    row = torch.tensor([before[:missing] + ids[len(ids) - (length - missing) :]])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}
