"""Generates a target's own answers, the training data of every drafter: it has to predict what the target generates.

    accelerate launch recipes/generate_answers.py --target ID --prompts FILE_OR_ID --output answers.jsonl.gz
    python recipes/generate_answers.py --server http://localhost:8000/v1 --target NAME --prompts … --output …

Prompts are conversations in any format of training data; answers that these have are replaced, the last one of each.
Batches are divided among the processes and have a seed each, so the result does not depend on the number of processes.
An interrupted run continues where it stopped: finished batches are kept in OUTPUT.parts until all are there, with the
settings that they belong to; other settings are refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub import InferenceClient
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from answers import answer_batch, answered, batches_by_domain, generation_of
from arguments import DataArguments, Options, launch, option, parse
from conversations import ChatFormat, Row, prompt_of, read_rows

RECORD = "settings.json"
"""File in OUTPUT.parts: what the finished batches depend on."""
Answer = Callable[[list[Row], int], list[Row]]
"""From the rows of a batch and its seed to rows with answers."""


@dataclass(kw_only=True)
class AnswerArguments(DataArguments):
    """Prompts and decoding settings.

    Raises:
        ValueError: if a number is below 1.
    """

    target: str = option(help="Hub id or folder of the model that answers; its name on the server")
    prompts: str = option(help="conversations: a file, a folder, or a dataset of the Hub")
    output: str = option(help="file to write, .jsonl or .jsonl.gz")
    server: str | None = option(default=None, help="URL of an OpenAI-compatible server that generates the answers")
    drafter: str | None = option(default=None, help="drafter of the target, for speculative decoding")
    exclude: str | None = option(default=None, help="conversations whose prompts are not used, such as a test set")
    per_domain: Options = option(default_factory=Options, help="number of prompts by domain; default: for others")
    generation: Options = option(
        default_factory=lambda: Options({"default": {"do_sample": True, "temperature": 0.8, "top_k": 0}}),
        help="arguments of generate (of the server: of the API) by domain; default: for others",
    )
    max_new_tokens: int = option(default=1024, help="tokens per answer")
    batch_size: int = option(default=32, help="prompts per generate call, or requests at the same time")
    target_kwargs: Options = option(
        default_factory=lambda: Options({"dtype": "auto"}), help="for the target's from_pretrained"
    )
    seed: int = option(default=0, help="of the choice of prompts and of sampling")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, generate, save."""
    args = parse(AnswerArguments, __doc__, arguments)
    batches = batches_by_domain(chosen_prompts(args), args.batch_size)
    parts, record = Path(args.output + ".parts"), record_of(args, batches)
    parts.mkdir(parents=True, exist_ok=True)
    check_record(parts, record)
    done, state = finished_batches(parts), PartialState()
    answer = partial(ask_server, args) if args.server else local_answers(args)
    state.wait_for_everyone()  # no process writes while another one still reads
    if state.is_main_process:
        (parts / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
    state.wait_for_everyone()  # no batch is written before the record
    mine = [i for i in range(len(batches)) if i not in done][state.process_index :: state.num_processes]
    with (parts / f"{state.process_index}.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")  # terminates a line that an interruption cut off
        for i in tqdm(mine, disable=not state.is_main_process, unit="batch"):
            rows = answer(batches[i], args.seed * 1_000_003 + i)
            file.write(json.dumps({"batch": i, "rows": rows}, ensure_ascii=False) + "\n")
            file.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        counts = merge(finished_batches(parts), Path(args.output))
        for leftover in parts.iterdir():
            leftover.unlink()
        parts.rmdir()
        state.print(f"{args.output}: {sum(counts.values())} answers {dict(counts)}")


def local_answers(args: AnswerArguments) -> Answer:
    """Answers of the target in this process, with speculative decoding if there is a drafter."""
    chat = ChatFormat(AutoTokenizer.from_pretrained(args.target), args.chat_template_kwargs)
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, **args.target_kwargs).eval()
    if not {"device_map", "quantization_config"} & args.target_kwargs.keys():
        model = model.to(PartialState().device)
    generation: dict[str, Any] = dict(args.generation)
    if args.drafter:
        from hf_specgen import AutoCandidates

        candidates = AutoCandidates.from_pretrained(args.drafter)
        default = {"default": {}, **generation}
        generation = {name: {**some, "candidate_generator": candidates} for name, some in default.items()}
    return lambda rows, seed: answer_batch(model, chat, rows, generation, args.max_new_tokens, seed)


