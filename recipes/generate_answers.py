"""Generates a target's own answers, the training data of every drafter: it has to predict what the target generates.

    accelerate launch recipes/generate_answers.py --target ID --prompts FILE_OR_ID --output answers.jsonl.gz
    python recipes/generate_answers.py --server http://localhost:8000/v1 --target NAME --prompts … --output …

Prompts are conversations in any format of training data; answers that these have are replaced, the last one of each.
Prompts are divided among the processes and have a seed each, so the result does not depend on the number of processes;
a drafter (`--drafter`, by default n-grams and Token Recycling) changes the speed alone.
An interrupted run continues where it stopped: until all answers are there, they are kept in a folder beside OUTPUT, one
for each choice of settings. A run with fewer or more prompts (`--limit`) uses those that are there.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub import InferenceClient
from transformers import AutoModelForCausalLM

from arguments import DataArguments, Options, launch, option, parse
from conversations import ChatFormat, Row, domain_of, first_of_domains, naming_row, prompt_of, read_rows
from hf_specgen import AutoCandidates, Completion, generate_many
from hf_specgen.cli.generate import answer_missing, digest, read_answers, write_rows
from hf_specgen.evaluation.workloads import local_files
from target import load_tokenizer

Numbered = Sequence[tuple[int, Row]]
"""Rows with their numbers, which decide the seeds of their answers."""
OTHERS = ["output", "drafter", "batch_size", "prompts", "data_split", "data_config", "exclude", "limit", "per_domain"]
"""Arguments on which no answer depends."""
API_SETTINGS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "stop")
SERVER_SETTINGS = ("top_k", "min_p", "repetition_penalty")
"""Settings of generation that a server takes: those of OpenAI's API, and those of vLLM and SGLang."""
ROWS_IN_ORDER = 512
"""Rows that are answered before any of the next ones."""


