"""Training data: conversations of any common format, written by the chat template, with every answer marked.

| columns | content |
|---|---|
| `messages`, `conversations` | a list of {role, content} or {from, value}; optional: `system`, `tools` |
| `prompt` and `response` (or `completion`) | texts, or lists of messages |
| `text` | plain text, in which every token is predicted |

A row may name its `domain`, and say with `finished: false` that its last answer was cut off.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_length_grouped_indices

from arguments import deferred_signals

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
Messages = list[dict[str, Any]]

BUILDERS = {".jsonl": "json", ".json": "json", ".gz": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function": "tool"}
ALIASES = {"from": "role", "value": "content"}
LISTS, ANSWERS = ("messages", "conversations", "conversation"), ("response", "completion")
FORMATS = "`messages`, `conversations`, `prompt` and `response`, or `text`"
IGNORED = -100
"""Label of positions that predict no token of an answer."""


def read_rows(source: str, split: str = "train", config: str | None = None, streaming: bool = False) -> Any:
    """The rows of a local file or folder, or of a dataset of the Hub."""
    builder = BUILDERS.get(Path(source).suffix)
    if builder and not Path(source).exists():
        raise FileNotFoundError(f"{source} does not exist; give a file, a folder or the id of a dataset of the Hub")
    try:
        if builder:
            rows = load_dataset(builder, data_files=source, split=split, streaming=streaming)
        elif (Path(source) / "dataset_info.json").exists():
            rows = load_from_disk(source)
        else:
            rows = load_dataset(source, config, split=split, streaming=streaming)
    except (DatasetsError, StopIteration) as error:
        raise ValueError(f"{source} cannot be read: {error.__cause__ or str(error) or 'it is empty'}") from None
    if next(iter(rows), None) is None:
        raise ValueError(f"{source} has no rows; training needs {FORMATS}")
    return rows


@contextmanager
def naming_row(number: int) -> Iterator[None]:
    """Add the number of a row, counted from 0, to errors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"row {number + 1}: {error}") from None


def domain_of(row: Row) -> str:
    """The domain of a row; "all" for rows without one."""
    return str(row.get("domain") or "all")


def first_of_domains(rows: Iterable[Row], per_domain: Mapping[str, int]) -> list[Row]:
    """The first rows of each domain, as many as a mapping says, which may have a `default`; all of others."""
    taken: Counter[str] = Counter()
    chosen = []
    for row in rows:
        domain = domain_of(row)
        most = per_domain.get(domain, per_domain.get("default"))
        if most is None or taken[domain] < most:
            taken[domain] += 1
            chosen.append(row)
    return chosen


