"""All commands: bad input is one sentence and exit code 2, without a traceback; what several of them share."""

import functools
import gzip
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedTokenizerBase
from transformers.cli.serve import Serve

from hf_specgen import AdaptiveDepth, DraftModelCandidates, NgramCandidates, NgramHistory, __version__
from hf_specgen.call_statistics import RowStep, Statistics
from hf_specgen.cli import checkpoints, main
from hf_specgen.cli import generate as command
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.cost import measure_latency
from hf_specgen.evaluation.workloads import chosen_strategy
from hf_specgen.heads import save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.source import Source
from tests.helpers import prompts, tiny_model
from tests.helpers.cli import run
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.medusa import random_heads
from tests.helpers.models import small_llama
from tests.helpers.network import cached, unreachable_hub, use_cache
from tests.helpers.paths import DRAFT_LM, HEAD_FIXTURES, REFERENCE_LM

MODEL = str(REFERENCE_LM)
EAGLE_HEAD = str(REFERENCE_LM.parent / "eagle3-head")
TWO_LAYERS = str(FIXTURES["speculators_eagle3_e_twolayers_bias_fourtaps"].head_folder)
CHAT = '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'

BAD_INPUT = [
    (["doctor", MODEL, "--dtype", "int3"], "'int3' is not one of 'auto', 'float32'"),
    (["doctor", MODEL, "--batch-size", "0"], "--batch-size"),
    (["doctor", MODEL, "--temperature", "-1"], "--temperature"),
    (["doctor", MODEL, "--device", "toaster"], "device 'toaster' cannot be used here"),
    (["doctor"], "Missing argument"),
    (["doctor", MODEL, "--draft", "./none"], "there is no folder './none'"),
    (["demo", "--dtype", "int3"], "'int3' is not one of 'float32', 'bfloat16', 'float16'"),
    (["doctor", "./no-such-folder"], "there is no folder './no-such-folder'"),
    (["doctor", "org/none"], "cannot load 'org/none'"),
    (["demo", "--device", "toaster"], "device 'toaster' cannot be used here"),
    (["demo", "--seconds", "-1"], "--seconds"),
    (["chat", MODEL, "--adapter", "/nonexistent"], "there is no folder '/nonexistent'"),
    (["tune", MODEL, "--context", "100000"], "positions"),
    (["tune", MODEL, "--batch-size", "100000000000000"], "not enough memory"),
    (["tune", MODEL, "--latency", "none/file.json"], "cannot be written"),
    (["chat", "/there/is/none"], "there is no folder"),
    (["doctor", "", "--no-run"], "there is no folder ''"),
    (["doctor", EAGLE_HEAD], "; give a language model with its tokenizer"),
    (["generate", MODEL, "none.jsonl", "a.jsonl"], "cannot use 'none.jsonl': No such file or directory; name another"),
    (["export", EAGLE_HEAD, "--to", "tgi", "--output", "out"], "Eagle3Head cannot be written for 'tgi'; choose eagle"),
    (["export", TWO_LAYERS, "--to", "eagle", "--output", "out"], "several layers"),
    (["export", str(DRAFT_LM), "--to", "vllm", "--output", "out"], "a whole model drafts as"),
    (["demo", "--model", MODEL], "No such option: --model"),
    (["serve", MODEL, "--contiuous-batching"], "No such option: --contiuous-batching"),
    (["serve"], "Missing argument"),
    (["serve", "./none"], "there is no folder './none'"),
    (["serve", "org/none"], "cannot load 'org/none'"),
    (["serve", MODEL, "--draft", "./none"], "there is no folder './none'"),
    (["serve", MODEL, "--history", "none/a"], "none' for the history; make it first"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a traceback, or a message that does not name the option or its value."""
    monkeypatch.chdir(tmp_path)
    output = run(*arguments, exit_code=2)
    assert message in output and "Traceback" not in output


def test_chat_template_that_raises_is_named(tmp_path: Path) -> None:
    """Would catch: an error of Jinja without the name of the model whose template it is."""
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    command = ["generate", str(tmp_path / "model"), str(tmp_path / "prompts.jsonl"), str(tmp_path / "out.jsonl")]
    for arguments in (command, ["doctor", str(tmp_path / "model"), "--device", "cpu"]):
        output = run(*arguments, exit_code=2)
        assert "the chat template of" in output and "no chats" in output


def test_prompt_beyond_the_positions_of_the_model_is_named(tmp_path: Path) -> None:
    """Would catch: a traceback of an embedding."""
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tiny_model("gpt2", vocab_size=8192, n_positions=16).save_pretrained(tmp_path / "model")
    command.write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a b " * 30}])
    files = (str(tmp_path / name) for name in ("model", "prompts.jsonl", "out.jsonl"))
    output = run("generate", *files, "--dtype", "float32", exit_code=2)
    assert "has more tokens than the model has positions; give shorter ones (prompt 0: index out of" in output


def test_device_that_cannot_be_used_is_named_in_a_sentence() -> None:
    """Would catch: the list of all backends, 1,500 characters, in the message."""
    assert (
        len(run("doctor", MODEL, "--device", "xla" if torch.backends.mps.is_available() else "mps", exit_code=2)) < 300
    )


@pytest.mark.parametrize("missing", ["typer", "rich", "scipy"])
def test_main_without_a_package_of_the_extra_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a doctor that fails for want of scipy after it has measured everything."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}: pip install 'hf-specgen\[cli\]'"):
        main()


def test_generate_explanation_names_why_little_was_gained() -> None:
    """Would catch: "1.02 tokens per step" without a reason."""
    plain, rejected, accepted = RowStep(0, 0, 0, 1), RowStep(4, 4, 0, 1), RowStep(4, 4, 3, 4)
    assert "0 of 9 steps had a draft; with 8 rows" in command.explanation(Statistics([[plain] * 9]), 8)
    assert "few draft tokens were accepted" in command.explanation(Statistics([[rejected] * 9]), 8)
    assert command.explanation(Statistics([[accepted] * 9]), 8) == ""


def test_several_drafts_are_combined() -> None:
    """Would catch: `--draft A --draft B` of a command with one strategy that leaves A out."""
    strategy = chosen_strategy([str(DRAFT_LM), EAGLE_HEAD])
    assert [type(one).__name__ for one in strategy.strategies] == [
        *("NgramCandidates", "DraftModelCandidates", "EagleCandidates"),
    ]


def test_version_is_printed() -> None:
    """Would catch: a version of another package, or an import that fails before it."""
    assert run("--version") == f"hf-specgen {__version__}"


# Heads in the tools: export, and the strategies of the command line

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "to"), [("eagle3_original", "sglang"), ("speculators_dflash_full", "vllm"), ("eagle1_original", "eagle")]
)
def test_export_command_writes_a_head_that_loads_alike(name: str, to: str, tmp_path: Path) -> None:
    """Would catch: tensors that are lost or renamed on the way to another program and back."""
    source = str(FIXTURES[name].head_folder)
    run("export", source, "--to", to, "--output", str(tmp_path / "out"))
    ours: dict[str, Any] = load_head(source).state_dict()
    for key, tensor in load_head(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(tensor, ours[key])


# `hf-specgen tune`: the latencies that it measures, and how they are used


def test_measure_latency_has_the_drafters_that_run_a_network() -> None:
    """Would catch: n-grams timed as a network, a drafter left out, or one bucket for all numbers of rows."""
    model = tiny_model("llama")
    strategies = [NgramCandidates(), DraftModelCandidates(model, k=3)]
    with torch.device("meta"):  # the default device of a program, on which nothing can be read
        latency = measure_latency(model, strategies, rows=[1, 2], context=30)
    assert [(one.target.batch, one.target.context) for one in latency.buckets] == [(1, 30), (2, 30)]
    for one in latency.buckets:
        assert set(one.drafters) == {"any", "draft_model"} and one.drafters["draft_model"].seconds[0] > 0


def test_tune_writes_a_latency_file_that_a_policy_reads(folder: Path, tmp_path: Path) -> None:
    """Would catch: a file that no policy reads, or latencies of other sizes than those asked for."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    save_head(random_heads(model, num_heads=2), tmp_path / "heads")
    latency, heads = str(tmp_path / "latency.json"), str(tmp_path / "heads")
    options = ["--heads", heads, "--context", "40", "--device", "cpu", "--latency", latency]
    printed = run("tune", str(folder / "target"), *options)
    assert "batch size 1: 100%" in printed, "without a progress bar"
    assert "T(8)" in printed and f"AdaptiveDepth(latency='{latency}')" in printed.replace(" ", "")  # long lines wrap
    (one,) = LatencyModel.load(latency).buckets
    assert (one.target.batch, one.target.context) == (1, 40) and "medusa" in one.drafters
    policy, inputs = AdaptiveDepth(latency=latency), prompts(1)
    ours = model.generate(**inputs, max_new_tokens=8, candidate_generator=NgramCandidates(policy=policy))
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=8))
    assert "hidden size" in run("tune", str(REFERENCE_LM), "--heads", heads, exit_code=2)


