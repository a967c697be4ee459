"""`hf-specgen generate`: answers the prompts of a file or dataset, resumable, on one or several processes."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from hf_specgen.batching.many_prompts import generate_many
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates import NgramHistory
from hf_specgen.cli.settings import GenerateSettings
from hf_specgen.depth import FixedDepth
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.workloads import chosen_strategy, prompt_text, read_rows
from hf_specgen.heads.source import offline_hint

Row = dict[str, Any]
SETTINGS_WITHOUT_EFFECT_ON_ANSWERS = ("plain", "draft", "device", "history")
"""They may differ when a run is resumed: in float32 they do not change the answers."""
LITTLE_GAIN = 1.1
"""Tokens per step below which the reason is printed."""


def show(settings: GenerateSettings) -> None:
    """Write the answers of all prompts that have none yet."""
    processes = PartialState(cpu=settings.device == "cpu" or not torch.accelerator.is_available())
    if settings.output.exists():
        raise ValueError(f"{settings.output} exists already; delete it or name another file")
    rows = rows_of(settings)
    history = NgramHistory.of_file(settings.history) if settings.history else None
    model, tokenizer = workloads.load(settings.target, settings.dtype, settings.device or str(processes.device))
    texts = [prompt_text(tokenizer, row[settings.column], settings.chat) for row in rows]
    # Each run has a folder of its own, by all that its answers depend on.
    fields = asdict(settings).items()
    run = {name: str(value) for name, value in fields if name not in SETTINGS_WITHOUT_EFFECT_ON_ANSWERS}
    key = digest([run, texts, workloads.local_files(settings.model)])
    parts = settings.output.with_name(f"{settings.output.name}.{key}.parts")
    options = {"tokenizer": tokenizer, "trust_remote_code": settings.trust_remote_code}
    strategy = chosen_strategy(settings.draft, with_history=history is not None, **options)
    counts = list[int]()
    # A chat template writes special tokens into the text.
    is_plain = [
        isinstance(row[settings.column], str) and not (tokenizer.chat_template and settings.chat) for row in rows
    ]
    arguments = workloads.generation_settings(settings.max_new_tokens, settings.temperature) | {"history": history}
    arguments |= {"policy": FixedDepth(0)} if settings.plain else {}

    def answers(numbers: list[int]) -> Iterator[tuple[int, str, int]]:
        prompts = (tokenizer(texts[n], add_special_tokens=is_plain[n])["input_ids"] for n in numbers)
        seeds = [settings.seed + number for number in numbers]
        for found in generate_many(model, prompts, strategy, max_rows=settings.batch_size, seed=seeds, **arguments):
            counts.append(len(found.tokens))
            text = str(tokenizer.decode(found.tokens, skip_special_tokens=True))
            yield numbers[found.index], text, len(found.tokens)

    # Longest first, so that few rows run alone at the end.
    begin, order = perf_counter(), sorted(range(len(rows)), key=lambda number: -len(texts[number]))
    found = answer_missing(parts, order, answers)
    if processes.is_main_process:
        write_rows(settings.output, ({**row, settings.answer_column: found[i]} for i, row in enumerate(rows)))
        shutil.rmtree(parts)
    speed = sum(counts) / max(perf_counter() - begin, 1e-9)
    processes.print(f"{settings.output}: this process: {sum(counts)} tokens, {speed:.1f} tokens/s")
    if not settings.plain and strategy.speculation is not None:
        lines = [strategy.speculation.summary(), explanation(strategy.speculation, settings.batch_size)]
        processes.print("\n".join(filter(None, lines)))


def digest(value: Any) -> str:
    """16 hexadecimal digits that differ for different values of JSON's types."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def explanation(counts: Statistics, rows: int) -> str:
    """Why steps gained little, and what to do; empty if they gained."""
    if counts.tokens_per_step >= LITTLE_GAIN:
        return ""
    if counts.drafts < counts.steps / 2:
        reason = f"{counts.drafts} of {counts.steps} steps had a draft; with {rows} rows most were not expected to gain"
        return f"{reason}: a smaller --batch-size, or a --draft that is accepted more often, may"
    return "few draft tokens were accepted; `hf-specgen doctor` compares strategies on prompts of yours"


