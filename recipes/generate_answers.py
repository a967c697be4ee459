"""Generates a target's own answers, the training data of every drafter: it has to predict what the target generates.

    accelerate launch recipes/generate_answers.py --target ID --prompts FILE_OR_ID --output answers.jsonl.gz
    python recipes/generate_answers.py --server http://localhost:8000/v1 --target NAME --prompts … --output …

Prompts are conversations in any format of training data; answers that these have are replaced, the last one of each.
Batches are divided among the processes and have a seed each, so the result does not depend on the number of processes;
a drafter (`--drafter`, by default n-grams of the text) changes the speed alone.
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
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub import InferenceClient
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from arguments import DataArguments, Options, launch, option, parse
from conversations import ChatFormat, Row, domain_of, prompt_of, read_rows
from hf_specgen import AutoCandidates, generate_many

RECORD = "settings.json"
"""File in OUTPUT.parts: what the finished batches depend on."""
ROUNDS = 4
"""Prompts of a batch, which is written at once, for each that is processed at a time."""
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
    batch_size: int = option(default=32, help="prompts that are processed at a time")
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
    batches = batches_by_domain(chosen_prompts(args), ROUNDS * args.batch_size)
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
            rows = answer(batches[i], (args.seed * 1_000_003 + i) * 1_000)
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
    """Answers of the target in this process, by speculative decoding."""
    chat = ChatFormat(AutoTokenizer.from_pretrained(args.target), args.chat_template_kwargs)
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, **args.target_kwargs).eval()
    if not {"device_map", "quantization_config"} & args.target_kwargs.keys():
        model = model.to(PartialState().device)
    candidates = AutoCandidates.from_pretrained(args.drafter) if args.drafter else "auto"
    call = {"max_new_tokens": args.max_new_tokens, "max_rows": args.batch_size}
    return lambda rows, seed: answer_rows(model, chat, rows, candidates, seed, args.generation, **call)


def answer_rows(
    model: Any, chat: ChatFormat, rows: list[Row], candidates: Any, seed: int, generation: dict[str, Any], **call: Any
) -> list[Row]:
    """Generate the answers to rows of one domain; `call` are arguments of `generate_many`."""
    tokenizer = chat.tokenizer
    prompts = [chat.ids(chat.prompt(prompt_of(row), row.get("tools")), True) for row in rows]
    call = {**call, "pad_token_id": tokenizer.pad_token_id or 0, **generation_of(generation, rows[0])}
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    answers = generate_many(model, prompts, candidates, ordered=True, seed=seed, **call)
    return [
        answered(row, str(tokenizer.decode(found.tokens, skip_special_tokens=True)), not ends.isdisjoint(found.tokens))
        for row, found in zip(rows, answers, strict=True)
    ]


def answered(row: Row, answer: str, finished: bool) -> Row:
    """A row with the answer after its prompt, in the format of the prompt."""
    kept = {name: row[name] for name in ("domain", "tools") if row.get(name)}
    if isinstance(row.get("prompt"), str) and not row.get("system"):
        return {**kept, "prompt": row["prompt"], "response": answer, "finished": finished}
    messages = [*prompt_of(row), {"role": "assistant", "content": answer}]
    return {**kept, "messages": messages, "finished": finished}


def generation_of(generation: dict[str, Any], row: Row) -> dict[str, Any]:
    """The arguments of `generate` for the domain of a row."""
    return dict(generation.get(domain_of(row), generation.get("default", {})))


def batches_by_domain(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Batches of similar prompt length, each within one domain, as decoding settings belong to the domain."""
    ordered = sorted(rows, key=lambda row: (domain_of(row), len(str(prompt_of(row)))))
    domains = (list(members) for _, members in groupby(ordered, domain_of))
    return [members[first : first + size] for members in domains for first in range(0, len(members), size)]


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

    with ThreadPoolExecutor(args.batch_size) as pool:
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
        if taken[domain_of(row)] < args.per_domain.get(domain_of(row), args.per_domain.get("default", len(rows))):
            taken[domain_of(row)] += 1
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
    return Counter(map(domain_of, rows))


if __name__ == "__main__":
    launch(main)