# `hf-specgen find`: what of the Hub may draft for a target, in which order


def repo(name: str, parameters: int | None, tags: tuple[str, ...] = (), downloads: int = 1) -> Any:
    """What the Hub tells of a repository."""
    safetensors = None if parameters is None else SimpleNamespace(total=parameters)
    config = {"model_type": "qwen3"}
    return SimpleNamespace(id=name, safetensors=safetensors, tags=list(tags), downloads=downloads, config=config)


def listed(_: HfApi, *, filter: str, author: str = "", **__: Any) -> list[Any]:
    """What the Hub lists of an author, and of models with this base model."""
    if author:
        return [repo("org/target-8B", 8_000), repo("org/target-4B", 4_000), repo("org/target-0.6B", 600)]
    assert filter == "base_model:org/target-8B"
    return [
        repo("a/target-8B-medusa", 800),
        repo("b/target-8B-finetuned", 8_000),
        repo("c/target-8B-speculator.eagle3", 400, downloads=9),
        repo("d/target-8B-EAGLE", None, downloads=99),
        repo("e/target_8B_head", 300, ("dflash", "base_model:org/eagle")),
    ]


def test_found_on_the_hub_by_base_model_and_family_best_format_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: fine-tuned models listed as drafts, formats read from the names of base models."""
    monkeypatch.setattr(HfApi, "model_info", lambda api, name, **_: repo(name, 8_000))
    monkeypatch.setattr(HfApi, "list_models", listed)
    found = checkpoints.best_first(checkpoints.on_hub(Source("org/target-8B"), 10))
    assert [(one.name[0], one.kind, one.size) for one in found] == [
        ("c", "EAGLE", 0.05),
        ("d", "EAGLE", None),
        ("e", "block head", 0.0375),
        ("a", "Medusa", 0.1),
        ("o", "draft model", 0.075),
    ]
    printed = run("find", "org/target-8B", "--limit", "3")
    assert "5.0%" in printed and "target-8B-medusa" not in printed
    assert "hf-specgen doctor org/target-8B --draft c/target-8B-speculator.eagle3" in printed
    monkeypatch.setattr(HfApi, "list_models", lambda *_, **__: [])
    assert "nothing was found" in run("find", "org/target-8B", exit_code=1)


def test_found_in_the_cache_are_checkpoints_that_fit_the_target(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: heads of another target, draft models of half its size, folders that hold neither."""
    small, neither = small_llama(8192, 0), tmp_path / "texts"
    small.save_pretrained(tmp_path / "small")
    for file in REFERENCE_LM.glob("*token*"):
        shutil.copy(file, tmp_path / "small")
    neither.mkdir()
    (neither / "README.md").touch()
    other_head = HEAD_FIXTURES / "eagle3_original" / "head"
    checkpoints = {"eagle": EAGLE_HEAD, "half": DRAFT_LM, "other": other_head, "neither": neither}
    for name, files in {**checkpoints, "small": tmp_path / "small", "target": REFERENCE_LM}.items():
        cached(tmp_path / "hub", name, Path(files))
    use_cache(tmp_path / "hub", monkeypatch)
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: pytest.fail("a folder was looked up on the Hub"))
    printed = run("find", str(REFERENCE_LM))
    assert "is a folder: looking in the local cache" in printed and "Hub" not in printed
    assert printed.endswith(f"hf-specgen doctor {REFERENCE_LM} --draft org/eagle --draft org/small")