def messages_of(row: Row) -> Messages:
    """The messages of a row; empty for plain text."""
    given = next((row[name] for name in LISTS if row.get(name) is not None), None)
    if given is None and row.get("prompt") is not None:
        answer: Any = next((row[name] for name in ANSWERS if row.get(name) is not None), [])
        parts = {"user": row["prompt"], "assistant": answer}
        lists = [part if isinstance(part, list) else [{"role": role, "content": part}] for role, part in parts.items()]
        given = [*lists[0], *lists[1]]
    if given is None:
        if isinstance(text := row.get("text"), str):
            return []
        if text is not None:
            raise ValueError(f"text must be a text, got {text!r:.80}")
        raise ValueError(f"the data have the columns {', '.join(row) or 'none'}, but training needs {FORMATS}")
    if not isinstance(given, list) or not all(isinstance(message, Mapping) for message in given):
        raise ValueError(f"a conversation must be a list of {{role, content}}, got {given!r:.80}")
    if not given and not isinstance(row.get("text"), str):
        raise ValueError("its conversation has no messages; remove the row")
    messages = [_message(message) for message in given]
    if row.get("system") and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, _message({"role": "system", "content": row["system"]}))
    return messages


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it, without the empty fields that Arrow adds."""
    fields = {ALIASES.get(name, name): value for name, value in message.items() if value is not None}
    if not isinstance(fields.get("role"), str):
        raise ValueError(f"a message needs a role and its content, got {dict(message)!r:.80}")
    if not isinstance(fields.get("content", ""), str | list):
        raise ValueError(f"the content of a message must be a text, or a list of parts, got {fields['content']!r:.80}")
    return {"content": "", **fields, "role": ROLES.get(fields["role"], fields["role"])}


def _text(content: str | list[Any]) -> str:
    """The content of a message as one text; a `ValueError` if a part of it is none."""
    parts = [{"text": content}] if isinstance(content, str) else content
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"the parts of this content must be texts {{type, text}}, got {content!r:.80}")
    return "".join(part["text"] for part in parts)


def prompt_of(row: Row) -> Messages:
    """The messages before the last answer; a plain text is its own prompt."""
    messages = messages_of(row) or [{"role": "user", "content": row["text"]}]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


class ChatFormat:
    """Writes conversations as the model reads them; `kwargs` are for the chat template, such as `enable_thinking`.

    Without a chat template, contents are joined, and an EOS token ends each answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None):
        self.tokenizer, self._kwargs = tokenizer, dict(kwargs or {})

    def prompt(self, row: Row) -> list[int]:
        """`[length]` the input of the model up to the beginning of the last answer of a row."""
        return self.ids(self.render(prompt_of(row), row.get("tools"), True), True)

    def ids(self, text: str, begins: bool) -> list[int]:
        """Tokens; `begins`: of the beginning of a conversation, which templates mark by themselves."""
        text.encode()  # a ValueError for half a character, of which tokenizers do not say what it is
        return list(self.tokenizer(text, add_special_tokens=begins and not self.tokenizer.chat_template)["input_ids"])

    def render(self, messages: Messages, tools: Any, generation: bool) -> str:
        """The text of messages; `generation`: up to the beginning of an answer."""
        if not self.tokenizer.chat_template:
            end = str(self.tokenizer.eos_token or "")
            return "".join(_text(m["content"]) + end * (m["role"] == "assistant") for m in messages)
        tools = json.loads(tools) if isinstance(tools, str) else tools
        settings = {"tools": tools or None, "add_generation_prompt": generation, "tokenize": False, **self._kwargs}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **settings))
        except Exception as error:  # templates raise what their author chose, of many types
            raise ValueError(f"the chat template cannot format this conversation: {error}") from error

    def encode(self, row: Row, max_length: int) -> Iterator[Row]:
        """Tokens and labels of a conversation: `labels[t]` is token t + 1 if it belongs to an answer.

        Prompts and answers are tokenized separately, as when the model generates. Templates may write earlier answers
        differently from the last one, for instance without their reasoning: such an answer gets a row of its own.
        """
        messages, ids, answered = messages_of(row), [], []
        if not messages:
            ids = self.ids(row["text"], True) + [self.tokenizer.eos_token_id] * bool(self.tokenizer.eos_token)
            answered = [False] + [True] * (len(ids) - 1)
        written = ""
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:place], row.get("tools"), True)
            if ids and not before.startswith(written):
                yield from _labelled(ids, answered, max_length)
                ids, answered, written = [], [], ""
            prompt = self.ids(before[len(written) :], not ids)
            written, answer = self._answer(messages[: place + 1], row, before)
            tokens = self.ids(answer, False)
            end = self.tokenizer.eos_token_id
            count = tokens.index(end) + 1 if end in tokens else len(tokens)
            ids += prompt + tokens
            answered += [False] * len(prompt) + [place_ < count for place_ in range(len(tokens))]
        yield from _labelled(ids, answered, max_length)

    def _answer(self, messages: Messages, row: Row, before: str) -> tuple[str, str]:
        """The text up to the end of the last message, and the part of it that the model generates."""
        content, is_last = messages[-1]["content"], len(messages) == len(messages_of(row))
        if is_last and row.get("finished") is False:
            return before + _text(content), _text(content)
        after = self.render(messages, row.get("tools"), False)
        if after.startswith(before):
            return after, after[len(before) :]
        text = _text(content)
        _, found, end = after.rpartition(text) if text else ("", "", "")
        if not found:
            raise ValueError("the chat template changes a prompt once it has an answer, so answers cannot be marked")
        return after, text + end


