"""Training data: conversations read with `datasets`, in the model's chat format, in batches with the answers marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from datasets import IterableDataset, load_dataset
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

Batch = dict[str, torch.Tensor]


def read_rows(source: str, streaming: bool = False) -> Any:
    """The rows {domain, prompt, response} of a local JSONL file (or .jsonl.gz), or of a dataset of the Hub.

    In files of `build_distillation_set.py` the column `finished` is false where an answer was cut off.

    Raises:
        FileNotFoundError: if `source` is the name of a file that does not exist.
    """
    if source.endswith((".jsonl", ".jsonl.gz", ".json")):
        if not Path(source).exists():
            raise FileNotFoundError(f"{source} does not exist; give a JSONL file or the id of a dataset of the Hub")
        return load_dataset("json", data_files=source, split="train", streaming=streaming)
    return load_dataset(source, split="train", streaming=streaming)


def rows_by_domain(source: str, per_domain: int) -> dict[str, list[dict[str, Any]]]:
    """The first `per_domain` rows of each domain of a file or dataset, as for `read_rows`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(source):
        if len(rows.setdefault(row["domain"], [])) < per_domain:
            rows[row["domain"]].append(row)
    return rows


def chat_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The input of the model: the chat format up to the beginning of the answer, or the prompt without a template."""
    if not tokenizer.chat_template:
        return prompt
    chat = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def chat_answer(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, finished: bool = True) -> str:
    """The output of the model; if it is `finished`, with the end of an answer in the chat format."""
    if not finished:
        return response
    if not tokenizer.chat_template:
        return response + str(tokenizer.eos_token or "")
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    before = chat_prompt(tokenizer, prompt)
    if not text.startswith(before):
        raise ValueError("the chat template changes a prompt once it has an answer, so answers cannot be marked")
    return text[len(before) :]


def encode_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Tokenize prompt and answer separately, as when the model generates; the answer ends at its EOS token."""
    # A row without `finished` has a complete answer.
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
    """A right-padded batch, with the positions that predict a token of an answer.

    `predicts` is true at position t if token t + 1 belongs to the answer. For 3 prompt tokens (p) and 2 answer tokens
    (a):

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

    This saves padding. Every process sees the same order, whatever their number, and takes its share of each step, a
    `group` of batches; so the number of batches is a multiple of `group`. The rows of a step depend only on their
    number, `batch_size * group`.
    """

    window = 32
    """Number of steps that are sorted by length together."""

    def __init__(self, lengths: Sequence[int], batch_size: int, group: int, seed: int):
        self.lengths, self.batch_size, self.group, self.seed = torch.tensor(lengths), batch_size, group, seed
        self.drop_last, self.epoch = True, 0
        self.steps = len(lengths) // (batch_size * group)
        _check_count(len(lengths), batch_size * group)

    def __len__(self) -> int:
        return self.steps * self.group

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        rows_per_step = self.batch_size * self.group
        order = torch.randperm(len(self.lengths), generator=generator)[: self.steps * rows_per_step]
        windows = order.split(self.window * rows_per_step)
        order = torch.cat([window[self.lengths[window].argsort(stable=True)] for window in windows])
        for step in order.view(self.steps, rows_per_step)[torch.randperm(self.steps, generator=generator)]:
            yield from step.view(self.group, self.batch_size).tolist()


def _check_count(rows: int, rows_per_step: int) -> None:
    if rows < rows_per_step:
        raise ValueError(
            f"the data have {rows} rows to train on, fewer than the {rows_per_step} of one step; "
            "give more rows or a smaller --batch-size"
        )


def conversations(tokenizer: PreTrainedTokenizerBase, source: str, max_length: int, streaming: bool = False) -> Any:
    """The conversations of `source`, encoded; without those of which `max_length` leaves no answer.

    Args:
        tokenizer: of the model.
        source: as for `read_rows`.
        max_length: tokens of a conversation; what is beyond is cut off.
        streaming: read rows as they are needed, in the order of the source, shuffled within a buffer.

    Raises:
        ValueError: if the source has no rows.
    """
    rows = read_rows(source, streaming)
    columns = list(next(iter(rows), ()))
    if not columns:
        raise ValueError(f"{source} has no rows; training needs rows {{domain, prompt, response}}")
    rows = rows.map(lambda row: encode_row(tokenizer, row, max_length), remove_columns=columns)
    return rows.filter(lambda row: row["length"] > row["answer_start"])


def packed_blocks(tokenizer: PreTrainedTokenizerBase, source: str, length: int, seed: int = 0) -> Any:
    """All conversations one after the other, cut into blocks of equal length, in which every token is predicted."""

    def cut(rows: dict[str, list[list[int]]]) -> dict[str, list[Any]]:
        ids = list(chain.from_iterable(rows["input_ids"]))
        blocks = [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]
        return {"input_ids": blocks, "answer_start": [1] * len(blocks), "length": [length] * len(blocks)}

    rows = conversations(tokenizer, source, 10**6).shuffle(seed=seed)
    return rows.map(cut, batched=True, batch_size=len(rows), remove_columns=rows.column_names)


def batches(rows: Any, batch_size: int, *, group: int = 1, seed: int = 0, pad_token_id: int = 0) -> DataLoader:
    """Batches of encoded rows, as from `collate`.

    Args:
        rows: encoded conversations or blocks.
        batch_size: rows in a batch.
        group: batches in a step, over all processes.
        seed: of the order.
        pad_token_id: of the tokenizer.

    Raises:
        ValueError: if the rows do not fill one step.
    """

    def batched(batch: Sequence[dict[str, Any]]) -> Batch:
        return collate(batch, pad_token_id)

    if isinstance(rows, IterableDataset):
        # An epoch without a batch would be followed by another one, and so on.
        _check_count(sum(1 for _ in islice(rows, batch_size * group)), batch_size * group)
        rows = rows.shuffle(seed=seed, buffer_size=1000)
        return DataLoader(cast(Any, rows), batch_size=batch_size, drop_last=True, collate_fn=batched)
    order = LengthGroupedBatches(rows["length"][:], batch_size, group, seed)
    return DataLoader(rows, batch_sampler=order, collate_fn=batched)
