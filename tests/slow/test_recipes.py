"""Every recipe: two steps on a tiny model, and what it saved loads again."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

import build_distillation_set
import pretrain_reference
import train_dflash
import train_draft
import train_eagle
import train_layer_skip
import train_medusa
from cards import write_card
from common import Options, parse_config
from corpus import LengthGroupedBatches, collate, encode_row
from distillation import draft_states, kl_sum, layer_outputs, target_states
from hf_specgen.heads import ExitHead, load_exit_head
from hf_specgen.targets.model_parts import decoder, output_logits
from tests.helpers import ARCHITECTURES, prompts, tiny_model
from tests.helpers.paths import ROOT
from tests.helpers.processes import printed_by, run_in_ranks
from tests.helpers.recipes import FAST, arguments, run_as_script, stop_at

CONFIGS = ROOT / "recipes" / "configs"


def test_a_draft_from_layers_is_trained_saved_and_measured(folder):
    """Catches: a draft that starts from random weights, one that does not load, a card without figures."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    fresh = train_draft.from_layers(target, [0, 3], {})
    assert torch.equal(fresh.model.layers[1].mlp.up_proj.weight, target.model.layers[3].mlp.up_proj.weight)
    assert torch.equal(fresh.model.embed_tokens.weight, target.model.embed_tokens.weight)
    evaluation = ["--evaluation", str(folder / "held-out.jsonl"), "--evaluation-per-domain", "1"]
    train_draft.main(arguments(folder, "draft", "--layers", "[0, 3]", *evaluation))
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    assert draft.config.num_hidden_layers == 2
    assert not torch.equal(draft.model.layers[1].mlp.up_proj.weight, target.model.layers[3].mlp.up_proj.weight)
    assert AutoTokenizer.from_pretrained(folder / "draft").get_vocab()
    card = ModelCard.load(folder / "draft" / "README.md")
    assert "| same top-1 token |" in card.text and card.data.library_name == "transformers"
    measured = {(found.dataset_config, found.metric_type): found.metric_value for found in card.data.eval_results}
    assert {metric for _, metric in measured} == {"same top-1 token", "accepted tokens per step, k=4"}
    assert all(f"{value:.1%}" in card.text for (_, metric), value in measured.items() if "top-1" in metric)


def test_streamed_data_and_the_way_to_the_hub(folder, monkeypatch):
    """Catches: data that must fit on the disk first, checkpoints in the upload."""
    calls = []

    class Hub:
        def create_repo(self, repository: str, exist_ok: bool) -> None:
            calls.append(repository)

        def upload_folder(self, repo_id: str, folder_path: str, ignore_patterns: list[str]) -> None:
            calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir()), ignore_patterns[0]))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    more = [
        "--layers",
        "[0]",
        "--streaming",
        "true",
        "--steps",
        "15",
        "--push-to-hub",
        "user/draft",
        "--save-every",
        "9",
    ]
    train_draft.main(arguments(folder, "streamed", *more))  # 15 steps of 4 rows: into the second epoch
    assert calls[0] == "user/draft" and calls[1][0] == "user/draft" and calls[1][2] == "checkpoint*"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(calls[1][1])
    assert 'DraftModelCandidates("user/draft"' in (folder / "streamed" / "README.md").read_text()


def test_a_lora_draft_is_merged_into_a_plain_model(folder):
    """Catches: adapter weights left in the file, or lost in the merge."""
    train_draft.main(arguments(folder, "lora", "--draft", str(folder / "target")))
    weights = load_file(folder / "lora" / "model.safetensors")
    before = load_file(folder / "target" / "model.safetensors")
    assert weights.keys() == before.keys()
    changed = {name for name in weights if not torch.equal(weights[name].float(), before[name].float())}
    assert changed and all("_proj" in name for name in changed)


def test_an_exit_adapter_leaves_its_target_alone(folder):
    """Catches: an adapter that changes the target, in training or in loading, or that loads without its training."""
    before = load_file(folder / "target" / "model.safetensors")
    train_layer_skip.main(arguments(folder, "exit", "--exit-layers", "[1, 2]", "--rank", "4"))
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    target.lm_head.weight.requires_grad_(True)
    head = load_exit_head(target, folder / "exit" / "layer-2")
    assert head.exit_layer == 2
    assert target.lm_head.weight.requires_grad and all(
        torch.equal(before[n], t) for n, t in target.state_dict().items() if n in before
    )
    hidden = torch.randn(2, 3, 32)
    assert head(hidden).shape == (2, 3, 8192)
    assert not torch.allclose(head(hidden), ExitHead.from_target(target)(hidden))
    assert head.head.base_layer.weight.data_ptr() == target.lm_head.weight.data_ptr()


