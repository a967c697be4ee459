"""Every recipe on tiny models: what it saved drafts, runs resume, and mistakes are noticed before training."""

import gzip
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

import generate_answers
import train_dflash
import train_draft
import train_dspark
import train_eagle
import train_layer_skip
import train_medusa
import training
from hf_specgen import AutoCandidates
from hf_specgen.cli.generate import read_answers
from hf_specgen.heads import ExitHead, load_exit_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets.model_parts import decoder, output_logits
from target import read_target
from tests.helpers import ARCHITECTURES, prompts, tiny_model
from tests.helpers.paths import ROOT
from tests.helpers.processes import run_in_ranks
from tests.helpers.recipes import FAST, VOCABULARY, arguments, losses, run_sharded, save_tiny

SAVES = ["--save-strategy", "steps"]
HEAD = ["--depth", "3", "--anchors", "8"]
AUX = ["--aux-hidden-state-layers"]
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TARGETS: dict[str, dict[str, Any]] = {
    "gpt2": SIZES,
    "gpt_neox": SIZES | {"intermediate_size": 64},
    "gemma3_text": SIZES | WIDE,
    "qwen3_moe": SIZES | WIDE | MIXTURE,
}


def assert_drafts(target: Any, folder: Path) -> Any:
    """The saved drafter drafts, and the tokens are those of plain `generate`; returns the generator."""
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    candidates = AutoCandidates.from_pretrained(folder)
    ours = target.generate(ids, max_new_tokens=8, do_sample=False, candidate_generator=candidates)
    assert torch.equal(ours, target.generate(ids, max_new_tokens=8, do_sample=False))
    return candidates


RECIPES: dict[str, tuple[Any, list[str]]] = {
    "medusa": (train_medusa, ["--num-heads", "2"]),
    "eagle": (train_eagle, HEAD),
    "dflash": (train_dflash, HEAD),
    "dspark": (train_dspark, [*HEAD, "--markov-rank", "8"]),
    "draft": (train_draft, ["--layers", "0", "3"]),
    "layer_skip": (train_layer_skip, ["--exit-layer", "2", "--rank", "2"]),
}
FOR_TARGET = {
    "gpt2": ["--loss", "{lk: 1, confidence: 1}"],
    "gpt_neox": ["--streaming", "true"],
    "gemma3_text": ["--evaluation-tokens", "6"],
    "qwen3_moe": ["--packing", "true"],
}
VARIANTS = {
    ("gpt2", "eagle"): ["--draft-vocab-size", "600"],
    ("gpt2", "draft"): ["--gradient-checkpointing", "true"],
    ("gpt_neox", "dflash"): ["--layers", "2", "3"],
    ("gpt_neox", "medusa"): ["--num-layers", "2", "--reads-path", "true", "--lora-rank", "2"],
    ("gemma3_text", "eagle"): ["--parallel", "true", *AUX, "1", "3", "--fc-norm", "true"],
    ("qwen3_moe", "dflash"): ["--causal", "true"],
}


