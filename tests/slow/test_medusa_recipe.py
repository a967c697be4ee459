"""Training Medusa heads: the right labels, both stages, resuming, several processes, and what is saved."""

import copy
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import draft_loss
import medusa_loss
import train_medusa
from distillation import target_states
from hf_specgen import MedusaCandidates
from hf_specgen.heads import MedusaHeads, load_medusa
from hf_specgen.heads.lora import load_lora
from hf_specgen.targets.model_parts import decoder, output_logits
from medusa_lora import new_lora
from tests.helpers import VOCAB, tiny_model
from tests.helpers.medusa import random_heads
from tests.helpers.paths import ROOT
from tests.helpers.processes import run_in_ranks
from tests.helpers.recipes import LaunchedScript, arguments
from tests.helpers.reference import naive_medusa_loss

HEADS = ["--num-heads", "2"]


def states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return decoder(model)(ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("reads_path", [False, True])
def test_the_loss_is_the_naive_one(reads_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, over several chunks and answers of different lengths, one too short for any head."""
    monkeypatch.setattr(draft_loss, "CHUNK", 5)
    model = tiny_model("cohere2")  # its logits are scaled
    heads = random_heads(model, reads_token=True, reads_path=reads_path).train()
    hidden, tokens = torch.randn(14, 64), torch.randn(14, 3 if reads_path else 1, 64)
    rows = torch.tensor([0] * 7 + [1] + [2] * 6)
    outputs = [model.lm_head] * 3
    loss = medusa_loss.medusa_loss(model, heads, outputs, hidden, tokens, rows)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    expected = naive_medusa_loss(model, heads, hidden, tokens, rows.tolist(), draft_loss.DECAY)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_heads_learn_the_token_at_their_offset() -> None:
    """On a periodic text; would catch labels that are shifted by one.

    The random model is all but undecided at two of the six places, where the most likely token cannot be learnt.
    """
    model = tiny_model("llama")
    ids = torch.tensor([[5, 17, 40, 3, 77, 61] * 8])
    hidden = states(model, ids)[0, 12:]
    heads = MedusaHeads.from_target(model, num_heads=2)
    optimizer = torch.optim.Adam(heads.parameters(), lr=2e-2)
    rows = torch.zeros(len(hidden), dtype=torch.long)
    for _ in range(400):
        optimizer.zero_grad()
        medusa_loss.medusa_loss(model, heads, [model.lm_head] * 2, hidden, None, rows).backward()
        optimizer.step()
    said = output_logits(model, hidden).argmax(dim=-1)
    with torch.no_grad():
        predicted = model.lm_head(heads(hidden)).argmax(dim=-1)
    for head in range(2):
        assert (predicted[: -head - 1, head] == said[head + 1 :]).float().mean() > 0.6
        assert (predicted[:-3, head] == said[head + 2 : len(said) - 1 + head]).float().mean() < 0.5


def test_stage_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, measured, saved, loaded; the target is left alone."""
    monkeypatch.setattr("medusa_evaluation.NEW_TOKENS", 24)
    before = load_file(folder / "target" / "model.safetensors")
    evaluation = ["--evaluation", str(folder / "held-out.jsonl"), "--evaluation-per-domain", "1"]
    more = [*HEADS, "--num-layers", "2", "--reads-token", "true", "--lora-rank", "2", "--evaluate-every", "1"]
    train_medusa.main(arguments(folder, "medusa", *more, *evaluation))
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    heads = load_medusa(folder / "medusa", target)
    assert (heads.config.num_heads, heads.config.num_layers, heads.config.reads_token) == (2, 2, True)
    assert any(parameter.any() for parameter in heads.parameters())
    lora = load_lora(target.lm_head, 2, str(folder / "medusa"))
    assert any(parameter.any() for name, parameter in lora.named_parameters() if "lora_B" in name)
    after = load_file(folder / "target" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    card = (folder / "medusa" / "README.md").read_text()
    assert heads.config.acceptance is not None
    assert "| tokens per step | speedup |" in card and "custom_generate=" in card and "`adapter`" not in card
    assert "base_learning_rate" not in card and "top-1 accuracy of head 1" in card
    generate_twice(target, str(folder / "medusa"))


def generate_twice(target: Any, heads: str) -> None:
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    candidates = MedusaCandidates.from_pretrained(heads)
    ours = target.generate(ids, max_new_tokens=8, candidate_generator=candidates)
    assert torch.equal(ours, target.generate(ids, max_new_tokens=8))


def test_stage_two_makes_an_adapter_and_heads_that_belong_together(folder: Path) -> None:
    train_medusa.main(arguments(folder, "first", *HEADS))
    more = ["--stage", "2", "--heads", str(folder / "first"), "--base-learning-rate", "1e-2"]
    train_medusa.main(arguments(folder, "second", *HEADS, *more))
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    plain = copy.deepcopy(target)
    target.load_adapter(str(folder / "second" / "adapter"))
    ids = torch.arange(5, 15)[None]
    assert not torch.allclose(target(ids).logits, plain(ids).logits, atol=1e-4)
    first, second = load_medusa(folder / "first"), load_medusa(folder / "second", target)
    assert not torch.equal(first.blocks[0].layers[0].weight, second.blocks[0].layers[0].weight)  # type: ignore[union-attr, index]
    assert "the target is the adapted model" in (folder / "second" / "README.md").read_text()
    generate_twice(target, str(folder / "second"))


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1]])
def test_answers_too_short_for_some_heads(lengths: list[int]) -> None:
    """Every parameter still gets a gradient: zeros, without which several processes would wait for each other."""
    model = tiny_model("llama")
    heads = random_heads(model).train()
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    hidden = torch.randn(len(rows), 64)
    medusa_loss.medusa_loss(model, heads, [model.lm_head] * 3, hidden, None, rows).backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())