# `hf-specgen generate`: the answers of plain generation, resumable, in the order of the source

PROMPTS = ["def add(x, y):", "The quick brown fox jumps over the lazy dog. " * 3, "Hello", "1, 2, 3, 1, 2, 3, 1,", "A"]


@pytest.fixture(autouse=True)
def target_beside_prompts(folder: Path, tmp_path: Path) -> None:
    """A tiny target beside the prompts."""
    (tmp_path / "target_beside_prompts").symlink_to(folder / "target")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    return file


def generate_rows(source: Path, output: Path, *options: str, exit_code: int = 0) -> str:
    files = str(output.parent / "target_beside_prompts"), str(source), str(output)
    settings = "--max-new-tokens", "12", "--dtype", "float32", "--batch-size", "2"
    return run("generate", *files, *settings, *options, exit_code=exit_code)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8")], ids=["greedy", "sampled"])
def test_answers_are_those_of_plain_generation_in_the_order_of_the_source(source: Path, sampling: tuple) -> None:
    """Would catch: answers in the order in which they end, other tokens, or files that are left behind."""
    plain, ours = source.with_name("plain.jsonl"), source.with_name("ours.jsonl")
    generate_rows(source, plain, "--plain", *sampling)
    output = generate_rows(source, ours, *sampling)
    assert rows(ours) == rows(plain)
    assert [row["id"] for row in rows(ours)] == [0, 1, 2, 3, 4] and all("answer" in row for row in rows(ours))
    assert "5 rows" in output and "tokens per step" in output
    assert re.search(r"5/5 \[[^]]*, [\d.]+ tokens/s\]", output), "the speed in the progress bar"
    if not sampling:  # would catch: an answer beside the prompt of another row
        (alone := source.with_name("alone.jsonl")).write_text(json.dumps(rows(plain)[1] | {"answer": None}) + "\n")
        generate_rows(alone, source.with_name("one.jsonl"), "--answer-column", "again")
        assert rows(source.with_name("one.jsonl"))[0]["again"] == rows(plain)[1]["answer"]
    assert not list(source.parent.glob("*.parts")) and not list(source.parent.glob("*.unfinished"))