def test_an_exit_adapter_of_another_model_gets_one_sentence(folder):
    """Catches: a shape error from deep inside, or garbage drafts."""
    train_layer_skip.main(arguments(folder, "exit-1", "--exit-layers", "[1]", "--rank", "2"))
    with pytest.raises(ValueError, match=r"hidden_size 32, but this target has 64"):
        load_exit_head(tiny_model("llama"), folder / "exit-1")
    with pytest.raises(FileNotFoundError, match=r"has no exit_config.json"):
        load_exit_head(tiny_model("llama"), folder / "target")
    (folder / "exit-1" / "adapter_model.safetensors").rename(folder / "exit-1" / "adapter_model.bin")
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model.safetensors"):
        load_exit_head(target, folder / "exit-1")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_pretraining_lowers_the_loss(folder, optimizer):
    """Catches: labels shifted by the wrong number, a parameter that no optimizer holds."""
    output, shape = folder / optimizer, "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}"
    paths = ["--tokenizer", str(folder / "target"), "--data", str(folder / "data.jsonl"), "--output", str(output)]
    stage = ["--shape", shape, "--optimizer", optimizer, "--warmup-steps", "1", "--learning-rate", "0.01"]
    pretrain_reference.main([*paths, *FAST, *stage, "--steps", "6", "--log-every", "1"])
    AutoModelForCausalLM.from_pretrained(output)
    last = float((output / "README.md").read_text().split("Final loss: ")[1].split()[0])
    assert last < 8.95  # ln 8192 = 9.01 before the first step


def test_the_distillation_set_is_the_targets_own_text_and_resumes(folder, monkeypatch):
    """Catches: answers that depend on where a run was interrupted, and prompts of the test set in the training set."""
    settings = ["--target", str(folder / "target"), "--prompts", str(folder / "data.jsonl"), "--max-new-tokens", "4"]
    settings += ["--batch-size", "4", "--exclude", str(folder / "held-out.jsonl"), "--per-domain", "{default: 5}"]
    whole, resumed = folder / "whole.jsonl.gz", folder / "resumed.jsonl.gz"
    build_distillation_set.main([*settings, "--output", str(whole)])
    rows = [json.loads(line) for line in gzip.decompress(whole.read_bytes()).decode().splitlines()]
    excluded = {json.loads(line)["prompt"] for line in (folder / "held-out.jsonl").open(encoding="utf-8")}
    assert len(rows) == 25 and not excluded & {row["prompt"] for row in rows}
    parts = Path(f"{resumed}.parts")
    answers = iter([rows[:4]])
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr("build_distillation_set.answer_batch", lambda *_: next(answers))
        build_distillation_set.main([*settings, "--output", str(resumed)])
    with (parts / "0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"batch": 1, "ro')  # interrupted in the second batch
    with pytest.raises(ValueError, match=r"interrupted run with seed 0 \(now 1\)"):
        build_distillation_set.main([*settings, "--output", str(resumed), "--seed", "1"])
    build_distillation_set.main([*settings, "--output", str(resumed)])
    assert resumed.read_bytes() == whole.read_bytes()


def test_two_processes_train_what_one_trains(folder):
    """Catches: answer tokens weighed by process, a batch seen twice, gradients added up instead of averaged.

    Tolerance: the order of a float32 sum, carried through two Adam steps of size 1e-3.
    """
    more = ["--layers", "0", "3"]
    calls = [(run_as_script, "train_draft.py", arguments(folder, "two", *more))] * 2
    assert "processes: 2" in run_in_ranks(printed_by, calls)[0]
    train_draft.main(arguments(folder, "one", *more))
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    start = train_draft.from_layers(AutoModelForCausalLM.from_pretrained(folder / "target"), [0, 3], {}).state_dict()
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 1e-3  # it did learn
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-4)


