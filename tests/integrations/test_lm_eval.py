"""lm-evaluation-harness: a task of the type generate_until."""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_specgen

lm_eval = pytest.importorskip("lm_eval", exc_type=ImportError)


def answers(model: Any, tokenizer: Any, data: Path) -> list[Any]:
    """The model's answers to every document of the task."""
    from lm_eval.models.huggingface import HFLM

    task = {
        "task": "completion",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "bypass"}],
    }
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2),
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
    )
    return [sample["resps"] for sample in results["samples"]["completion"]]


def test_generate_until_same_answers(model: Any, tokenizer: Any, prompt: str, tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    rows = [{"prompt": text, "answer": "x"} for text in (prompt, "The quick brown fox", "1, 2, 3, 1, 2, 3, 1,")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = answers(model, tokenizer, data)
    with hf_specgen.attached(model) as totals:
        assert answers(model, tokenizer, data) == plain
    assert len(plain) == 3 and totals.calls >= 2 and totals.drafted > 0