PAIRS = {
    "gpt2": ["eagle", "draft", "dspark"],
    "gpt_neox": ["dflash", "medusa"],
    "gemma3_text": [name for name in RECIPES if name != "dflash"],
    "qwen3_moe": ["dflash", "layer_skip"],
}
"""Each drafter for two targets or more, each target's setting for different drafters."""


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("architecture", "name"), [(target, name) for target in PAIRS for name in PAIRS[target]])
def test_any_target_gets_any_drafter(folder: Path, tmp_path: Path, architecture: str, name: str) -> None:
    """Five steps on conversations of three turns; one target with an evaluation, whose prompts have no domain."""
    target, (recipe, more) = tmp_path / "target", RECIPES[name]
    save_tiny(CONFIG_MAPPING[architecture](**TARGETS[architecture]), target)
    given = ["--data", str(folder / "messages.jsonl"), "--output", str(tmp_path / "out")]
    if architecture == "gemma3_text":
        given += ["--evaluation", str(folder / "questions.jsonl")]
    more = [*more, "--steps", "5", "--batch-size", "2", *FOR_TARGET[architecture]]
    more += VARIANTS.get((architecture, name), [])
    before = load_file(target / "model.safetensors")
    recipe.main(["--target", str(target), *FAST, *given, *more])
    after = load_file(target / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before), "the target was changed"
    assert_drafts(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "Loss at the end: 0." in card.text and ("1 of 1" in card.text) == (architecture == "gemma3_text")
    assert str(tmp_path) not in card.content and not (tmp_path / "out" / "custom_generate").exists()


class Interrupted(training.DrafterTrainer):
    """Ends a run in the step after the last checkpoint, like a killed process."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 13:
            raise KeyboardInterrupt
        return super().training_step(*args, **kwargs)


def test_interrupted_run_resumes_with_the_losses_of_an_uninterrupted_one(folder: Path, monkeypatch: Any) -> None:
    """20 steps over several epochs with random anchors, stopped after 12; catches data or noise that are seen twice."""
    more = [*HEAD, *SAVES, "--steps", "20", "--save-steps", "4", "--evaluation", str(folder / "held-out.jsonl")]
    more += ["--eval-strategy", "steps", "--eval-steps", "8", "--evaluation-tokens", "4"]
    train_eagle.main(arguments(folder, "whole", *more))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "DrafterTrainer", Interrupted)
        train_eagle.main(arguments(folder, "resumed", *more))
    with pytest.raises(ValueError, match=r"holds an earlier run: continue it with --resume true"):
        train_eagle.main(arguments(folder, "resumed", *more))
    with pytest.raises(ValueError, match=r"has a run with depth 3 \(now 2\).*resume it with the same settings"):
        train_eagle.main(arguments(folder, "resumed", *more, "--depth", "2", "--resume", "true"))
    train_eagle.main(arguments(folder, "resumed", *more, "--resume", "true"))
    assert losses(folder / "resumed") == pytest.approx(losses(folder / "whole"), rel=1e-5)
    assert len(losses(folder / "whole")) == 20
    one, two = (load_file(folder / name / "model.safetensors") for name in ("whole", "resumed"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name])
    with pytest.raises(ValueError, match=r"holds an earlier run: .* replace it with --overwrite true"):
        train_eagle.main(arguments(folder, "whole", *more))


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (train_eagle, HEAD),
        (train_medusa, ["--num-heads", "2", "--reads-path", "true"]),
        (train_layer_skip, ["--exit-layer", "1"]),
        (train_draft, ["--layers", "0", "3"]),
    ],
)
def test_states_on_disk_give_the_same_losses_without_the_target(
    folder: Path, tmp_path: Path, monkeypatch: Any, recipe: Any, more: list[str]
) -> None:
    """Would catch: states of other rows read from the disk, or the target loaded beside them."""
    held_out = ["--evaluation", str(folder / "held-out.jsonl"), "--eval-strategy", "steps", "--evaluation-tokens", "4"]
    more = [*more, *SAVES, "--save-steps", "2", *held_out, "--eval-steps", "2"]
    without, features = str(tmp_path / "without"), ["--features", str(tmp_path / "states")]
    recipe.main(arguments(folder, without, *more))
    recipe.main(arguments(folder, str(tmp_path / "computed"), *more, *features))
    loaded, finish = training.load_target, training.finish

    def finished(*given: Any) -> None:
        """The target may be loaded in the end only, to measure the result."""
        monkeypatch.setattr(training, "load_target", loaded)
        finish(*given)

    monkeypatch.setattr(training, "load_target", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr(training, "finish", finished)
    recipe.main(arguments(folder, str(tmp_path / "read"), *more, *features))
    for name in ("computed", "read"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "without"), rel=1e-4)
    with pytest.raises(ValueError, match=r"has the states of another run: .*tokens.*give another folder"):
        recipe.main(arguments(folder, str(tmp_path / "other"), *more, *features, "--max-length", "20"))


def test_interrupted_states_of_a_target_that_is_loaded_otherwise_are_refused(folder: Path, tmp_path: Path) -> None:
    """Would catch: states of two targets in one folder, of which the second was loaded with rounded weights."""
    index = tmp_path / "states" / "train" / "index.json"
    more = ["--features", str(tmp_path / "states")]
    train_eagle.main(arguments(folder, str(tmp_path / "first"), *HEAD, *more))
    index.write_text(json.dumps({**json.loads(index.read_text()), "complete": False}) + "\n")
    train_eagle.main(arguments(folder, str(tmp_path / "same"), *HEAD, *more))
    index.write_text(json.dumps({**json.loads(index.read_text()), "complete": False}) + "\n")
    with pytest.raises(ValueError, match=r"has states of the target with other weights.*give another folder"):
        other = arguments(folder, str(tmp_path / "other"), *HEAD, *more)
        train_eagle.main([*other, "--target-kwargs", "{dtype: bfloat16}"])


def test_stored_states_and_resumed_runs_of_an_overwritten_target_are_refused(folder: Path, tmp_path: Path) -> None:
    """Would catch: a drafter trained on the states of earlier weights, or on those of two targets in turn."""
    target = shutil.copytree(folder / "target", tmp_path / "target")
    stored = ["--target", str(target), "--features", str(tmp_path / "states")]
    resumed = ["--target", str(target), *SAVES, "--save-steps", "1"]
    train_eagle.main(arguments(folder, str(tmp_path / "first"), *HEAD, *stored))
    train_eagle.main(arguments(folder, str(tmp_path / "run"), *HEAD, *resumed))
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(target)
    with pytest.raises(ValueError, match=r"has the states of another run: target_weights .*give another folder"):
        train_eagle.main(arguments(folder, str(tmp_path / "other"), *HEAD, *stored))
    with pytest.raises(ValueError, match=r"has a run with target_weights .*give another --output"):
        train_eagle.main(arguments(folder, str(tmp_path / "run"), *HEAD, *resumed, "--resume", "true"))


@pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")  # of DeepSpeed
@pytest.mark.parametrize("config", [None, "fsdp.yaml", "zero3.yaml"])
def test_two_processes_train_what_one_trains(folder: Path, tmp_path: Path, config: str | None) -> None:
    """Drafter replicated, or sharded by FSDP2 or ZeRO-3 as in the shipped config; the target is sharded by FSDP2.

    Catches: answer tokens weighed by process, a batch seen twice, anchors that depend on the process; a drafter that is
    not reached through its module's forward pass; weights of one shard in the result.
    """
    if config == "zero3.yaml":
        pytest.importorskip("deepspeed", reason="pip install deepspeed")
    more = [*HEAD, *SAVES, "--steps", "4", "--save-steps", "4"]
    train_eagle.main(arguments(folder, str(tmp_path / "one"), *more))
    two = arguments(folder, str(tmp_path / "two"), *more, "--shard-target", "true")
    run_in_ranks(run_sharded, [("train_eagle.py", two, config)] * 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, sharded = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(sharded[name], tensor, atol=1e-3, rtol=1e-2)  # bfloat16


def test_a_lora_draft_is_merged_or_saved_as_an_adapter(folder: Path) -> None:
    """Catches: adapter weights left in the file, or lost in the merge; an adapter that does not load."""
    given = ["--draft", str(folder / "target"), "--lora", "{r: 2}", "--learning-rate", "0.01"]
    train_draft.main(arguments(folder, "lora", *given))
    weights, before = (load_file(folder / name / "model.safetensors") for name in ("lora", "target"))
    changed = {name for name in weights if not torch.equal(weights[name].float(), before[name].float())}
    assert weights.keys() == before.keys() and changed and all("_proj" in name for name in changed)
    train_draft.main(arguments(folder, "adapter", *given, "--merge", "false"))
    adapted: Any = AutoModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float32)
    assert type(AutoCandidates.from_pretrained(folder / "adapter")).__name__ == "DraftModelCandidates"
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "lora", dtype=torch.float32)
    ids = torch.arange(5, 15)[None]
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_exit_adapter_is_trained_and_fits_no_other_target(folder: Path) -> None:
    """Catches: a shape error from deep inside, or garbage drafts."""
    train_layer_skip.main(arguments(folder, "exit", "--exit-layer", "2", "--rank", "4"))
    target: Any = AutoModelForCausalLM.from_pretrained(folder / "target")
    head, hidden = load_exit_head(target, folder / "exit"), torch.randn(2, 3, 32)
    assert head.exit_layer == 2 and not torch.allclose(head(hidden), ExitHead.from_target(target)(hidden))
    with pytest.raises(ValueError, match=r"hidden_size 32, but this target has 64"):
        load_exit_head(tiny_model("llama"), folder / "exit")
    with pytest.raises(FileNotFoundError, match=r"has no exit_config.json"):
        load_exit_head(tiny_model("llama"), folder / "target")


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        (train_eagle, ["--target", "/there/is/none"], r"there is no folder '/there/is/none'"),
        (train_eagle, ["--layers", "9"], r"layers must be from 0 to 3, got \[9\]"),
        (train_eagle, [*AUX, "7"], r"aux_hidden_state_layers must be from 0 to 4, got \[7\]"),
        (train_draft, ["--draft", "/there/is/none"], r"there is no folder '/there/is/none'"),
        (train_draft, ["--layers", "4"], r"layers must be indices of the target's layers, 0 to 3"),
        (train_layer_skip, ["--exit-layer", "4"], r"exit_layer must be between 1 and 3"),
        (train_layer_skip, ["--exit-layer", "2", "--report-to", "tensorboard"], r"report_to=tensorboard: .*installed"),
        (train_layer_skip, ["--exit-layer", "2", "--report-to", "tensorbord"], r"tensorbord is not supported, only"),
        (train_medusa, ["--streaming", "true", "--steps", "-1"], r"streaming needs max_steps"),
    ],
)
def test_what_cannot_work_is_refused_before_data_are_encoded(
    folder: Path, monkeypatch: Any, recipe: Any, more: list[str], message: str
) -> None:
    """Would catch: an error of a setting after hours in which data were encoded."""
    monkeypatch.setattr("training.encoded", lambda *_: pytest.fail("data were read"))
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: False)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        recipe.main(arguments(folder, "refused", *more))


def test_rows_without_known_columns_are_refused_before_the_target_is_loaded(folder: Path, monkeypatch: Any) -> None:
    """Would catch: a target of gigabytes loaded before the first row was looked at."""
    (folder / "other.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    monkeypatch.setattr(training, "load_target", lambda *_: pytest.fail("the target was loaded"))
    for given in (["--data", str(folder / "other.jsonl")], ["--evaluation", str(folder / "other.jsonl")]):
        with pytest.raises(ValueError, match="have the columns question, answer, but training needs `messages`"):
            train_eagle.main(arguments(folder, "columns", *given))


def test_the_hub_is_asked_before_training_and_gets_the_result(folder: Path, monkeypatch: Any) -> None:
    """Would catch: a training of days whose result cannot be uploaded, or an upload of its checkpoints."""
    calls: list[Any] = []

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            pass

        def create_repo(self, repository: str, **_: Any) -> None:
            calls.append(repository)
            if repository == "other/head":
                raise OSError("403 Forbidden")

        def upload_folder(self, repo_id: str, folder_path: Path, ignore_patterns: list[str]) -> None:
            calls.append((repo_id, {path.name for path in folder_path.iterdir()}, ignore_patterns[0]))

    monkeypatch.setattr(training, "HfApi", Hub)
    hub = ["--push-to-hub", "true", "--hub-model-id"]
    with pytest.raises(OSError, match="403 Forbidden"):
        train_draft.main(arguments(folder, "pushed", "--layers", "0", *hub, "other/head"))
    train_draft.main(arguments(folder, "pushed", "--layers", "0", *hub, "user/draft"))
    assert calls[:2] == ["other/head", "user/draft"] and calls[2][0] == "user/draft" and calls[2][2] == "checkpoint*"
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training.json", "custom_generate"}
    assert names <= calls[2][1] and "user/draft" in (folder / "pushed" / "custom_generate" / "generate.py").read_text()
    assert 'AutoCandidates.from_pretrained("user/draft")' in (folder / "pushed" / "README.md").read_text()


def test_dry_run_and_simulation_print_what_to_expect(folder: Path, capsys: Any) -> None:
    """Would catch: a dry run that trains, or a simulation without the figures that it is made for."""
    held_out = ["--evaluation", str(folder / "held-out.jsonl"), "--evaluation-tokens", "6"]
    train_eagle.main(arguments(folder, "dry", *HEAD, "--steps", "100", "--dry-run", "true"))
    printed = capsys.readouterr().out
    assert "steps: 100 of 4 rows" in printed and "tokens per second" in printed and "GiB per process" in printed
    assert not (folder / "dry" / "config.json").exists()
    AcceleratorState._reset_state(True)
    train_eagle.main(arguments(folder, "dry", *HEAD, *held_out, "--simulate", "true"))
    assert "eval_tokens_per_step" in (printed := capsys.readouterr().out) and "eval_acceptance_3" in printed


def test_answers_are_the_targets_own_and_resume(folder: Path, monkeypatch: Any) -> None:
    """Catches: answers that depend on where a run was interrupted, and prompts of the test set in the training set."""
    settings = ["--target", str(folder / "target"), "--prompts", str(folder / "data.jsonl"), "--max-new-tokens", "4"]
    settings += ["--batch-size", "1", "--exclude", str(folder / "held-out.jsonl"), "--per-domain", "{default: 5}"]
    whole, resumed = folder / "whole.jsonl.gz", folder / "resumed.jsonl.gz"
    generate_answers.main([*settings, "--output", str(whole)])
    rows = [json.loads(line) for line in gzip.decompress(whole.read_bytes()).decode().splitlines()]
    excluded = {json.loads(line)["prompt"] for line in (folder / "held-out.jsonl").open(encoding="utf-8")}
    assert 20 <= len(rows) <= 25 and not excluded & {row["prompt"] for row in rows}
    with pytest.raises(FileExistsError, match=r"whole\.jsonl\.gz exists already; delete it"):
        generate_answers.main([*settings, "--output", str(whole)])
    answer_rows = generate_answers.answer_rows
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate_answers, "answer_rows", lambda *given, **more: interrupted(answer_rows(*given, **more)))
        generate_answers.main([*settings, "--output", str(resumed)])
    (parts,) = folder.glob("resumed*.parts")
    with (parts / "process-0.jsonl").open("a", encoding="utf-8") as file:
        file.write('[9, {"pro')  # interrupted in the eighth answer
    kept = read_answers(parts)
    generate_answers.main([*settings, "--output", str(resumed)])
    assert len(kept) == 7 and all(row in rows for row in kept.values())
    assert resumed.read_bytes() == whole.read_bytes()


def interrupted(answers: Any) -> Any:
    yield from itertools.islice(answers, 7)
    raise KeyboardInterrupt


def test_a_server_answers_conversations(folder: Path, monkeypatch: Any) -> None:
    """Would catch: settings of a call that do not reach the server, or answers without their reasoning."""
    asked: list[dict[str, Any]] = []

    class Client:
        def __init__(self, base_url: str):
            assert base_url == "http://localhost:8000/v1"

        def chat_completion(self, messages: Any, **settings: Any) -> Any:
            asked.append(settings)
            message = SimpleNamespace(content="yes", reasoning="think")
            return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="length")])

    monkeypatch.setattr(generate_answers, "InferenceClient", Client)
    settings = ["--target", "name", "--prompts", f"{folder}/messages.jsonl", "--output", f"{folder}/served.jsonl"]
    more = ["--server", "http://localhost:8000/v1", "--chat-template-kwargs", "{enable_thinking: true}"]
    generate_answers.main([*settings, *more, "--generation", "{default: {do_sample: false}}"])
    rows = [json.loads(line) for line in (folder / "served.jsonl").read_text().splitlines()]
    assert rows[0]["messages"][-1]["content"] == "<think>\nthink\n</think>\n\nyes" and rows[0]["finished"] is False
    assert asked[0]["temperature"] == 0
    assert asked[0]["extra_body"] == {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_attach_to(architecture: str) -> None:
    """Catches: a norm applied twice, a cap or scale of the logits forgotten, the wrong layer's state."""
    model = tiny_model(architecture)
    input_ids, layers = prompts(1)["input_ids"], model.config.get_text_config().num_hidden_layers
    batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids}
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits
        last = decoder(model)(input_ids=input_ids).last_hidden_state
        early = read_target(model, batch, (1, layers)).features.chunk(2, dim=-1)
        torch.testing.assert_close(output_logits(model, last), logits)
        torch.testing.assert_close(early[1], last)
        assert not torch.equal(early[0], early[1])