def ask_server(args: AnswerArguments, rows: list[Row], seed: int) -> list[Row]:
    """Answers of an OpenAI-compatible server, to all prompts of a batch at the same time."""
    client = InferenceClient(base_url=args.server)
    extra = {"chat_template_kwargs": dict(args.chat_template_kwargs)} if args.chat_template_kwargs else None

    def ask(row: Row) -> Row:
        settings = generation_of(args.generation, row)
        if settings.pop("do_sample", True) is False:
            settings["temperature"] = 0.0
        settings.pop("top_k", None)
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        choice = client.chat_completion(
            prompt_of(row), model=args.target, max_tokens=args.max_new_tokens, seed=seed, tools=tools, extra_body=extra,
            **settings,
        ).choices[0]  # fmt: skip
        reasoning = getattr(choice.message, "reasoning", None) or getattr(choice.message, "reasoning_content", None)
        text = choice.message.content or ""
        return answered(
            row, f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text, choice.finish_reason != "length"
        )

    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(ask, rows))


def chosen_prompts(args: AnswerArguments) -> list[Row]:
    """Different prompts, without the excluded ones: a random choice of the wanted number in each domain."""
    excluded = {_key(row) for row in read_rows(args.exclude)} if args.exclude else set()
    prompts = {_key(row): row for row in read_rows(args.prompts, args.data_split, args.data_config)}
    rows = [row for key, row in prompts.items() if key not in excluded]
    random.Random(args.seed).shuffle(rows)
    taken: Counter[str] = Counter()
    chosen = []
    for row in rows:
        domain = str(row.get("domain") or "")
        if taken[domain] < args.per_domain.get(domain, args.per_domain.get("default", len(rows))):
            taken[domain] += 1
            chosen.append(row)
    return chosen


def _key(row: Row) -> str:
    return json.dumps([prompt_of(row), row.get("tools")])


def record_of(args: AnswerArguments, batches: Sequence[list[Row]]) -> dict[str, Any]:
    """What the answers depend on: the settings, and the prompts of each batch, as a hash."""
    prompts = json.dumps([[_key(row) for row in batch] for batch in batches])
    record = {name: value for name, value in asdict(args).items() if name not in ("output", "drafter")}
    record["content of the prompts"] = hashlib.sha256(prompts.encode()).hexdigest()
    return dict(json.loads(json.dumps(record)))  # as it is when it is read again


def check_record(parts: Path, record: dict[str, Any]) -> None:
    """Raise if `parts` has batches that were generated with other settings or from other prompts.

    Raises:
        ValueError: what differs.
    """
    file = parts / RECORD
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not finished_batches(parts) or recorded == record:
        return
    names = [name for name in record if recorded.get(name) != record[name]]
    changes = ", ".join(f"{name} {recorded.get(name)!r:.80} (now {record[name]!r:.80})" for name in names)
    raise ValueError(
        f"{parts} has batches of an interrupted run with {changes}; continue it with the same settings, or remove that "
        "folder to start anew"
    )


def finished_batches(parts: Path) -> dict[int, list[Row]]:
    """The batches of earlier runs, by number; a line that was cut off is ignored."""
    done = {}
    for part in sorted(parts.glob("*.jsonl")):
        for line in part.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            done[record["batch"]] = record["rows"]
    return done


def merge(done: dict[int, list[Row]], output: Path) -> Counter[str]:
    """Write all rows in the order of their batches; returns the number of rows by domain."""
    rows = [row for batch in sorted(done) for row in done[batch]]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Without a time stamp, equal answers are equal files.
    output.write_bytes(gzip.compress(text.encode(), mtime=0) if output.suffix == ".gz" else text.encode())
    return Counter(str(row.get("domain") or "") for row in rows)


if __name__ == "__main__":
    launch(main)
