"""Scores and time of lm-evaluation-harness, without and with an attached strategy, on tasks over local files."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import attached
from hf_specgen.evaluation.published import PUBLISHED, published
from hf_specgen.evaluation.workloads import ASSETS, BUNDLED_PROMPTS, load, read_rows

LAST_NUMBER: list[dict[str, Any]] = [
    {"function": "regex", "regex_pattern": r"(-?\d[\d,]*)", "group_select": -1},
    {"function": "take_first"},
]


class Task(NamedTuple):
    """A task of the harness: `rows` with a prompt and the right answer, and the filter of generated answers."""

    name: str
    rows: list[dict[str, str]]
    new_tokens: int
    filter: list[dict[str, Any]]


def edits(count: int) -> Task:
    """Bundled texts that are repeated with a change: the answer has to be equal."""
    rows = [row for row in read_rows(BUNDLED_PROMPTS) if row["domain"] == "edit"][:count]
    asked = [{"prompt": row["prompt"], "answer": row["response"]} for row in rows]
    return Task("edit", asked, 128, [{"function": "take_first"}])


def problems(count: int) -> Task:
    """Problems of GSM8K: the last number of the answer has to be the result."""
    rows = read_rows(ASSETS / "gsm8k.jsonl")[:count]
    asked = [{"prompt": row["question"], "answer": row["answer"].rpartition("#### ")[2]} for row in rows]
    return Task("gsm8k", asked, 96, LAST_NUMBER)


def harness_scores(repeats: int, quick: bool = False) -> list[dict[str, Any]]:
    """Scores, tokens per step and time by model, task and batch size; nothing without the harness."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        return []
    cases: list[tuple[str, Any, Task, tuple[int, ...]]] = [("16M", "", edits(2 if quick else 24), (1, 4))]
    if not quick and (source := published(print)) is not None:
        cases.append((PUBLISHED.rpartition("/")[2], source, problems(8), (1,)))
    rows = []
    for name, source, task, batch_sizes in cases:
        model, tokenizer = load(source)
        for size in batch_sizes:
            rows.append({"model": name, **compare(model, tokenizer, task, size, repeats)})
    return rows


def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, batch_size: int, repeats: int
) -> dict[str, Any]:
    """A task evaluated without and with `attach(model, "auto")`, in turns; the shortest time of each counts."""
    seconds = [float("inf"), float("inf")]
    for turn in range(1 + repeats):  # the first one is short and not counted
        limit = None if turn else 1
        begin = perf_counter()
        score, answers = evaluate(model, tokenizer, task, batch_size, limit)
        middle = perf_counter()
        with attached(model, "auto") as totals:
            our_score, our_answers = evaluate(model, tokenizer, task, batch_size, limit)
        if turn:
            seconds[0] = min(seconds[0], middle - begin)
            seconds[1] = min(seconds[1], perf_counter() - middle)
    return {
        "task": task.name,
        "items": len(task.rows),
        "batch": batch_size,
        "score": our_score,
        "score without": score,
        "same answers": our_answers == answers,
        "tokens per step": totals.tokens_per_step,
        "time over plain": seconds[1] / seconds[0],
    }


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, batch_size: int, limit: int | None = None
) -> tuple[float, list[Any]]:
    """The score of a task in the harness, and the answers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in task.rows), encoding="utf-8")
        description = {
            "task": task.name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": folder},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n\n\n"], "max_gen_toks": task.new_tokens, "do_sample": False},
            "filter_list": [{"name": "answer", "filter": task.filter}],
            "metric_list": [{"metric": "exact_match", "ignore_case": False}],
        }
        results: Any = lm_eval.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=[description],
            task_manager=TaskManager(include_defaults=False),  # else thousands of files are read in each evaluation
            limit=limit,
            log_samples=True,
            bootstrap_iters=0,
            apply_chat_template=True,
        )
    score = float(results["results"][task.name]["exact_match,answer"])
    return score, [sample["resps"] for sample in results["samples"][task.name]]