def test_a_lora_head_is_saved_and_loaded_as_an_adapter(folder: Path, caplog: Any) -> None:
    """Catches: an adapter that is not applied; a head in another thinking mode without a word."""
    train_eagle.main(arguments(folder, "base-head", *HEAD))
    mode = ["--chat-template-kwargs", "{enable_thinking: false}"]
    more = ["--head", str(folder / "base-head"), "--lora", "{r: 2}", "--learning-rate", "0.05", *mode]
    train_eagle.main(arguments(folder, "lora-head", *HEAD, *more))
    assert {"adapter_config.json"} == {path.name for path in (folder / "lora-head").glob("*config.json")}
    base, adapted = load_head(folder / "base-head"), load_head(folder / "lora-head")
    assert base.state_dict().keys() == adapted.state_dict().keys()
    assert not torch.equal(base.fc.weight, adapted.fc.weight)  # type: ignore[union-attr, arg-type]
    target: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    assert_drafts(target, folder / "lora-head")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    AutoCandidates.from_pretrained(folder / "lora-head", tokenizer=tokenizer)
    assert "trained with chat_template_kwargs {'enable_thinking': False}, not {}" in caplog.text
    caplog.clear()
    same = {"tokenizer": tokenizer, "chat_template_kwargs": {"enable_thinking": False}}
    AutoCandidates.from_pretrained(folder / "lora-head", **same)
    assert not caplog.text


FEWER = {"[:34]": "[:10]", '"48"': '"16"', '"20"': '"5"', '"192"': '"128"', '"32"': '"8"'}


def test_the_notebook_trains_a_head_that_drafts(capsys: Any, monkeypatch: Any) -> None:
    """Every cell, one after the other, with fewer answers and steps; catches: a notebook that outlived an argument."""
    notebook = json.loads((ROOT / "docs" / "train_a_head.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(ROOT / "docs")
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for given, fewer in FEWER.items():
                source = source.replace(given, fewer)
            exec(source, names)
    assert float(capsys.readouterr().out.split("tokens per step: ")[-1]) > 1.2