def test_a_run_resumes_at_its_step(folder, capsys):
    """Catches: data seen twice after a resume, a schedule or optimizer state that starts again."""
    more = ["--layers", "[0, 3]", "--steps", "4", "--save-every", "2"]  # 4 steps of 4 rows: into the second epoch at 8
    train_draft.main(arguments(folder, "whole", *more))
    AcceleratorState._reset_state(True)
    stopped = arguments(folder, "resumed", *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training._log", stop_at(3))
        with pytest.raises(KeyboardInterrupt):
            train_draft.main([*stopped, "--log-every", "1"])
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match=r"checkpoint of an earlier run.*--resume"):
        train_draft.main(stopped)
    train_draft.main([*stopped, "--resume", "true"])
    assert "from step 2" in capsys.readouterr().out
    whole, resumed = (load_file(folder / name / "model.safetensors") for name in ("whole", "resumed"))
    for name in whole:
        torch.testing.assert_close(whole[name], resumed[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "0", "--stesp", "3"], "unknown option --stesp"),
        (["--layers", "0", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--layers", "0", "--steps", "0"], "steps must be at least 1, got 0"),
        (["--layers", "0", "--precision", "int3"], "invalid choice: 'int3'"),
        (["--layers", "0", "--micro-batch-size", "3"], "batch_size 4 must be a multiple of micro_batch_size 3"),
        (["--config", str(CONFIGS / "exit_reference.yaml")], "unknown key 'exit_layers'"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
        ([], "give either `layers` of the target, or `draft`"),
        (["--layers", "0", "--draft", "folder"], "give either `layers` of the target, or `draft`"),
    ],
)
def test_bad_settings_get_one_sentence(folder, capsys, monkeypatch, more, message):
    """Catches: a mistyped key that is dropped silently, and an invalid value that is noticed after data were read."""
    monkeypatch.setattr("corpus.read_rows", lambda *_, **__: pytest.fail("data were read"))
    monkeypatch.setattr("distillation.load_target", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as ended:
        train_draft.main(arguments(folder, "bad", *more))
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_batch_that_cannot_be_divided_among_the_processes_is_refused_before_data_are_read(folder, monkeypatch):
    """Catches: an error after all rows were mapped."""
    monkeypatch.setattr("corpus.read_rows", lambda *_, **__: pytest.fail("data were read"))
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 3)
    with pytest.raises(ValueError, match="times the number of processes, 3"):
        train_draft.main(arguments(folder, "bad", "--layers", "0"))


def test_flags_override_the_file_and_lists_have_two_forms(tmp_path):
    file = tmp_path / "exits.yaml"
    required = "target: t\ndata: d\noutput: o\nsteps: 2\n"
    file.write_text(
        required + "exit_layers: [1, 2]\nlearning_rate: 1e-4\ngeneration: {default: {top_k: 0}}\nresume: true\n"
    )
    settings = parse_config(train_layer_skip.Settings, None, ["--config", str(file), "--steps", "3"])
    assert (settings.steps, settings.exit_layers, settings.learning_rate, settings.resume) == (3, [1, 2], 1e-4, True)
    assert settings.generation == {"default": {"top_k": 0}}
    for flags in (["--exit-layers", "[4, 5]"], ["--exit-layers", "4", "5"], ["--exit_layers", "4", "5"]):
        again = parse_config(train_layer_skip.Settings, None, ["--config", str(file), *flags, "--resume", "false"])
        assert again.exit_layers == [4, 5] and not again.resume
    required_flags = ["--target", "t", "--data", "d", "--output", "o", "--steps", "1", "--draft", "x"]
    shaped = parse_config(train_draft.Settings, None, [*required_flags, "--lora", "{r: 2}"])
    assert shaped.lora == {"r": 2} and isinstance(shaped.shape, Options)


def test_card_names_hub_models_only(tmp_path, folder):
    """Catches: a local path as base model, which the Hub refuses, and mappings that YAML cannot write."""
    settings = parse_config(train_draft.Settings, None, arguments(folder, "card", "--layers", "0"))
    text = {"summary": "S.", "usage": "pass", "measured": "M.", "losses": [(1, 2.0)], "recipe": "train_draft"}
    for target, base_model in ((str(folder / "target"), None), ("org/model", "org/model")):
        write_card(tmp_path, title="T", base_model=target, settings=settings, leave_out=("seed",), **text)
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.base_model == base_model and card.data.tags == ["speculative-decoding", "hf_specgen"]
        assert "Final loss: 2.0000" in card.text and "steps: 2" in card.text and "seed:" not in card.text


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_valid_and_name_files_that_exist(path):
    """Catches: a config that outlived a renamed key or a moved file."""
    recipes = {
        "distillation": build_distillation_set,
        "draft": train_draft,
        "exit": train_layer_skip,
        "medusa": train_medusa,
        "eagle": train_eagle,
        "dflash": train_dflash,
    }
    recipe: Any = recipes.get(path.stem.split("_")[0], pretrain_reference)
    settings = parse_config(recipe.Settings, None, ["--config", str(path)])
    for key in ("target", "tokenizer", "data", "prompts", "exclude", "evaluation", "draft"):
        if value := getattr(settings, key, None):
            assert (ROOT / value).exists(), f"{key}: {value}"


def test_answers_are_marked(tokenizer):
    """Catches: a loss on prompts, or on the position after the last token."""
    row = {"prompt": "hi", "response": "yes", "domain": ""}
    encoded = encode_row(tokenizer, row, 100)
    chat = [{"role": "user", "content": "hi"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encoded["input_ids"][: encoded["answer_start"]] == asked
    assert encoded["input_ids"][-1] == tokenizer.eos_token_id
    cut_off = encode_row(tokenizer, {**row, "finished": False}, 100)
    assert cut_off["input_ids"] == encoded["input_ids"][:-1]
    batch = collate([{"input_ids": [5, 6, 7, 8, 9], "answer_start": 3}, {"input_ids": [5, 6, 7], "answer_start": 2}])
    assert batch["predicts"].int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_an_epoch_shows_whole_steps_of_different_rows():
    """Catches: rows that are shown twice in an epoch, and the same order in every epoch."""
    order = LengthGroupedBatches(list(range(50)), batch_size=4, group=3, seed=0)
    first = list(order)
    order.epoch = 1
    assert len(first) == len(order) == 12 and len({index for batch in first for index in batch}) == 48
    assert first != list(order)


def test_kl_in_chunks_is_kl(reference_model, monkeypatch):
    """Catches: p and q exchanged, a chunk that is lost, a gradient that differs where chunks are recomputed."""
    monkeypatch.setattr("distillation.CHUNK", 3)
    p_hidden, q_hidden = torch.randn(7, 384), torch.randn(7, 384, requires_grad=True)
    head = reference_model.lm_head
    p, q = head(p_hidden).log_softmax(-1), head(q_hidden).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    (expected_gradient,) = torch.autograd.grad(expected, q_hidden, retain_graph=True)
    chunked = kl_sum(reference_model, p_hidden, q_hidden, head)
    (gradient,) = torch.autograd.grad(chunked, q_hidden)
    torch.testing.assert_close(chunked, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(kl_div(q, p, reduction="sum", log_target=True), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_attach_to(architecture):
    """Catches: a norm applied twice, a cap or scale of the logits forgotten, the wrong layer's state."""
    model = tiny_model(architecture)
    input_ids, layers = prompts(1)["input_ids"], model.config.get_text_config().num_hidden_layers
    with torch.no_grad(), layer_outputs(model, (1, layers)) as states:
        logits = model(input_ids=input_ids).logits
        last = decoder(model)(input_ids=input_ids).last_hidden_state
        torch.testing.assert_close(output_logits(model, last), logits)
        assert torch.equal(ExitHead.from_target(model, 1)(states[layers]).argmax(-1), logits.argmax(-1))
        assert not torch.equal(states[1], states[layers])


def test_the_shipped_draft_and_exit_adapter_agree_with_their_target(reference_model):
    """Catches: artefacts that do not load, were saved before training, or belong to another target.

    The floors lie well below the cards' figures for edit and json (88% and 98% or more, both).
    """
    assets = ROOT / "benchmarks" / "assets"
    tokenizer = AutoTokenizer.from_pretrained(assets / "draft-lm")
    draft = AutoModelForCausalLM.from_pretrained(assets / "draft-lm", dtype=torch.float32).eval()
    head = load_exit_head(reference_model, assets / "exit-adapter")
    rows = [json.loads(line) for line in (assets / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["domain"] in ("edit", "json") and len(row["response"]) < 300][::20]
    batch = collate([encode_row(tokenizer, row, 400) for row in rows])
    predictors = {
        "draft": lambda: output_logits(draft, draft_states(draft, batch)),
        "exit": lambda: head(target_states(reference_model, batch, (head.exit_layer,))[1][head.exit_layer]),
    }
    with torch.no_grad():
        truth = output_logits(reference_model, target_states(reference_model, batch)[0]).argmax(-1)
        shares = {name: float((predict().argmax(-1) == truth).float().mean()) for name, predict in predictors.items()}
    assert shares["draft"] > 0.8 and shares["exit"] > 0.8, shares