def test_interrupted_run_is_resumed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: answers that are generated twice, lost, or other ones than those of an uninterrupted run."""
    complete, resumed = source.with_name("complete.jsonl"), source.with_name("resumed.jsonl")
    generate_rows(source, complete, "--temperature", "0.8")
    decode, answered = PreTrainedTokenizerBase.decode, list[Any]()

    def failing(*arguments: Any, **settings: Any) -> Any:
        answered.append(arguments)
        if len(answered) == 3:
            raise OSError("no power")
        return decode(*arguments, **settings)

    monkeypatch.setattr(PreTrainedTokenizerBase, "decode", failing)
    assert "no power" in generate_rows(source, resumed, "--temperature", "0.8", exit_code=2)
    assert not resumed.exists()
    part = next(source.parent.glob("resumed.jsonl.*.parts/process-0.jsonl"))
    part.write_text(part.read_text() + '[3, "cut o')
    assert "0 answered already" in generate_rows(source, resumed), "answers of other settings are not used"
    resumed.unlink()
    assert "2 answered already" in generate_rows(source, resumed, "--temperature", "0.8")
    assert rows(resumed) == rows(complete) and len(answered) == 3 + 5 + 3


@pytest.mark.parametrize("changed", ["prompts", "weights"])
def test_interrupted_run_with_other_prompts_or_weights_begins_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Would catch: answers to earlier prompts, or of earlier weights, beside the prompts of a row number."""
    target = tmp_path / "target_beside_prompts"
    shutil.copytree(target, tmp_path / "own")
    target.unlink()
    (tmp_path / "own").rename(target)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda _: None)  # as if the run were interrupted before its end
        generate_rows(source, source.with_name("first.jsonl"))
    source.with_name("first.jsonl").unlink()
    if changed == "prompts":
        command.write_rows(source, [{"prompt": text} for text in reversed(PROMPTS)])
    else:
        small_llama(8192, 5).save_pretrained(target)
    assert "0 answered already" in generate_rows(source, source.with_name("first.jsonl"))
    generate_rows(source, source.with_name("whole.jsonl"))
    assert rows(source.with_name("first.jsonl")) == rows(source.with_name("whole.jsonl"))


