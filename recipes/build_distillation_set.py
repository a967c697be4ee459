"""Generates a target's own answers, the training data of draft models, exit adapters and heads.

A draft has to predict the tokens that the target generates; other text has another distribution.

    accelerate launch recipes/build_distillation_set.py --config recipes/configs/distillation_reference.yaml
    accelerate launch recipes/build_distillation_set.py --target ID --prompts FILE_OR_ID --output answers.jsonl.gz

Prompts are rows {domain, prompt}. Batches are divided among the processes and have a seed each, so the result does not
depend on the number of processes. An interrupted run continues where it stopped: finished batches are kept in
OUTPUT.parts until all are there, with the settings that they belong to; other settings are refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from answers import DEFAULT_GENERATION, Rows, answer_batch, batches_by_domain
from common import Options, option, parse_config
from corpus import read_rows

RECORD = "settings.json"
"""File in OUTPUT.parts: what the finished batches depend on."""


@dataclass(kw_only=True)
class Settings:
    """Prompts and decoding settings.

    Raises:
        ValueError: if a number is below 1.
    """

    target: str = option(help="Hub id or folder of the model that answers")
    prompts: str = option(help="rows {domain, prompt}: a JSONL file or the id of a dataset")
    output: str = option(help="file to write, .jsonl or .jsonl.gz")
    exclude: str | None = option(default=None, help="rows whose prompts are not used, such as those of a test set")
    per_domain: Options = option(default_factory=Options, help="number of prompts by domain; default: for others")
    generation: Options = option(
        default_factory=lambda: Options(DEFAULT_GENERATION), help="arguments of generate by domain; default: for others"
    )
    max_new_tokens: int = option(default=128, help="tokens per answer")
    batch_size: int = option(default=32, help="prompts per generate call")
    dtype: str = option(default="auto", help="of the target")
    seed: int = option(default=0, help="of the choice of prompts and of sampling")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, generate, save."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = Accelerator()
    batches = batches_by_domain(chosen_prompts(settings), settings.batch_size)
    parts = Path(settings.output + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    record = record_of(settings, batches)
    check_record(parts, record)
    done = finished_batches(parts)
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=settings.dtype)
    model = model.to(accelerator.device).eval()
    accelerator.wait_for_everyone()  # no process writes while another one still reads
    if accelerator.is_main_process:
        (parts / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
    accelerator.wait_for_everyone()  # no batch is written before the record
    mine = [i for i in range(len(batches)) if i not in done][accelerator.process_index :: accelerator.num_processes]
    part = parts / f"{accelerator.process_index}.jsonl"
    with part.open("a", encoding="utf-8") as file:
        file.write("\n")  # terminates a line that an interruption cut off
        for i in tqdm(mine, disable=not accelerator.is_main_process, unit="batch"):
            seed = settings.seed * 1_000_003 + i
            rows = answer_batch(model, tokenizer, batches[i], settings.generation, settings.max_new_tokens, seed)
            file.write(json.dumps({"batch": i, "rows": list(rows)}, ensure_ascii=False) + "\n")
            file.flush()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        counts = merge(finished_batches(parts), Path(settings.output))
        for leftover in parts.iterdir():
            leftover.unlink()
        parts.rmdir()
        accelerator.print(f"{settings.output}: {sum(counts.values())} answers {dict(counts)}")
    accelerator.end_training()


def chosen_prompts(settings: Settings) -> Rows:
    """Different prompts, without the excluded ones: a random choice of the wanted number in each domain."""
    excluded = {row["prompt"] for row in read_rows(settings.exclude)} if settings.exclude else set()
    prompts = {
        row["prompt"]: {"domain": row.get("domain") or "", "prompt": row["prompt"]}
        for row in read_rows(settings.prompts)
    }
    rows = [row for prompt, row in prompts.items() if prompt not in excluded]
    random.Random(settings.seed).shuffle(rows)
    wanted = settings.per_domain
    taken: Counter[str] = Counter()
    chosen = []
    for row in rows:
        if taken[row["domain"]] < wanted.get(row["domain"], wanted.get("default", len(rows))):
            taken[row["domain"]] += 1
            chosen.append(row)
    return chosen


def record_of(settings: Settings, batches: Sequence[Rows]) -> dict[str, Any]:
    """What the answers depend on: the settings, and the prompts of each batch, as a hash."""
    prompts = json.dumps([[row["prompt"] for row in batch] for batch in batches])
    record = {name: value for name, value in asdict(settings).items() if name != "output"}
    record["content of the prompts"] = hashlib.sha256(prompts.encode()).hexdigest()
    return dict(json.loads(json.dumps(record)))  # as it is when it is read again


def check_record(parts: Path, record: dict[str, Any]) -> None:
    """Raise if `parts` has batches that were generated with other settings or from other prompts.

    Raises:
        ValueError: what differs.
    """
    if not finished_batches(parts):
        return
    file = parts / RECORD
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if recorded == record:
        return
    changes = "unknown settings"
    if recorded is not None:
        names = [name for name in record if recorded.get(name) != record[name]]
        changes = ", ".join(f"{name} {recorded.get(name)!r:.80} (now {record[name]!r:.80})" for name in names)
    raise ValueError(
        f"{parts} has batches of an interrupted run with {changes}; continue it with the same settings, or remove that "
        "folder to start anew"
    )


def finished_batches(parts: Path) -> dict[int, Rows]:
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


def merge(done: dict[int, Rows], output: Path) -> Counter[str]:
    """Write all rows in the order of their batches; returns the number of rows by domain."""
    rows = [row for batch in sorted(done) for row in done[batch]]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Without a time stamp, equal answers are equal files.
    output.write_bytes(gzip.compress(text.encode(), mtime=0) if output.suffix == ".gz" else text.encode())
    return Counter(row["domain"] for row in rows)


if __name__ == "__main__":
    main()
