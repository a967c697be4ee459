"""Other clients of `generate`: pipelines, scripts in a model's folder, LangChain, lm-eval, accelerate; the examples."""

import json
import re
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_specgen
from hf_specgen.counters import CallTotals
from tests.helpers.paths import REFERENCE_LM, ROOT
from tests.helpers.processes import run_in_ranks

GENERATE = """\
import hf_specgen

def generate(model, **arguments):
    with hf_specgen.attached(model, "auto"):
        return type(model).generate(model, **arguments)
"""


def test_pipeline_batch_of_chats_same_text(model: Any, tokenizer: Any, prompt: str) -> None:
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=16, do_sample=False)
    chats = [[{"role": "user", "content": text}] for text in (prompt, "Hello", "Count: 1, 2, 1, 2")]
    expected = ask(chats, batch_size=3)
    with hf_specgen.attached(model) as totals:
        assert ask(chats, batch_size=3) == expected
    assert totals.calls == 1 and totals.drafted > 0


def test_generate_script_of_a_model_folder_same_text(
    model: Any, tokenizer: Any, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `transformers serve --trust-remote-code` runs for each request: `custom_generate/generate.py`."""
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(GENERATE)
    calls: list[int] = []
    monkeypatch.setattr(CallTotals, "add", lambda self, call: calls.append(call.drafted))
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    arguments = {"max_new_tokens": 24, "do_sample": False, "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, **arguments, custom_generate=str(tmp_path)), expected)
    assert len(calls) == 1 and calls[0] > 0


def test_langchain_pipeline_same_text_invoked_and_streamed(model: Any, tokenizer: Any, prompt: str) -> None:
    langchain_huggingface = pytest.importorskip("langchain_huggingface", exc_type=ImportError)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=24, do_sample=False)
    llm = langchain_huggingface.HuggingFacePipeline(pipeline=generate)
    plain, streamed = llm.invoke(prompt), "".join(llm.stream(prompt))
    with hf_specgen.attached(model) as totals:
        assert llm.invoke(prompt) == plain
        assert "".join(llm.stream(prompt)) == streamed
    deadline = monotonic() + 10
    while totals.calls < 2 and monotonic() < deadline:  # the stream ends shortly before the call in its thread does
        sleep(0.01)
    assert totals.calls == 2 and totals.accepted > 0


def answers(model: Any, tokenizer: Any, data: Path) -> list[Any]:
    """The model's answers to every document of a task of lm-evaluation-harness."""
    import lm_eval
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
    evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    results = lm_eval.simple_evaluate(evaluated, tasks=[task], log_samples=True, bootstrap_iters=0)
    return [sample["resps"] for sample in results["samples"]["completion"]]


def test_lm_eval_generate_until_same_answers(model: Any, tokenizer: Any, prompt: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", exc_type=ImportError)
    data = tmp_path / "test.jsonl"
    rows = [{"prompt": text, "answer": "x"} for text in (prompt, "The quick brown fox", "1, 2, 3, 1, 2, 3, 1,")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = answers(model, tokenizer, data)
    with hf_specgen.attached(model) as totals:
        assert answers(model, tokenizer, data) == plain
    assert len(plain) == 3 and totals.calls >= 2 and totals.drafted > 0


PROMPTS = ["def add(x, y):", "1, 2, 3, 1, 2,", "The quick brown fox"]


def generate_share() -> tuple[int, list[tuple[str, bool, int]]]:
    """In a rank of its own: by prompt of all ranks whether the tokens are the same, and how many calls drafted."""
    state = PartialState(cpu=True)
    model = hf_specgen.attach(AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_LM)
    results = []
    with state.split_between_processes(PROMPTS) as mine:
        for prompt in mine:
            inputs = tokenizer(prompt, return_tensors="pt")
            ours = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            plain = model.generate(**inputs, max_new_tokens=8, do_sample=False, candidate_generator=None)
            results.append((prompt, torch.equal(ours, plain), hf_specgen.statistics(model).calls))
    return state.num_processes, gather_object(results)


def test_split_between_processes_same_tokens_in_every_process() -> None:
    """Would catch: a strategy that waits for the other process, or tokens that differ in one of them."""
    (processes, results), _ = run_in_ranks(generate_share, [()] * 2)
    assert processes == 2
    assert results == [(PROMPTS[0], True, 1), (PROMPTS[1], True, 2), (PROMPTS[2], True, 1)]


PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^#+ ([^\n]*)\n[^#]*?```python\n(.*?)```", PAGE, flags=re.M | re.S))


def test_every_library_has_an_example() -> None:
    assert len(EXAMPLES) == 9


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_of_the_page_runs(title: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Would catch: an example that a new release of the library has left behind."""
    names = {
        "hf_specgen": hf_specgen,
        "NgramCandidates": hf_specgen.NgramCandidates,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": tokenizer("def add(x, y):", return_tensors="pt"),
        "folder": str(tmp_path),
        "reward": lambda completions, **_: [float(len(text)) for text in completions],
        "settings": {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "bf16": False},
    }
    if title == "TRL":
        datasets = pytest.importorskip("datasets")
        names["prompts"] = datasets.Dataset.from_list([{"prompt": "def add(x, y):"}] * 2)
    try:
        exec(compile(EXAMPLES[title], title, "exec"), names)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