def test_history_of_a_run_drafts_in_the_next_one_the_same_answers(source: Path) -> None:
    """Would catch: answers that are not added to the file, other tokens by them, or a head without n-grams for it."""
    plain, file = source.with_name("plain.jsonl"), source.with_name("answers.safetensors")
    generate_rows(source, plain, "--plain", "--history", str(file))
    earlier = len(NgramHistory.of_file(file))
    assert earlier > 5 * 12
    target = AutoModelForCausalLM.from_pretrained(source.with_name("target_beside_prompts"))
    save_head(random_heads(target, num_heads=2), source.with_name("heads"))
    for drafts in ([], ["--draft", str(source.with_name("heads"))]):
        ours = source.with_name(f"ours{len(drafts)}.jsonl")
        output = generate_rows(source, ours, "--history", str(file), *drafts)
        assert rows(ours) == rows(plain) and len(NgramHistory.of_file(file)) == earlier
        assert "acceptance by position: 1.00 1.00" in output


def test_messages_and_other_columns_are_read(source: Path) -> None:
    """Would catch: a column that is named and not read, or an answer under another name."""
    file, output = source.with_name("chats.jsonl"), source.with_name("out.jsonl")
    file.write_text(json.dumps({"chat": [{"role": "user", "content": "Hello"}]}) + "\n")
    generate_rows(file, output, "--column", "chat", "--answer-column", "reply")
    assert list(rows(output)[0]) == ["chat", "reply"]