def answer_missing(
    parts: Path, numbers: Sequence[int], answer: Callable[[list[int]], Iterator[tuple[Any, ...]]]
) -> dict[int, Any]:
    """Answers by number: those that earlier runs kept in a folder, and those that are missing there.

    The processes divide the missing ones; `answer` takes their numbers, and yields each number, its answer and, for
    the progress bar, the tokens of the answer where they are known. Each answer is written at once.
    """
    processes = PartialState()
    (parts,) = broadcast_object_list([parts])  # modification times in its name may differ between machines
    known = read_answers(parts)
    missing = [number for number in numbers if number not in known]
    answered = len(numbers) - len(missing)
    processes.print(f"{len(numbers)} rows, {answered} answered already, processes: {processes.num_processes}")
    processes.wait_for_everyone()  # no process writes before all have read, so that all divide the same rows
    parts.mkdir(parents=True, exist_ok=True)
    mine = missing[processes.process_index :: processes.num_processes]
    with (parts / f"process-{processes.process_index}.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")  # the last line may have been cut off
        bar = tqdm(answer(mine), total=len(mine), disable=not processes.is_main_process, unit="prompt")
        begin, total = perf_counter(), 0
        for number, found, *tokens in bar:
            print(json.dumps((number, found)), file=file, flush=True)
            total += sum(tokens)
            speed = f"{total / max(perf_counter() - begin, 1e-9):.1f} tokens/s" if tokens else ""
            bar.set_postfix_str(speed, refresh=False)
    processes.wait_for_everyone()
    return read_answers(parts)


def read_answers(parts: Path) -> dict[int, Any]:
    """The answers that earlier processes have written, by number; a line that was cut off is left out."""
    known: dict[int, Any] = {}
    for file in sorted(parts.glob("process-*.jsonl")):
        for line in file.read_text(encoding="utf-8").split("\n"):
            try:
                number, found = json.loads(line)
            except ValueError:
                continue
            known[number] = found
    return known


def write_rows(output: Path, rows: Iterable[Row]) -> None:
    """Write a JSONL file, compressed if its name ends in .gz; it appears when it is complete."""
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()
    unfinished = output.with_name(output.name + ".unfinished")
    # Without a time stamp, equal rows are equal files.
    unfinished.write_bytes(gzip.compress(text, mtime=0) if output.suffix == ".gz" else text)
    unfinished.replace(output)


def rows_of(settings: GenerateSettings) -> list[Row]:
    """The rows of a JSONL file or of a dataset."""
    path = Path(settings.source)
    is_file = path.suffix in (".jsonl", ".json", ".gz") or path.is_file()
    rows = (read_rows(path) if is_file else _dataset(settings))[: settings.limit or None]
    for number, row in enumerate(rows, start=1):
        if problem := _problem(row, settings):
            raise ValueError(f"row {number} of {settings.source} {problem}")
    return rows


def _problem(row: Row, settings: GenerateSettings) -> str:
    """Why a row cannot be answered; empty if it can."""
    prompt = row.get(settings.column)
    if prompt is not None and not isinstance(prompt, str | list):
        return f"has {prompt!r:.60} in column {settings.column!r}; give a text, or a list of chat messages"
    if not prompt:
        return f"has no prompt in column {settings.column!r}; its columns are {', '.join(row)}; name one with --column"
    if settings.answer_column in row:
        return f"has a column {settings.answer_column!r} already; name another one with --answer-column"
    if isinstance(prompt, list):
        if not all(isinstance(message, dict) and "role" in message for message in prompt):
            return f"has no chat messages {{role, content}} in column {settings.column!r}"
        if prompt[-1]["role"] == "assistant":
            return "ends with a message of the assistant, so there is nothing to answer; remove that message"
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return "has a lone surrogate, which is not text; remove it"
    return ""


def _dataset(settings: GenerateSettings) -> list[Row]:
    """The rows of a dataset of the Hub."""
    from datasets import load_dataset  # not needed for files

    try:
        source = workloads.checkpoint(settings.source)
        rows = load_dataset(source.path_or_id, settings.name or None, split=settings.split, revision=source.revision)
        return [dict(row) for row in rows]
    except Exception as error:  # the readers of many formats raise errors of many types
        reason = str(error).split("\n", 1)[0]
        hint = offline_hint(settings.source)
        raise FileNotFoundError(f"cannot load the dataset {settings.source!r}: {reason}{hint}") from error
