"""Medusa heads on disk: the format of this package, Medusa v1 and v2, TGI, vLLM; and files that are none of these."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from card import write_custom_generate
from hf_specgen import EagleCandidates, FixedDepth, LayerSkipCandidates, MedusaCandidates
from hf_specgen.candidates.auto import chat_template_hash
from hf_specgen.heads import MedusaConfig, MedusaHeads, export_head, load_head, save_head
from hf_specgen.heads.head_text import StateText
from hf_specgen.heads.medusa import MedusaDrafter
from tests.helpers import VOCAB, assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.calls import frontier_of
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.medusa import random_heads
from tests.helpers.models import small_llama

HYDRA = {"reads_path": True}
TGI = "medusa_lm_head.safetensors"
Tensors = dict[str, torch.Tensor]


def have_equal_weights(a: Any, b: Any) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def logits_of(heads: Any, model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, vocab]` logits of loaded heads on a target."""
    text = StateText(hidden, [0] * len(hidden), range(len(hidden)))
    return MedusaDrafter(heads.bind(model), None, model).forward_depths(text, heads.config.num_heads).logits[:, :, 0]


def states_of(heads: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, hidden]` hidden states of heads that read no tokens."""
    return torch.stack([heads.head_state(head, hidden) for head in range(heads.config.num_heads)], dim=1)


EXPORTS = [case for case in product(["medusa", "tgi", "vllm"], [False, True], [1, 2]) if case != ("tgi", False, 2)]


@pytest.mark.parametrize(("to", "own", "num_layers"), EXPORTS)
def test_export_round_trip_keeps_every_tensor(to: str, own: bool, num_layers: int, tmp_path: Path) -> None:
    """Biases included."""
    model = tiny_model("llama")
    heads = random_heads(model, own_outputs=own, num_layers=num_layers)
    files = export_head(heads, tmp_path, to, model)
    assert all(file.exists() for file in files)
    loaded: Any = load_head(tmp_path)
    assert have_equal_weights(heads, loaded)
    assert (loaded.config.num_heads, loaded.config.num_layers, loaded.config.own_outputs) == (3, num_layers, own)


def test_export_writes_the_names_that_other_programs_read(tmp_path: Path) -> None:
    """Would catch: a checkpoint that loads here, and nowhere else."""
    model = tiny_model("llama")
    shared, own = random_heads(model, num_heads=1), random_heads(model, num_heads=1, own_outputs=True)
    export_head(shared, tmp_path / "v2", "medusa")
    export_head(own, tmp_path / "v1", "medusa")
    export_head(shared, tmp_path / "vllm", "vllm", model)
    layer = {"0.0.linear.weight", "0.0.linear.bias"}
    assert load_file(tmp_path / "v2" / TGI).keys() == layer
    assert torch.load(tmp_path / "v1" / "medusa_lm_head.pt", weights_only=True).keys() == layer | {"0.1.weight"}
    vllm = load_file(tmp_path / "vllm" / "model.safetensors")
    assert vllm.keys() == {"blocks.0.layers.0.weight", "blocks.0.layers.0.bias", "lm_head.weight"}
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["original_lm_head"] and config["medusa_fc_bias"] and config["architectures"] == ["MedusaModel"]
    assert "architectures" not in json.loads((tmp_path / "v2" / "config.json").read_text())


LAYOUTS = ["rows of the map", "whole matrices", "one matrix", "prefix", "own format", "exported"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_vocabulary_scores_the_tokens_of_its_map(layout: str, tmp_path: Path) -> None:
    """Would catch: rows of a truncated output matrix taken for the first tokens of the vocabulary."""
    model, folder = tiny_model("llama"), tmp_path / "vllm"
    heads = random_heads(model, own_outputs=True)
    export_head(heads, folder, "vllm")
    edit_config(folder, truncated_vocab_size=20, logit_scale=0.5)
    tensors = load_file(folder / "model.safetensors")
    kept = torch.randperm(VOCAB)[:20]
    matrices = [tensors[f"lm_heads.{head}.weight"] for head in range(3)]
    if layout == "one matrix":
        matrices = matrices[:1] * 3
        tensors = {n: tensor for n, tensor in tensors.items() if not n.startswith(("lm_heads.1", "lm_heads.2"))}
    if layout != "whole matrices":
        tensors |= {name: tensor[kept].clone() for name, tensor in tensors.items() if name.startswith("lm_heads.")}
    if layout == "prefix":
        tensors = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors | {"token_map": kept}, folder / "model.safetensors")
    loaded = load_head(folder)
    if layout in ("own format", "exported"):
        (save_head if layout == "own format" else lambda *args: export_head(*args, "vllm"))(loaded, tmp_path / "again")
        loaded = load_head(tmp_path / "again")
    hidden = torch.randn(2, loaded.config.hidden_size)
    logits, states = logits_of(loaded, model, hidden), states_of(heads, hidden)
    expected = torch.stack([states[:, head] @ matrix[kept].T for head, matrix in enumerate(matrices)], dim=1)
    torch.testing.assert_close(logits[..., kept], 0.5 * expected)
    assert (logits > -torch.inf).sum(dim=-1).eq(20).all()
    assert_same_tokens(model, prompts(2), MedusaCandidates(loaded, tree=8), max_new_tokens=6)


@pytest.mark.parametrize(("shape", "to"), [({}, "vllm"), ({}, ""), ({"lora_rank": 2}, ""), ({"own_outputs": True}, "")])
def test_logit_scale_of_the_config_multiplies_all_logits(shape: Any, to: str, tmp_path: Path) -> None:
    """Would catch: a factor that is read, and applied only to output matrices of the heads' own."""
    model = tiny_model("llama")
    heads = random_heads(model, **shape)
    export_head(heads, tmp_path, to, model) if to else save_head(heads, tmp_path)
    edit_config(tmp_path, logit_scale=0.25)
    hidden = torch.randn(2, heads.config.hidden_size)
    torch.testing.assert_close(
        logits_of(load_head(tmp_path), model, hidden), 0.25 * logits_of(heads, model, hidden), atol=1e-5, rtol=1e-5
    )


def test_heads_are_counted_in_the_tensors_and_truncation_needs_a_map(tmp_path: Path) -> None:
    """Would catch: trust in the config (a published set says 2 and contains 5)."""
    heads = random_heads(tiny_model("llama"), num_heads=5, own_outputs=True)
    export_head(heads, tmp_path / "v1", "medusa")
    edit_config(tmp_path / "v1", medusa_num_heads=2)
    assert load_head(tmp_path / "v1").config.num_heads == 5  # type: ignore[attr-defined]
    export_head(heads, tmp_path / "vllm", "vllm")
    edit_config(tmp_path / "vllm", truncated_vocab_size=20)
    with pytest.raises(ValueError, match="truncated_vocab_size is 20, but token_map has 0"):
        load_head(tmp_path / "vllm")


def test_heads_without_biases_or_config_load(tmp_path: Path) -> None:
    """vLLM's `medusa_fc_bias=False`; v1 heads are often published without a config."""
    model = tiny_model("llama")
    heads = random_heads(model)
    export_head(heads, tmp_path / "vllm", "vllm", model)
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith("bias")}, tmp_path / "vllm" / "model.safetensors")
    loaded: Any = load_head(tmp_path / "vllm")
    assert not any(loaded.state_dict()[name].any() for name in loaded.state_dict() if name.endswith("bias"))
    assert torch.equal(loaded.blocks[0].layers[0].weight, heads.blocks[0].layers[0].weight)  # type: ignore[union-attr, index]
    export_head(heads, tmp_path / "v2", "medusa")
    (tmp_path / "v2" / "config.json").unlink()
    loaded = load_head(tmp_path / "v2")
    assert have_equal_weights(heads, loaded) and loaded.bind(model).aux_hidden_state_layers == (-1,)


def test_chat_templates_are_told_apart_by_their_hash() -> None:
    """Would catch: several named templates taken for none, or for the same one."""

    class Tokenizer:
        chat_template: Any = "{{ messages }}"

    named = Tokenizer()
    named.chat_template = {"default": "a", "tools": "b"}
    assert chat_template_hash(Tokenizer()) not in (None, chat_template_hash(named))


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "by folder"])
@pytest.mark.parametrize(
    ("architecture", "overrides", "difference"),
    [
        ("qwen2", {}, "architecture llama"),
        ("llama", {"hidden_size": 32}, "hidden size of 64"),
        ("llama", {"vocab_size": 120}, "vocabulary of 99"),
        ("llama", {"num_hidden_layers": 1}, "number of layers: 2"),
    ],
    ids=["architecture", "hidden size", "vocabulary", "layers"],
)
def test_medusa_heads_of_another_target_raise(
    architecture: str, overrides: dict[str, int], difference: str, loaded: bool, tmp_path: Path
) -> None:
    """Would catch: an error of shapes in the first draft, or heads of another model that are never right."""
    heads = random_heads(tiny_model("llama"))
    save_head(heads, tmp_path)
    candidates = MedusaCandidates(heads if loaded else str(tmp_path))
    with pytest.raises(ValueError, match=difference):
        tiny_model(architecture, **overrides).generate(**prompts(1), candidate_generator=candidates)


def peft_heads(folder: Path) -> tuple[Any, Any, Any]:
    """A target, heads with PEFT's adapter on its output matrix in the folder `lora`, and that adapter loaded."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    matrices = torch.nn.ModuleDict({"heads": torch.nn.ModuleList(torch.nn.Linear(64, VOCAB) for _ in range(3))})
    for matrix in matrices["heads"]:  # type: ignore[union-attr]
        matrix.weight, matrix.bias = model.lm_head.weight, None
    lora: Any = get_peft_model(matrices, LoraConfig(r=4, lora_alpha=8, target_modules=r"heads\.\d+"))  # type: ignore[arg-type]
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    save_head(random_heads(model), folder)
    edit_config(folder, lora_rank=4)
    lora.save_pretrained(folder / "lora")
    model.requires_grad_()
    return model, load_head(folder), lora


def test_low_rank_matrices_agree_with_peft_and_are_merged_by_an_export(tmp_path: Path) -> None:
    """From PEFT's folder, from our own file and from merged matrices; the target does not change."""
    model, heads, lora = peft_heads(tmp_path / "ours")
    before, hidden = model.lm_head.weight.clone(), torch.randn(2, 64)
    states = states_of(heads, hidden)
    expected = torch.stack([lora.base_model.model["heads"][head](states[:, head]) for head in range(3)], dim=1)
    assert not torch.allclose(expected, model.lm_head(states), atol=1e-2)
    with pytest.raises(ValueError, match="give the target"):
        export_head(heads, tmp_path / "v1", "medusa")
    export_head(heads, tmp_path / "v1", "medusa", model)
    save_head(heads, tmp_path / "again")
    for some in (heads, load_head(tmp_path / "again"), load_head(tmp_path / "v1")):
        torch.testing.assert_close(logits_of(some, model, hidden), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(before, model.lm_head.weight)


def test_medusa_loading_does_not_change_the_random_state(tmp_path: Path) -> None:
    """The first sampled call loads heads and LoRA matrices, and still gives the text of its seed."""
    model, _, _ = peft_heads(tmp_path)
    for _ in range(2):
        candidates = MedusaCandidates.from_pretrained(str(tmp_path))
        assert_same_tokens(model, prompts(1), candidates, max_new_tokens=8, do_sample=True)


def test_custom_generate_from_a_folder_same_tokens(tmp_path: Path) -> None:
    """`generate(custom_generate=FOLDER, trust_remote_code=True)` equals the keyword."""
    model = tiny_model("llama")
    save_head(random_heads(model), tmp_path)
    write_custom_generate(tmp_path, str(tmp_path))
    inputs = prompts(1)
    arguments = {"max_new_tokens": 9, "return_dict_in_generate": True}
    ours = model.generate(**inputs, **arguments, custom_generate=str(tmp_path), trust_remote_code=True)
    assert torch.equal(ours.sequences, model.generate(**inputs, max_new_tokens=9))
    assert ours.speculation.steps > 0


# Medusa: the tokens of plain `generate` with any heads and any tree size, and logits of the right states and paths


@pytest.mark.parametrize("heads", [1, 3])
def test_medusa_vocabulary_smaller_than_the_ranks_same_tokens(heads: int) -> None:
    """Would catch: a rank that reaches into the next head's tokens."""
    model = tiny_model("llama", vocab_size=6)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    candidates = MedusaCandidates(random_heads(model, num_heads=heads), tree=20)
    assert_same_tokens(model, inputs, candidates, max_new_tokens=12)


def test_medusa_rejection_sampling_has_the_distribution_of_the_target() -> None:
    """Would catch: siblings verified as sampled one after the other, which they were not; q of another distribution."""
    target = small_llama(8, 5)
    candidates = MedusaCandidates(random_heads(target, own_outputs=True), tree=6, policy=FixedDepth())
    assert fit_of_two_tokens(target, torch.tensor([[3, 1, 7, 4]]), candidates, calls=12) > 1e-3


@torch.no_grad()
def test_hydra_logits_of_a_tree_are_those_of_each_nodes_path() -> None:
    """Would catch: the token of a sibling or of another row, the head of another depth."""
    model = tiny_model("llama")
    heads: Any = random_heads(model, own_outputs=True, **HYDRA)
    drafter, states, paths = MedusaDrafter(heads.bind(model), None, model), torch.randn(2, 64), [[[5]], [[7]]]
    logits, nodes = drafter.forward_text(StateText(states, [5, 7], [0, 1]))[:, None], 0
    levels: list[Any] = [([[0, 0], [0, 0]], [[8, 9], [3, 4]]), ([[0, 1], [1, 0]], [[1, 2], [6, 2]]), None]
    for depth, level in enumerate(levels):
        for row, places in enumerate(paths):
            for place, path in enumerate(places):
                state = heads.head_state(depth, states[row], model.get_input_embeddings()(torch.tensor(path)))
                torch.testing.assert_close(logits[row, place], heads.lm_heads[depth](state), atol=1e-4, rtol=1e-4)
        if level is not None:
            nodes += 2
            rows = [(before, zip(*pair, strict=True)) for before, *pair in zip(paths, *level, strict=True)]
            paths = [[[*before[at], token] for at, token in pairs] for before, pairs in rows]
            last = torch.tensor(level[1])
            logits = drafter.forward_nodes(frontier_of(last, depth + 1, nodes, torch.tensor(level[0])))


def test_new_heads_return_the_state_of_the_target() -> None:
    """Would catch: new heads whose training begins with noise."""
    model = tiny_model("llama")
    heads = MedusaHeads.from_target(model, num_heads=3, num_layers=2, reads_path=True)
    state = torch.randn(5, 64)
    path = torch.randn(5, 3, 64)
    assert all(torch.equal(heads.head_state(head, state, path), state) for head in range(3))


def test_medusa_target_in_changing_dtypes_leaves_the_given_heads_unchanged() -> None:
    """The heads follow the dtype of their target from call to call; the caller's own are not rounded."""
    model = fresh_model("llama")
    heads = random_heads(model)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    candidates = MedusaCandidates(heads)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
    assert all(torch.equal(before[name], tensor) for name, tensor in heads.state_dict().items())


def test_profile_keys_of_loaded_modules_differ_by_object() -> None:
    """Would catch: the acceptance of one set of heads, or of one exit adapter, remembered for another."""
    model = tiny_model("llama")
    first, second = random_heads(model), random_heads(model)
    assert MedusaCandidates(first).profile_key() != MedusaCandidates(second).profile_key()
    assert MedusaCandidates(first).profile_key() == MedusaCandidates(first).profile_key()
    eagle = [EagleCandidates(load_head(FIXTURES["eagle1_original"].head_folder), k=2) for _ in range(2)]
    assert eagle[0].profile_key() == eagle[0].profile_key() != eagle[1].profile_key()
    adapters = torch.nn.Identity(), torch.nn.Identity()
    keys = {LayerSkipCandidates(1, adapter=adapter).profile_key() for adapter in (*adapters, adapters[0])}
    assert len(keys) == 2


def test_medusa_wrong_uses_raise() -> None:
    """Would catch: a path of another length read as far as it goes."""
    sizes = {"target_hidden_size": 8, "num_aux_hidden_states": 1}
    config = MedusaConfig(hidden_size=8, vocab_size=9, draft_vocab_size=9, num_heads=2, **sizes, **HYDRA)
    with pytest.raises(ValueError, match="head 1 reads 2 tokens"):
        MedusaHeads(config).head_state(1, torch.zeros(1, 8), torch.zeros(1, 1, 8))
