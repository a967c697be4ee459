"""Writes down a target's own answers, to train a draft, exit adapters or heads on.

A draft that learns from other people's text learns to predict other people; what counts is the target's own choice.

    accelerate launch recipes/build_distillation_set.py --config recipes/configs/distillation_reference.yaml
    accelerate launch recipes/build_distillation_set.py --target ID --prompts FILE_OR_ID --output answers.jsonl.gz

Prompts are rows {domain, prompt}. Batches are shared out over the processes; each has a seed of its own, so the result
does not depend on their number. A run that was interrupted goes on where it stopped: finished batches lie in
OUTPUT.parts until all are there.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from answers import DEFAULT_GENERATION, Rows, answer_batch, batches_by_domain
from common import parse_config
from corpus import read_rows


@dataclass
class Settings:
    """What to answer, and how."""

    target: str
    prompts: str
    output: str
    exclude: str | None = None  # rows whose prompts must not be used, such as those of a test set
    per_domain: dict[str, int] = field(default_factory=dict)  # how many prompts of each domain, "default" for others
    generation: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_GENERATION))
    max_new_tokens: int = 128
    batch_size: int = 32
    dtype: str = "auto"
    seed: int = 0


def main(arguments: list[str] | None = None) -> None:
    """Parse, load, generate, save."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=settings.dtype)
    model = model.to(accelerator.device).eval()
    batches = batches_by_domain(chosen_prompts(settings), settings.batch_size)
    parts = Path(settings.output + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    done = finished_batches(parts)
    accelerator.wait_for_everyone()  # nobody writes while another still reads
    mine = [i for i in range(len(batches)) if i not in done][accelerator.process_index :: accelerator.num_processes]
    part = parts / f"{accelerator.process_index}.jsonl"
    with part.open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that an interruption cut off
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
    """Each prompt once, none of the excluded, a random choice of the wanted number in each domain."""
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


def finished_batches(parts: Path) -> dict[int, Rows]:
    """The batches of earlier runs; a line that was cut off does not count."""
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
    """Write all rows in the order of their batches; returns how many each domain has."""
    rows = [row for batch in sorted(done) for row in done[batch]]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # No time stamp in the file: the same answers are the same bytes.
    output.write_bytes(gzip.compress(text.encode(), mtime=0) if output.suffix == ".gz" else text.encode())
    return Counter(row["domain"] for row in rows)


if __name__ == "__main__":
    main()
