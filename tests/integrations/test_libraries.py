"""Other clients of `generate`: pipelines, scripts in a folder, LangChain, lm-eval, accelerate, TRL; the examples."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import datasets
import pytest
import torch
import transformers.tokenization_utils_base
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_specgen
from benchmarks.micro import harness
from tests.helpers.cli import run
from tests.helpers.paths import REFERENCE_LM, ROOT
from tests.helpers.processes import run_in_ranks

GENERATE = """\
import hf_specgen

def generate(model, **arguments):
    with hf_specgen.attached(model, "auto") as totals:
        model.totals_of_script = [*getattr(model, "totals_of_script", []), totals]
        return type(model).generate(model, **arguments)
"""


def test_pipeline_batch_of_chats_same_text(model: Any, tokenizer: Any, prompt: str) -> None:
    """Would catch: padding or ends of a pipeline.s batch treated otherwise than in plain decoding."""
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=16, do_sample=False)
    chats = [[{"role": "user", "content": text}] for text in (prompt, "Hello", "Count: 1, 2, 1, 2")]
    expected = ask(chats, batch_size=3)
    with hf_specgen.attached(model) as totals:
        assert ask(chats, batch_size=3) == expected
    assert totals.calls == 1 and totals.drafted > 0


def test_generate_script_of_a_model_folder_same_text(model: Any, tokenizer: Any, prompt: str, tmp_path: Path) -> None:
    """What `transformers serve --trust-remote-code` runs for each request: `custom_generate/generate.py`."""
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(GENERATE)
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    arguments = {"max_new_tokens": 24, "do_sample": False, "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, **arguments, custom_generate=str(tmp_path)), expected)
    (totals,) = model.totals_of_script
    del model.totals_of_script
    assert totals.calls == 1 and totals.drafted > 0


def test_langchain_pipeline_same_text_invoked_and_streamed(model: Any, tokenizer: Any, prompt: str) -> None:
    """Would catch: a streamer in another thread that gets tokens twice, or never ends."""
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
    from lm_eval.tasks import TaskManager

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
    manager = TaskManager(include_defaults=False)  # else thousands of files are read, 5 s in each evaluation
    results = lm_eval.simple_evaluate(
        evaluated, tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    return [sample["resps"] for sample in results["samples"]["completion"]]


def test_lm_eval_generate_until_same_answers(model: Any, tokenizer: Any, prompt: str, tmp_path: Path) -> None:
    """Would catch: a stopping criterion that sees more tokens at once, so that an answer is cut elsewhere."""
    pytest.importorskip("lm_eval", exc_type=ImportError)
    data = tmp_path / "test.jsonl"
    rows = [{"prompt": text, "answer": "x"} for text in (prompt, "The quick brown fox", "1, 2, 3, 1, 2, 3, 1,")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = answers(model, tokenizer, data)
    with hf_specgen.attached(model) as totals:
        assert answers(model, tokenizer, data) == plain
    assert len(plain) == 3 and totals.calls >= 2 and totals.drafted > 0


TASK = """\
task: continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{prompt}}}}"
generation_kwargs: {{until: ["<none>"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def test_command_line_of_lm_eval_speculates(tmp_path: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a model that the registry does not know, a strategy that is not attached, options that are lost."""
    tasks = pytest.importorskip("lm_eval.tasks", exc_type=ImportError)
    # The task is a file, so that the thousands of tasks of the harness need not be read.
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl", cache=tmp_path / "cache"))
    history = tmp_path / "answers.safetensors"
    arguments = ["--model_args", f"pretrained={REFERENCE_LM},dtype=float32,history={history}", "--device", "cpu"]
    output = run("lm-eval", *arguments, "--tasks", str(tmp_path / "task.yaml"))
    assert "hf-specgen (" in output and "|continued|" in output.replace(" ", "")
    assert "tokens per step" in output and len(hf_specgen.NgramHistory.of_file(history)) > 12


def test_scores_of_lm_eval_are_equal(model: Any, tokenizer: Any) -> None:
    """Would catch: the recorded comparison with other answers, or with a strategy that is not attached."""
    pytest.importorskip("lm_eval", exc_type=ImportError)
    row = harness.compare(model, tokenizer, harness.edits(2)._replace(new_tokens=16), 2, 1)
    assert row["same answers"] and row["score"] == row["score without"] and row["tokens per step"] > 1


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
EXAMPLES = dict(re.findall(r"^#+ ([^\n]*)\n(?:(?!^#).)*?```python\n(.*?)```", PAGE, flags=re.M | re.S))


def test_every_library_has_an_example() -> None:
    """Would catch: an example that is no longer found, and so no longer run."""
    assert len(EXAMPLES) == 9


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_of_the_page_runs(title: str, model: Any, tokenizer: Any) -> None:
    """Would catch: an example that a new release of the library has left behind."""
    names = {
        "hf_specgen": hf_specgen,
        "NgramCandidates": hf_specgen.NgramCandidates,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": tokenizer("def add(x, y):", return_tensors="pt"),
    }
    try:
        exec(compile(EXAMPLES[title], title, "exec"), names)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")


# TRL: the rollouts of GRPO

RUN: dict[str, Any] = {"max_steps": 2, "max_completion_length": 24, "logging_steps": 1, "save_strategy": "no"}
RUN |= {"report_to": [], "use_cpu": True, "seed": 3, "learning_rate": 1e-3}


def train(folder: Path, tokenizer: Any, prompt: str, *, speculate: bool, **more: Any) -> tuple[list[float], Any]:
    """Two steps of GRPO from one seed: the mean reward of each, and the trained model."""
    trl = pytest.importorskip("trl", exc_type=ImportError)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32)
    if speculate:
        hf_specgen.attach(model, hf_specgen.NgramCandidates(k=4))
    group = {"per_device_train_batch_size": 2, "num_generations": 2}
    arguments = trl.GRPOConfig(output_dir=str(folder), **RUN, **{**group, **more})
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt}, {"prompt": "The quick brown fox"}]),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry], model


@pytest.mark.parametrize("precision", [{}, {"bf16": False}], ids=["default", "float32"])
def test_grpo_two_steps_same_rewards(tokenizer: Any, prompt: str, tmp_path: Path, precision: dict[str, bool]) -> None:
    """Would catch: mixed precision, which is the default, refused by the self-check, so that all rollouts are plain."""
    plain, _ = train(tmp_path, tokenizer, prompt, speculate=False, **precision)
    ours, model = train(tmp_path, tokenizer, prompt, speculate=True, **precision)
    totals = hf_specgen.statistics(model)
    same = 2 if precision else 1  # after a step near-ties in bfloat16 may be decided otherwise
    assert len(plain) == 2 and ours[:same] == plain[:same]
    assert totals.calls >= 2 and totals.drafted > 0 and totals.plain_calls == {}


@pytest.mark.parametrize("group", [2, 4])
def test_grpo_with_continuous_batching_same_rewards(tokenizer: Any, prompt: str, tmp_path: Path, group: int) -> None:
    """Greedy rollouts: plain continuous batching samples by draws that depend on the whole step."""
    batching = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 256},
        "num_generations": group,
        "per_device_train_batch_size": group,
        "generation_kwargs": {"do_sample": False},
        "bf16": False,
    }
    plain, _ = train(tmp_path, tokenizer, prompt, speculate=False, **batching)
    ours, model = train(tmp_path, tokenizer, prompt, speculate=True, **batching)
    totals = hf_specgen.statistics(model)
    assert len(plain) == 2 and ours == plain
    assert totals.calls >= 2 and totals.accepted > 0 and totals.plain_calls == {}


# Structured output: outlines, xgrammar, llguidance and lm-format-enforcer, with attached strategies

PATTERN = r"[a-z]{3,8}( together with [a-z]{3,8}){2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


def same_text(model: Any, generate: Any) -> str:
    """What `generate()` returns, with and without a strategy; a grammar in the drafts makes fewer steps."""
    plain, steps = generate(), []
    for grammar_drafts in (False, True):
        with hf_specgen.attached(
            model, hf_specgen.NgramCandidates(k=16, tree=32), grammar_drafts=grammar_drafts
        ) as totals:
            assert generate() == plain
        assert totals.calls >= 1 and totals.drafted > 0
        steps.append(totals.steps)
    assert steps[1] < steps[0]
    return plain


@pytest.mark.parametrize("batch", [1, 3])
def test_xgrammar_json_schema_same_text(model: Any, tokenizer: Any, batch: int) -> None:
    """Would catch: a matcher that has accepted rejected draft tokens."""
    xgr = pytest.importorskip("xgrammar", exc_type=ImportError)
    from xgrammar.contrib.hf import LogitsProcessor

    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgr.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    inputs = tokenizer(['{"name": "Ann", "age": 3}\n' * 2] * batch, return_tensors="pt")

    def generate() -> list[str]:
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, logits_processor=[LogitsProcessor(grammar)])
        return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    for text in same_text(model, generate):
        assert text.startswith("{")


@pytest.mark.parametrize("backend", ["regex", "outlines_core", "llguidance", "xgrammar"])
def test_outlines_same_text(model: Any, tokenizer: Any, backend: str) -> None:
    """Would catch: a processor with a state that is called for draft tokens in another order than for a text."""
    outlines = pytest.importorskip("outlines", exc_type=ImportError)
    wrapped = outlines.from_transformers(model, tokenizer)
    if backend == "regex":
        generator = outlines.Generator(wrapped, outlines.types.Regex(PATTERN))
        prompt, expected = "Three words: red, green, red, green", PATTERN
    else:
        generator = outlines.Generator(wrapped, outlines.types.JsonSchema(json.dumps(SCHEMA)), backend=backend)
        prompt, expected = '{"name": "Ann", "age": 3}\n' * 2, r"\{.*"
    text = same_text(model, lambda: generator(prompt, max_new_tokens=32, do_sample=False))
    assert re.fullmatch(expected, text, re.S)


def test_llguidance_processor_of_ones_own_same_text(model: Any, tokenizer: Any) -> None:
    """A matcher that the processor was given is forked."""
    pytest.importorskip("llguidance", exc_type=ImportError)
    import llguidance.hf
    import llguidance.torch

    size = model.config.vocab_size
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
    inputs = tokenizer(['{"name": "Ann", "age": 3}\n' * 2], return_tensors="pt")

    class Restrict:
        def __init__(self) -> None:
            grammar = llguidance.grammar_from("json_schema", json.dumps(SCHEMA))
            self.matcher, self.is_first = llguidance.LLMatcher(vocabulary, grammar), True

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not self.is_first:
                self.matcher.consume_token(int(ids[0, -1]))
            self.is_first = False
            bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8)).bitwise_and(1).flatten()[:size].bool()
            return scores.masked_fill(~allowed, -float("inf"))

    def generate() -> str:
        torch.manual_seed(0)
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=True, logits_processor=[Restrict()])
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    assert same_text(model, generate).startswith("{")


def test_lm_format_enforcer_regex_same_text(model: Any, tokenizer: Any) -> None:
    """Would catch: a function of allowed tokens that is given a prefix with rejected tokens."""
    enforcer = pytest.importorskip("lmformatenforcer", exc_type=ImportError)
    sys.modules.setdefault("transformers.tokenization_utils", transformers.tokenization_utils_base)
    from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn

    inputs = tokenizer("Three words: red, green, red, green", return_tensors="pt")

    def generate() -> str:
        allowed = build_transformers_prefix_allowed_tokens_fn(tokenizer, enforcer.RegexParser(PATTERN))
        torch.manual_seed(0)
        ids = model.generate(**inputs, max_new_tokens=32, do_sample=True, prefix_allowed_tokens_fn=allowed)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    assert re.fullmatch(PATTERN, same_text(model, generate))