def _labelled(ids: list[int], answered: list[bool], max_length: int) -> Iterator[Row]:
    """One encoded row, cut off at `max_length` and after the last answer; none if no answer is left."""
    ids, answered = ids[:max_length], answered[:max_length]
    if not any(answered[1:]):
        return
    length = len(answered) - answered[::-1].index(True)
    following = zip(ids[1:length], answered[1:length], strict=True)
    labels = [token if is_answer else IGNORED for token, is_answer in following]
    yield {"input_ids": ids[:length], "labels": [*labels, IGNORED], "length": length}


def encoded(rows: Any, chat: ChatFormat, max_length: int, packing: bool = False) -> Any:
    """All conversations with an answer, encoded; `packing` fills rows of `max_length` tokens with several of them."""

    def encode(columns: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        each = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        found: list[dict[str, Any]] = []
        raise_if_received()
        for number, row in zip(numbers, each, strict=True):
            with naming_row(number):
                found += chat.encode(row, max_length)
        return {name: [row[name] for row in found] for name in ("input_ids", "labels", "length")}

    with deferred_signals() as raise_if_received:
        result = rows.map(encode, with_indices=True, batched=True, remove_columns=list(next(iter(rows))))
        if packing:
            result = result.map(lambda columns: _packed_rows(columns, max_length), batched=True)
    if next(iter(result), None) is None:
        raise ValueError(f"no conversation has an answer within max_length={max_length} tokens")
    return result


def _packed_rows(columns: dict[str, list[Any]], max_length: int) -> dict[str, list[Any]]:
    """Conversations, longest first, each in the first row with space; positions begin again with each of them."""
    packed_rows: list[Row] = []
    for place in sorted(range(len(columns["length"])), key=lambda place: -columns["length"][place]):
        length = columns["length"][place]
        row = next((row for row in packed_rows if row["length"] + length <= max_length), None)
        if row is None:
            packed_rows.append(row := {"input_ids": [], "labels": [], "length": 0, "position_ids": []})
        row["input_ids"] += columns["input_ids"][place]
        row["labels"] += columns["labels"][place]
        row["position_ids"] += range(length)
        row["length"] += length
    return {name: [row[name] for row in packed_rows] for name in ("input_ids", "labels", "length", "position_ids")}


def collate(rows: Sequence[Row], pad_token_id: int = 0) -> Batch:
    """A right-padded batch `[batch, length]`, in which no causal model needs a mask for the padding.

    For 3 prompt tokens and the answer "a b", positions 2 and 3 have the labels a and b:

        input_ids     p    p    p    a    b
        labels     -100 -100    a    b -100
    """

    def padded(name: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)

    batch = {"input_ids": padded("input_ids", pad_token_id), "labels": padded("labels", IGNORED)}
    positions = torch.arange(batch["labels"].shape[1]).repeat(len(rows), 1)
    batch["position_ids"] = padded("position_ids", 0) if "position_ids" in rows[0] else positions
    if "features" in rows[0]:
        batch["features"] = pad_sequence([row["features"] for row in rows], batch_first=True)
        batch["hidden"] = torch.cat([row["hidden"] for row in rows])
    return batch


class StepSampler(Sampler[int]):
    """Rows in an order in which those of a step have similar lengths, which saves padding.

    Unlike in Transformers' `LengthGroupedSampler`, the order depends on seed and epoch alone, so that a resumed run
    goes on with it; steps are shuffled, and rows that fill no step are left out.
    """

    def __init__(self, lengths: list[int], rows_per_step: int, seed: int):
        self._lengths, self._rows_per_step, self._seed, self._epoch = lengths, rows_per_step, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Another order in each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths) // self._rows_per_step * self._rows_per_step

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = get_length_grouped_indices(self._lengths, self._rows_per_step, generator=generator)
        steps = torch.tensor(order[: len(self)]).view(-1, self._rows_per_step)
        yield from steps[torch.randperm(len(steps), generator=generator)].flatten().tolist()


def check_row_count(rows: Any, rows_per_step: int) -> None:
    """Raise a `ValueError` unless there are rows for at least one step."""
    if (count := sum(1 for _ in islice(rows, rows_per_step))) < rows_per_step:
        raise ValueError(
            f"the data have {count} rows to train on, fewer than the {rows_per_step} of one step; "
            "give more rows or a smaller --batch-size"
        )
