"""Conversations: read through `datasets`, put into the model's chat format, batched with the answers marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from datasets import IterableDataset, load_dataset
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

Batch = dict[str, torch.Tensor]


def read_rows(source: str, streaming: bool = False) -> Any:
    """The rows {domain, prompt, response} of a local JSONL file (or .jsonl.gz), or of a dataset of the Hub.

    A file of `build_distillation_set.py` also says with `finished` whether an answer ended by itself.

    Raises:
        FileNotFoundError: if `source` looks like a file and is none.
    """
    if source.endswith((".jsonl", ".jsonl.gz", ".json")):
        if not Path(source).exists():
            raise FileNotFoundError(f"{source}: no such file; give a JSONL file or the id of a dataset of the Hub.")
        return load_dataset("json", data_files=source, split="train", streaming=streaming)
    return load_dataset(source, split="train", streaming=streaming)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The text that the model is given: the chat format up to where its answer begins, or the prompt as it is."""
    if not tokenizer.chat_template:
        return prompt
    chat = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def chat_answer(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, finished: bool = True) -> str:
    """The text that the model is to write; with what the chat format puts behind an answer, if it is `finished`."""
    if not finished:
        return response
    if not tokenizer.chat_template:
        return response + str(tokenizer.eos_token or "")
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    asked = chat_prompt(tokenizer, prompt)
    if not text.startswith(asked):
        raise ValueError("the chat template writes a prompt differently once it is answered; answers cannot be marked.")
    return text[len(asked) :]


def encode_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Prompt and answer are tokenised apart, as they are when the model generates; the answer ends at its end token."""
    # A row that knows nothing of `finished` holds a whole answer.
    finished = row.get("finished") is not False
    special = not tokenizer.chat_template
    prompt = tokenizer(chat_prompt(tokenizer, row["prompt"]), add_special_tokens=special)["input_ids"]
    answer = tokenizer(chat_answer(tokenizer, row["prompt"], row["response"], finished), add_special_tokens=False)[
        "input_ids"
    ]
    if tokenizer.eos_token_id in answer:
        answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
    ids = (prompt + answer)[:max_length]
    return {"input_ids": ids, "answer_start": len(prompt), "length": len(ids)}


def collate(rows: Sequence[dict[str, Any]], pad_token_id: int = 0) -> Batch:
    """Right-padded ids, and which positions predict a token of an answer.

    `predicts` is true at position t if token t + 1 belongs to the answer: for 3 tokens of prompt (p) and 2 of answer
    (a) it reads

        p p p a a
        0 0 1 1 0
    """
    width = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.long)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[i, :length] = torch.tensor(row["input_ids"])
        attention_mask[i, :length] = 1
        predicts[i, row["answer_start"] - 1 : length - 1] = True
    return {"input_ids": input_ids, "attention_mask": attention_mask, "predicts": predicts}


class LengthGroupedBatches(Sampler[list[int]]):
    """Batches of rows of similar length, in an order that depends only on seed and epoch.

    Little padding is computed, and every process sees the same order whatever their number: it takes its share of
    each `group` of batches, so the number of batches is a multiple of `group`.
    """

    window = 32  # batches that are sorted by length together

    def __init__(self, lengths: Sequence[int], batch_size: int, group: int, seed: int):
        self.lengths, self.batch_size, self.seed = torch.tensor(lengths), batch_size, seed
        self.drop_last, self.epoch = True, 0
        self.count = len(lengths) // (batch_size * group) * group
        if self.count == 0:
            raise ValueError(f"{len(lengths)} rows are too few for one step of {batch_size * group}.")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.count * self.batch_size]
        windows = order.split(self.window * self.batch_size)
        order = torch.cat([window[self.lengths[window].argsort(stable=True)] for window in windows])
        for index in torch.randperm(self.count, generator=generator).tolist():
            yield order[index * self.batch_size : (index + 1) * self.batch_size].tolist()


def conversations(tokenizer: PreTrainedTokenizerBase, source: str, max_length: int, streaming: bool = False) -> Any:
    """A dataset of encoded conversations, from the rows of `source`; those whose answer is cut off whole are left out.

    Args:
        streaming: read the source as it is needed, in its own order, shuffled within a buffer.
    """
    rows = read_rows(source, streaming)
    columns = list(next(iter(rows)))
    rows = rows.map(lambda row: encode_row(tokenizer, row, max_length), remove_columns=columns)
    return rows.filter(lambda row: row["length"] > row["answer_start"])


def packed_blocks(tokenizer: PreTrainedTokenizerBase, source: str, length: int, seed: int = 0) -> Any:
    """A dataset of blocks of equal length, cut from all conversations in a row; every token in them is predicted."""

    def cut(rows: dict[str, list[list[int]]]) -> dict[str, list[Any]]:
        ids = list(chain.from_iterable(rows["input_ids"]))
        blocks = [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]
        return {"input_ids": blocks, "answer_start": [1] * len(blocks), "length": [length] * len(blocks)}

    rows = conversations(tokenizer, source, 10**6).shuffle(seed=seed)
    return rows.map(cut, batched=True, batch_size=len(rows), remove_columns=rows.column_names)


def batches(rows: Any, batch_size: int, *, group: int = 1, seed: int = 0, pad_token_id: int = 0) -> DataLoader:
    """Batches of encoded rows; see `collate` for what is in one.

    Args:
        batch_size: rows in a batch.
        group: batches to a step, over all processes.
    """

    def batched(batch: Sequence[dict[str, Any]]) -> Batch:
        return collate(batch, pad_token_id)

    if isinstance(rows, IterableDataset):
        rows = rows.shuffle(seed=seed, buffer_size=1000)
        return DataLoader(cast(Any, rows), batch_size=batch_size, drop_last=True, collate_fn=batched)
    order = LengthGroupedBatches(rows["length"][:], batch_size, group, seed)
    return DataLoader(rows, batch_sampler=order, collate_fn=batched)