def test_messages_begin_with_one_bos_token_without_chat_format_too(source: Path, tmp_path: Path) -> None:
    """Would catch: the BOS token of the tokenizer before that of the template, by which messages are always written."""
    target = tmp_path / "target_beside_prompts"
    shutil.copytree(target, tmp_path / "own")
    target.unlink()
    (tmp_path / "own").rename(target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer.save(str(target / "tokenizer.json"))
    command.write_rows(source, [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS])
    file = source.with_name("answers.safetensors")
    generate_rows(source, source.with_name("answers.jsonl"), "--no-chat", "--history", str(file))
    assert NgramHistory.of_file(file).index.tokens.count(1) == len(PROMPTS)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a"}\n', (), "row 1 of {} has no prompt in column 'prompt'; its columns are text"),
        ("nonsense\n", (), "{}, line 1: expected a JSON object, got 'nonsense'"),
        ("\n", (), "{} has no rows"),
        ('{"prompt": "a"}\n', ("--draft", "./none"), "there is no folder './none'"),
        ('{"prompt": "a"}\n', ("--answer-column", "prompt"), "row 1 of {} has a column 'prompt' already; name another"),
        ('{"prompt": "\\ud800"}\n', (), "row 1 of {} has a lone surrogate"),
        (CHAT, (), "row 1 of {} ends with a message of the assistant"),
        ('{"prompt": ["a"]}\n', (), "row 1 of {} has no chat messages"),
        (b"\xff", (), "{} is not UTF-8"),
    ],
)
def test_generate_bad_input_is_one_sentence(tmp_path: Path, content: str | bytes, options: tuple, message: str) -> None:
    """Would catch: a traceback after the model was loaded, without the row that cannot be answered."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    output = generate_rows(source, tmp_path / "out.jsonl", *options, exit_code=2).replace(" ", "")
    assert message.format(source).replace(" ", "") in output


def test_compressed_prompts_are_read(source: Path) -> None:
    """Would catch: a file that is refused as no UTF-8, though such a file may be written; a traceback of a cut one."""
    compressed = source.with_name("prompts.jsonl.gz")
    compressed.write_bytes(gzip.compress(source.read_bytes()))
    generate_rows(source, source.with_name("one.jsonl"))
    generate_rows(compressed, source.with_name("two.jsonl"))
    assert rows(source.with_name("one.jsonl")) == rows(source.with_name("two.jsonl"))
    for content in (compressed.read_bytes()[:-9], b"no gzip"):
        compressed.write_bytes(content)
        output = generate_rows(compressed, source.with_name("three.jsonl"), exit_code=2)
        assert "cannot be decompressed" in output
    missing = generate_rows(source.with_name("none.jsonl.gz"), source.with_name("three.jsonl"), exit_code=2)
    assert "No such file" in missing


def test_folder_without_data_and_existing_output_are_named(source: Path, tmp_path: Path) -> None:
    """Would catch: a file that is overwritten, or an error of the library of datasets."""
    output = tmp_path / "out.jsonl"
    (tmp_path / "empty").mkdir()
    assert "cannot load the dataset" in generate_rows(tmp_path / "empty", output, exit_code=2)
    output.touch()
    assert "exists already; delete it" in generate_rows(source, output, exit_code=2)


# Checkpoints of the Hub: revisions, and repositories with code of their own

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub without network: org/target and org/heads at tag v1 alone, and org/own with its own code."""
    cache, model = tmp_path / "hub", small_llama(8192, 0)
    for name, revision in (("target", "v1"), ("own", "main"), ("heads", "v1")):
        folder, commit = cache / f"models--org--{name}", "0123456789" * 4
        snapshot = folder / "snapshots" / commit
        if name == "heads":
            save_head(random_heads(model, num_heads=2), snapshot)
        else:
            model.save_pretrained(snapshot)
            for file in REFERENCE_LM.glob("*token*"):
                shutil.copy(file, snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / revision).write_text(commit)
    own = cache / "models--org--own" / "snapshots" / commit
    (own / "modeling_own.py").write_text(OWN_CODE)
    config = json.loads((own / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (own / "config.json").write_text(json.dumps(config))
    use_cache(cache, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return cache


FAST = "--device cpu --max-new-tokens 2"
OWN = "org/own --trust-remote-code"
OF_THE_HUB = [
    f"doctor org/target --revision v1 --draft {OWN} --no-run",
    f"doctor org/target --revision v1 --draft org/heads@v1 --draft {OWN} --no-run",
    f"doctor {OWN} --draft org/target@v1 {FAST} --rounds 1 --prompt a",
    f"generate {OWN} prompts.jsonl answers.jsonl --draft org/target@v1 {FAST}",
    f"chat org/target@v1 --draft {OWN} {FAST}",
    "tune org/target@v1 --draft org/heads@v1 --context 8 --device cpu",
    "export org/heads --revision v1 --target org/target@v1 --to tgi --output out",
]


@pytest.mark.parametrize("line", OF_THE_HUB)
def test_command_loads_a_revision_and_code_of_the_hub(hub: Path, line: str) -> None:
    """Would catch: a command that reads `main`, which is not cached here, or a draft without its own code."""
    output, code = run(*line.split()), "AutoCandidates.from_pretrained('org/own', trust_remote_code=True)"
    assert "error" not in output and (line != OF_THE_HUB[0] or code in output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "org/target", "--no-run"], "cannot load 'org/target'"),
        (["doctor", "org/target", "--no-run"], "HF_HUB_OFFLINE is set, so only files in the local cache are found"),
        (["generate", "org/target@v1", "org/data", "out.jsonl"], "HF_HUB_OFFLINE is set, so only files in the local"),
        (["doctor", "org/own", "--no-run"], "--trust-remote-code runs the code of the repository"),
        (["doctor", "org/target@v1", "--draft", "org/own"], "--trust-remote-code runs the code of the repository"),
        (["doctor", "org/target@v2"], "cannot load 'org/target'"),
        (["doctor", MODEL, "--revision", "v1"], "is a folder, which has no revision 'v1'"),
    ],
)
def test_missing_revision_and_code_that_is_not_trusted_are_named(hub: Path, arguments: list[str], message: str) -> None:
    """Would catch: another revision loaded instead, or code of a repository that runs unasked."""
    assert message in run(*arguments, exit_code=2)