def test_no_more_than_a_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the backward pass: states and sums, nothing of `[positions, vocab]`."""
    monkeypatch.setattr(draft_loss, "CHUNK", 4)
    model = tiny_model("llama")
    heads = random_heads(model, own_outputs=True).train()
    hidden, rows = torch.randn(40, 64), torch.zeros(40, dtype=torch.long)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        medusa_loss.medusa_loss(model, heads, list(heads.lm_heads), hidden, None, rows).backward()
    vocabulary = [shape for shape in kept if VOCAB in shape]
    assert max(shape[0] for shape in vocabulary if shape[-1] == VOCAB and shape[0] != 64) <= 4
    assert sum(shape == (VOCAB, 64) for shape in vocabulary) <= 3 * 10 * 2 + 3  # matrices in use, one gradient a head


def train_sharded() -> tuple[int, bool]:
    """In a rank of its own: how many ranks share the heads, and whether every parameter of the whole ones was trained.

    Heads with LoRA matrices begin as zeros.
    """
    Accelerator()
    model = tiny_model("llama").requires_grad_(False)
    module = train_medusa.HeadsTraining(MedusaHeads.from_target(model, num_heads=2), new_lora(model.lm_head, 2, 4))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(3, 27).view(2, 12)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "predicts": torch.ones_like(ids).bool()}
    module(batch, [model], target_states(model, batch)[0]).backward()
    optimizer.step()
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() > 0:
        return dist.get_world_size(), True
    fresh = train_medusa.HeadsTraining(MedusaHeads.from_target(model, num_heads=2), new_lora(model.lm_head, 2, 4))
    fresh.load_state_dict(whole)
    return dist.get_world_size(), all(float(p.abs().sum()) > 0 for p in fresh.heads.parameters())


def test_sharded_heads_learn_and_come_back_whole() -> None:
    """Would catch: a head that is not reached through its module's forward pass, a parameter that is only a shard."""
    assert run_in_ranks(train_sharded, [()] * 2) == [(2, True)] * 2


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "configs" / "accelerate").glob("*.yaml")))
def test_accelerate_reads_the_shipped_launch_configs(path: Path) -> None:
    """As far as can be checked without GPUs: accelerate knows every key, and the kinds are what the names say."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert str(config.distributed_type) in {"FSDP", "DEEPSPEED", "DistributedType.FSDP", "DistributedType.DEEPSPEED"}
    assert config.mixed_precision == "bf16"


def test_accelerate_launch_trains_heads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a script that the launcher cannot start. Ranks of several processes are forked in other tests.

    The launcher runs in the test's process, and the command that it makes for the recipe in a forked one.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    monkeypatch.chdir(folder)
    processes = SimpleNamespace(Popen=LaunchedScript, CalledProcessError=CalledProcessError)
    monkeypatch.setattr("accelerate.commands.launch.subprocess", processes)
    settings = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    recipe = str(ROOT / "recipes" / "train_medusa.py")
    command = [*settings, "--dynamo_backend", "no", recipe, *arguments(folder, "launched", *HEADS)]
    launch_command(launch_command_parser().parse_args(command))  # raises for another exit code than 0
    assert (folder / "launched" / "model.safetensors").exists()