@dataclass(kw_only=True)
class AnswerArguments(DataArguments):
    """Prompts and decoding settings."""

    target: str = option(help="Hub id or folder of the model that answers; its name on the server")
    prompts: str = option(help="conversations: a file, a folder, or a dataset of the Hub")
    output: str = option(help="file to write, .jsonl or .jsonl.gz")
    server: str | None = option(default=None, help="URL of an OpenAI-compatible server that generates the answers")
    drafter: str | None = option(default=None, help="drafter of the target, for speculative decoding")
    exclude: str | None = option(default=None, help="conversations whose prompts are not used, such as a test set")
    limit: int | None = option(default=None, help="prompts to answer, a random choice; none: all")
    per_domain: Options = option(default_factory=Options, help="number of prompts by domain; default: for others")
    generation: Options = option(
        default_factory=Options, help="arguments of generate (of the server: of the API) by domain; default: for others"
    )
    max_new_tokens: int = option(default=1024, help="tokens per answer")
    batch_size: int = option(default=32, help="prompts that are processed at a time")
    target_kwargs: Options = option(default_factory=Options, help="for the target's from_pretrained")
    seed: int = option(default=0, help="of the choice of prompts and of sampling")


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, generate, save."""
    args, state = parse(AnswerArguments, __doc__, arguments), PartialState()
    if Path(args.output).exists():
        raise FileExistsError(f"{args.output} exists already; delete it, or give another --output")
    rows, generate = chosen_prompts(args), ask_server if args.server else local_answers
    parts = folder_of(args)
    try:
        done = answer_missing(parts, list(rows), lambda mine: generate(args, [(n, rows[n]) for n in mine]))
    except KeyboardInterrupt:
        kept = len(read_answers(parts).keys() & rows.keys())
        raise KeyboardInterrupt(f"stopped; {kept} of {len(rows)} answers are kept: the same command goes on") from None
    if state.is_main_process:
        write_rows(Path(args.output), (done[number] for number in rows))
        if done.keys() <= rows.keys():
            shutil.rmtree(parts)
        state.print(f"{args.output}: {len(rows)} answers {dict(Counter(map(domain_of, rows.values())))}")


def local_answers(args: AnswerArguments, rows: Numbered) -> Iterator[tuple[int, Row, int]]:
    """Answers of the target in this process, by speculative decoding."""
    chat = ChatFormat(load_tokenizer(args), args.chat_template_kwargs)
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, **args.target_kwargs).eval()
    if not {"device_map", "quantization_config"} & args.target_kwargs.keys():
        model = model.to(PartialState().device)
    candidates = AutoCandidates.from_pretrained(args.drafter) if args.drafter else "auto"
    call = {"max_new_tokens": args.max_new_tokens, "max_rows": args.batch_size}
    return answer_rows(model, chat, rows, candidates, args.seed * 1_000_003, args.generation, **call)


def answer_rows(
    model: Any, chat: ChatFormat, rows: Numbered, candidates: Any, seed: int, generation: dict[str, Any], **call: Any
) -> Iterator[tuple[int, Row, int]]:
    """The rows with the answers that `completions` generates: number, row, and tokens of the answer."""
    ends, by_number = model.generation_config.eos_token_id, dict(rows)
    ends = {*(ends if isinstance(ends, list) else [ends]), chat.tokenizer.eos_token_id}
    for number, found in completions(model, chat, rows, candidates, seed, generation, **call):
        text = str(chat.tokenizer.decode(found.tokens, skip_special_tokens=True))
        yield number, answered(by_number[number], text, not ends.isdisjoint(found.tokens)), len(found.tokens)


def completions(
    model: Any, chat: ChatFormat, rows: Numbered, candidates: Any, seed: int, generation: dict[str, Any], **call: Any
) -> Iterator[tuple[int, Completion]]:
    """Generate answers to rows; `call` are arguments of `generate_many`.

    Prompts with the same settings and of similar length run side by side, but only among `ROWS_IN_ORDER` rows: what a
    stopped run has answered is of all domains and lengths, as the rows are.
    """
    for start in range(0, len(rows), ROWS_IN_ORDER):
        some = sorted(rows[start : start + ROWS_IN_ORDER], key=lambda one: len(str(prompt_of(one[1]))))
        groups: dict[str, list[tuple[int, Row]]] = {}
        for one in some:
            groups.setdefault(repr(generation_of(generation, one[1])), []).append(one)
        for members in groups.values():
            settings = {"pad_token_id": chat.tokenizer.pad_token_id or 0, **generation_of(generation, members[0][1])}
            prompts, seeds = [chat.prompt(row) for _, row in members], [seed + number for number, _ in members]
            for found in generate_many(model, prompts, candidates, seed=seeds, **call, **settings):
                yield members[found.index][0], found


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


def ask_server(args: AnswerArguments, rows: Numbered) -> Iterator[tuple[int, Row]]:
    """Answers of an OpenAI-compatible server, to `batch_size` prompts at the same time, as they arrive.

    After an error no further prompt is sent; it is raised when the requests that were sent before are answered.
    """
    client = InferenceClient(base_url=args.server)
    for generation in args.generation.values():
        server_settings(generation, {})  # raises before anything is answered

    def ask(numbered: tuple[int, Row]) -> tuple[int, Row]:
        number, row = numbered
        template = {"chat_template_kwargs": dict(args.chat_template_kwargs)} if args.chat_template_kwargs else {}
        settings = server_settings(generation_of(args.generation, row), template)
        settings["max_tokens"] = args.max_new_tokens
        settings["tools"] = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        seed = args.seed * 1_000_003 + number
        choice = client.chat_completion(prompt_of(row), model=args.target, seed=seed, **settings).choices[0]
        reasoning = getattr(choice.message, "reasoning", None) or getattr(choice.message, "reasoning_content", None)
        thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        return number, answered(row, thought + (choice.message.content or ""), choice.finish_reason != "length")

    errors: list[BaseException] = []
    with ThreadPoolExecutor(args.batch_size) as pool:
        requests = [pool.submit(ask, numbered) for numbered in rows]
        try:
            for request in as_completed(requests):
                if request.cancelled():
                    continue
                if (error := request.exception()) is None:
                    yield request.result()
                else:
                    errors.append(error)
                    _cancel(requests)
        finally:
            _cancel(requests)
    if errors:
        raise errors[0]


def _cancel(requests: Iterable[Future[Any]]) -> None:
    """Cancel the requests that no thread has sent yet."""
    for request in requests:
        request.cancel()


def server_settings(generation: dict[str, Any], extra_body: dict[str, Any]) -> dict[str, Any]:
    """The settings of generation as arguments of `InferenceClient.chat_completion`; a `ValueError` for any other.

    Those of vLLM and SGLang that are not OpenAI's are fields of `extra_body`.
    """
    given = {name: value for name, value in generation.items() if value is not None}
    if unknown := sorted(given.keys() - {"do_sample", *API_SETTINGS, *SERVER_SETTINGS}):
        can_be_sent = ", ".join(("do_sample", *API_SETTINGS, *SERVER_SETTINGS))
        raise ValueError(f"generation has {unknown[0]}, which --server cannot send; remove it. There are {can_be_sent}")
    if given.pop("do_sample", True) is False:
        given["temperature"] = 0.0
    if given.get("top_k") == 0:
        given["top_k"] = -1  # all tokens, on servers
    extra = {**extra_body, **{name: given.pop(name) for name in SERVER_SETTINGS if name in given}}
    return {**given, "extra_body": extra or None}


def chosen_prompts(args: AnswerArguments) -> dict[int, Row]:
    """Different prompts by number, without the excluded ones: a random choice of the wanted number in each domain.

    A number depends on prompt and domain alone, so that its answer is the same whatever else is answered.
    """
    excluded = {_key(row) for row in read_rows(args.exclude)} if args.exclude else set()
    prompts: dict[str, Row] = {}
    for place, row in enumerate(read_rows(args.prompts, args.data_split, args.data_config)):
        with naming_row(place):
            prompts[_key(row)] = row
    rows = [row for key, row in prompts.items() if key not in excluded]
    random.Random(args.seed).shuffle(rows)
    chosen = first_of_domains(rows, args.per_domain)[: args.limit]
    digests = (hashlib.sha256((domain_of(row) + _key(row)).encode()).digest() for row in chosen)
    return {int.from_bytes(digest[:7]): row for digest, row in zip(digests, chosen, strict=True)}


def _key(row: Row) -> str:
    return json.dumps([prompt_of(row), row.get("tools")])


def folder_of(args: AnswerArguments) -> Path:
    """The folder for answers of an unfinished run, named by the settings and local weights that they depend on."""
    settings = {name: value for name, value in asdict(args).items() if name not in OTHERS}
    return Path(f"{args.output}.{digest([settings, local_files(args.target)])}.parts")


if __name__ == "__main__":
    launch(main)