def test_find_reads_the_target_of_a_revision(hub: Path) -> None:
    """Would catch: the target read at `main`, or a revision missing in the command that is printed."""
    shutil.copy(hub / "models--org--heads" / "refs" / "v1", hub / "models--org--heads" / "refs" / "main")
    line = "hf-specgen doctor org/target@v1 --draft org/heads"
    assert line in run("find", "org/target", "--revision", "v1") and line in run("find", "org/target@v1")


def test_find_without_a_network_reads_the_local_cache(hub: Path) -> None:
    """Would catch: the connection error of the HTTP library as a traceback, where the page promises the cache."""
    shutil.copy(hub / "models--org--heads" / "refs" / "v1", hub / "models--org--heads" / "refs" / "main")
    with unreachable_hub():
        shown = run("find", "org/target@v1")
    assert "looking in the local cache" in shown and "hf-specgen doctor org/target@v1 --draft org/heads" in shown


SERVERS = [
    ("--draft org/own --trust-remote-code", {"trust_remote_code": True}, "'org/own'"),
    ("--continuous-batching --cb-num-blocks 8", {"continuous_batching": True, "cb_num_blocks": 8}, "[NgramCandidates("),
    (f"--draft {REFERENCE_LM.parent / 'exit-adapter'} --port 8", {"port": 8}, "exit-adapter"),
    (f"--draft {EAGLE_HEAD} --history answers", {"history": "answers"}, "[NgramCandidates("),
]


@pytest.mark.parametrize(("options", "expected", "strategy"), SERVERS)
def test_serve_passes_its_options_on(hub: Path, monkeypatch: Any, options: str, expected: Any, strategy: str) -> None:
    """Would catch: a revision, trust in code or a history that does not reach the server, a strategy that stays.

    Also continuous batching that nobody asked for, in which a request's stop strings and seed are not obeyed.
    """
    attached, passed = lambda: getattr(GenerationMixin, "_hf_specgen_attachment", None), dict[str, Any]()

    @functools.wraps(Serve.__init__)
    def start(self: Any, model: str, **options: Any) -> None:
        settings = attached().settings
        history = getattr(settings.history, "file", None)
        strategy = repr(settings.candidates)
        passed.update(options, model=model, strategy=strategy, history=None if history is None else history.name)
        raise ValueError("stop here")

    monkeypatch.setattr(Serve, "__init__", start)
    assert "stop here" in run("serve", "org/target", "--revision", "v1", *options.split(), exit_code=2)
    assert attached() is None and strategy in passed["strategy"]
    defaults = {"model": "org/target@v1", "trust_remote_code": False, "port": 8000}
    defaults |= {"continuous_batching": False, "history": None}
    assert {**defaults, **expected}.items() <= passed.items()


def test_serve_help_lists_the_options_of_both() -> None:
    """Would catch: an error that points to a help without the options of `transformers serve`."""
    shown = run("serve", "--help")
    assert all(option in shown for option in ("--draft", "--revision", "--cb-num-blocks", "--default-seed"))


def test_train_help_says_that_it_needs_a_clone() -> None:
    """Would catch: a command that is listed for everyone, and fails where there is no clone."""
    assert "in a clone of the repository" in run("train", "--help")


def test_lm_eval_without_the_harness_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a traceback where another library is missing."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:  # where it is installed
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'lm-eval[hf]'" in run("lm-eval", "--tasks", "gsm8k", exit_code=2)
