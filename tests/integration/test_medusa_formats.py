"""Medusa heads on disk: the format of this package, Medusa v1 and v2, TGI, vLLM; and files that are none of these."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from hf_specgen import MedusaCandidates
from hf_specgen.heads import MedusaHeads, load_medusa
from hf_specgen.heads.compatibility import fingerprint, other_chat_template
from hf_specgen.heads.lora import load_lora, new_lora, output_of, stacked_deltas
from hf_specgen.heads.medusa import Acceptance, MedusaRunner
from hf_specgen.heads.medusa_formats import export_medusa, write_custom_generate
from tests.helpers import VOCAB, prompts, tiny_model
from tests.helpers.medusa import random_heads

HYDRA = {"reads_token": True, "reads_path": True}


def have_equal_weights(a: MedusaHeads, b: MedusaHeads) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("shape", [{}, {"own_outputs": True}, {"reads_token": True, "num_layers": 2}, HYDRA])
def test_save_pretrained_round_trip_keeps_weights_and_config(shape: dict, tmp_path: Path) -> None:
    heads = random_heads(tiny_model("llama"), **shape)
    table = [[list(ranks) for ranks in bins] for bins in Acceptance.untuned(3).table]
    heads.config.acceptance = table
    heads.save_pretrained(tmp_path)
    loaded = load_medusa(tmp_path, tiny_model("llama"))
    assert have_equal_weights(heads, loaded)
    assert loaded.config.acceptance == table and loaded.config.base == heads.config.base
    assert isinstance(AutoModel.from_pretrained(tmp_path), MedusaHeads)
    assert AutoConfig.from_pretrained(tmp_path).num_heads == 3


@pytest.mark.parametrize("to", ["medusa", "tgi", "vllm"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_export_round_trip_keeps_every_tensor(to: str, own: bool, num_layers: int, tmp_path: Path) -> None:
    """Biases included."""
    model = tiny_model("llama")
    heads = random_heads(model, own_outputs=own, num_layers=num_layers)
    if to == "tgi" and not own and num_layers == 2:
        with pytest.raises(ValueError, match="one layer"):
            export_medusa(heads, tmp_path, to)
        return
    files = export_medusa(heads, tmp_path, to, model)
    assert all(file.exists() for file in files)
    loaded = load_medusa(tmp_path, model)
    assert have_equal_weights(heads, loaded)
    assert (loaded.config.num_heads, loaded.config.num_layers, loaded.config.own_outputs) == (3, num_layers, own)


def test_export_writes_the_names_that_other_programs_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    shared, own = random_heads(model, num_heads=1), random_heads(model, num_heads=1, own_outputs=True)
    export_medusa(shared, tmp_path / "v2", "medusa")
    export_medusa(own, tmp_path / "v1", "medusa")
    export_medusa(shared, tmp_path / "vllm", "vllm", model)
    layer = {"0.0.linear.weight", "0.0.linear.bias"}
    assert load_file(tmp_path / "v2" / "medusa_lm_head.safetensors").keys() == layer
    assert torch.load(tmp_path / "v1" / "medusa_lm_head.pt", weights_only=True).keys() == layer | {"0.1.weight"}
    vllm = load_file(tmp_path / "vllm" / "model.safetensors")
    assert vllm.keys() == {"blocks.0.layers.0.weight", "blocks.0.layers.0.bias", "lm_head.weight"}
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["original_lm_head"] and config["medusa_fc_bias"] and config["architectures"] == ["MedusaModel"]
    assert "architectures" not in json.loads((tmp_path / "v2" / "config.json").read_text())


def test_load_medusa_counts_heads_in_the_tensors(tmp_path: Path) -> None:
    """Would catch: trust in the config (a published set says 2 and contains 5)."""
    export_medusa(random_heads(tiny_model("llama"), num_heads=5, own_outputs=True), tmp_path, "medusa")
    config = json.loads((tmp_path / "config.json").read_text()) | {"medusa_num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_medusa(tmp_path).config.num_heads == 5


def test_load_medusa_without_biases_fills_in_zeros(tmp_path: Path) -> None:
    """vLLM's `medusa_fc_bias=False`."""
    model = tiny_model("llama")
    heads = random_heads(model)
    export_medusa(heads, tmp_path, "vllm", model)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith("bias")}, tmp_path / "model.safetensors")
    loaded = load_medusa(tmp_path, model)
    assert not any(loaded.state_dict()[name].any() for name in loaded.state_dict() if name.endswith("bias"))
    assert torch.equal(loaded.blocks[0].layers[0].weight, heads.blocks[0].layers[0].weight)  # type: ignore[union-attr, index]


def test_other_chat_template_is_detected() -> None:
    class Tokenizer:
        chat_template: Any = "{{ messages }}"

    base = fingerprint(tiny_model("llama"), Tokenizer())
    assert other_chat_template(base, Tokenizer()) is None and other_chat_template(None, Tokenizer()) is None
    named = Tokenizer()
    named.chat_template = {"default": "a", "tools": "b"}
    assert "another chat template" in str(other_chat_template(base, named))


def test_medusa_from_pretrained_same_tokens(tmp_path: Path) -> None:
    model = tiny_model("llama")
    export_medusa(random_heads(model), tmp_path, "medusa")
    inputs = prompts(2)
    candidates = MedusaCandidates.from_pretrained(str(tmp_path), tree=6)
    ours = model.generate(**inputs, max_new_tokens=10, candidate_generator=candidates)
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=10))


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "by folder"])
@pytest.mark.parametrize(
    ("architecture", "overrides", "difference"),
    [
        ("qwen2", {}, "architecture llama"),
        ("llama", {"hidden_size": 32}, "hidden size 64"),
        ("llama", {"vocab_size": 120}, "vocabulary size 99"),
        ("llama", {"num_hidden_layers": 1}, "number of layers 2"),
    ],
    ids=["architecture", "hidden size", "vocabulary", "layers"],
)
def test_medusa_heads_of_another_target_raise(
    architecture: str, overrides: dict[str, int], difference: str, loaded: bool, tmp_path: Path
) -> None:
    heads = random_heads(tiny_model("llama"))
    heads.save_pretrained(tmp_path)
    candidates = MedusaCandidates(heads if loaded else str(tmp_path))
    with pytest.raises(ValueError, match=difference):
        tiny_model(architecture, **overrides).generate(**prompts(1), candidate_generator=candidates)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not run",)


def test_load_medusa_empty_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Medusa heads"):
        load_medusa(tmp_path)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_load_medusa_pickled_code_is_not_run(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    if how == "pickle":
        file.write_bytes(pickle.dumps({"0.0.linear.weight": _Code()}))
    else:
        torch.save({"0.0.linear.weight": _Code()}, file)
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        load_medusa(tmp_path)
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [([1, 2], "not a dictionary of tensors"), ({"something": torch.zeros(2)}, "no Medusa layers")],
    ids=["list", "other tensors"],
)
def test_load_medusa_file_without_heads_raises(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=message):
        load_medusa(tmp_path)


def test_load_medusa_truncated_or_incomplete_file_raises(tmp_path: Path) -> None:
    heads = random_heads(tiny_model("llama"))
    export_medusa(heads, tmp_path, "medusa")
    file = tmp_path / "medusa_lm_head.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        load_medusa(tmp_path)
    file.write_bytes(whole)
    tensors = load_file(file)
    del tensors["1.0.linear.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="do not make a whole set"):
        load_medusa(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_medusa(tmp_path)


def damaged(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    if how == "an output matrix is missing":
        return {name: tensor for name, tensor in tensors.items() if name != "1.1.weight"}
    if how == "head 0 is missing":
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("0.")}
    if how == "a head of a large number":
        return {**tensors, "3000.0.linear.weight": tensors["0.0.linear.weight"].clone()}
    if how == "integers":
        return {name: tensor.long() for name, tensor in tensors.items()}
    return {name: torch.zeros(()) for name in tensors}


@pytest.mark.parametrize(
    "how", ["an output matrix is missing", "head 0 is missing", "a head of a large number", "integers", "no dimensions"]
)
def test_load_medusa_damaged_tensors_raise(how: str, tmp_path: Path) -> None:
    export_medusa(random_heads(tiny_model("llama"), own_outputs=True), tmp_path, "tgi")
    file = tmp_path / "medusa_lm_head.safetensors"
    save_file(damaged(load_file(file), how), file)
    with pytest.raises(ValueError, match="do not make a whole set"):
        load_medusa(tmp_path)


def test_load_medusa_damaged_own_format_raises(tmp_path: Path) -> None:
    heads = random_heads(tiny_model("llama"))
    heads.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "blocks.1" not in name}, file)
    with pytest.raises(ValueError, match="num_heads is 3, but there are tensors for 2"):
        load_medusa(tmp_path)
    file.write_bytes(whole[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load_medusa(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        load_medusa(tmp_path)


def test_medusa_loading_does_not_change_the_random_state(tmp_path: Path) -> None:
    """The first sampled call loads heads and LoRA matrices, and still gives the text of its seed."""
    model, _, _ = _lora_heads(tmp_path)
    for _ in range(2):
        torch.manual_seed(3)
        plain = model.generate(**prompts(1), max_new_tokens=8, do_sample=True)
        torch.manual_seed(3)
        candidates = MedusaCandidates.from_pretrained(str(tmp_path))
        ours = model.generate(**prompts(1), max_new_tokens=8, do_sample=True, candidate_generator=candidates)
        assert torch.equal(plain, ours)


def test_medusa_heads_of_impossible_shape_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="take no LoRA"):
        random_heads(tiny_model("llama"), own_outputs=True, lora_rank=2)
    with pytest.raises(ValueError, match="has a bias"):
        random_heads(tiny_model("phi"), own_outputs=True)
    export_medusa(random_heads(tiny_model("llama")), tmp_path, "medusa")
    with pytest.raises(ValueError, match=r"holds a config\.json already"):
        export_medusa(random_heads(tiny_model("llama")), tmp_path, "tgi")


def test_export_medusa_unsupported_heads_raise(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="unknown format 'onnx'"):
        export_medusa(random_heads(model), tmp_path, "onnx")
    with pytest.raises(ValueError, match="reads_token"):
        export_medusa(random_heads(model, reads_token=True), tmp_path, "tgi")
    with pytest.raises(ValueError, match="give the target"):
        export_medusa(random_heads(model), tmp_path, "vllm")


def _lora_heads(tmp_path: Path) -> tuple[Any, MedusaHeads, Any]:
    model = tiny_model("llama")
    lora = new_lora(model.lm_head, 3, rank=4)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    heads = random_heads(model, lora_rank=4)
    heads.save_pretrained(tmp_path)
    lora.save_pretrained(tmp_path / "lora")
    return model, load_medusa(tmp_path, model), lora


def test_medusa_runner_lora_deltas_agree_with_peft(tmp_path: Path) -> None:
    """The stacked product against PEFT's own forward pass, loaded from disk; the target does not change."""
    model, heads, lora = _lora_heads(tmp_path)
    before = model.lm_head.weight.clone()
    loaded = load_lora(model.lm_head, 3, str(tmp_path))
    hidden, tokens = torch.randn(2, 64), torch.tensor([[5], [6]])
    logits = MedusaRunner(heads, model, loaded).logits(hidden, tokens)
    states = heads(hidden)
    for head in range(3):
        expected = output_of(lora, head)(states[:, head])
        assert not torch.allclose(expected, model.lm_head(states[:, head]), atol=1e-2)
        torch.testing.assert_close(logits[:, head], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(before, model.lm_head.weight) and model.lm_head.weight.requires_grad
    assert [tuple(delta.shape) for delta in stacked_deltas(loaded)] == [(3, 64, 4), (3, 4, VOCAB)]


def test_export_medusa_merges_lora_deltas(tmp_path: Path) -> None:
    model, heads, lora = _lora_heads(tmp_path / "ours")
    with pytest.raises(ValueError, match="give the target"):
        export_medusa(heads, tmp_path / "v1", "medusa")
    export_medusa(heads, tmp_path / "v1", "medusa", model)
    merged = load_medusa(tmp_path / "v1", model)
    hidden, tokens = torch.randn(2, 64), torch.tensor([[5], [6]])
    expected = MedusaRunner(heads, model, lora).logits(hidden, tokens)
    torch.testing.assert_close(MedusaRunner(merged, model).logits(hidden, tokens), expected, atol=1e-4, rtol=1e-4)


def test_custom_generate_from_a_folder_same_tokens(tmp_path: Path) -> None:
    """`generate(custom_generate=FOLDER, trust_remote_code=True)` equals the keyword."""
    model = tiny_model("llama")
    random_heads(model).save_pretrained(tmp_path)
    write_custom_generate(tmp_path, str(tmp_path))
    inputs = prompts(1)
    arguments = {"max_new_tokens": 9, "return_dict_in_generate": True}
    ours = model.generate(**inputs, **arguments, custom_generate=str(tmp_path), trust_remote_code=True)
    assert torch.equal(ours.sequences, model.generate(**inputs, max_new_tokens=9))
    assert ours.speculation.steps > 0


def test_custom_generate_without_the_package_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    write_custom_generate(tmp_path, "user/medusa-heads")
    code: dict[str, Any] = {}
    exec((tmp_path / "custom_generate" / "generate.py").read_text(), code)
    monkeypatch.setitem(sys.modules, "hf_specgen", None)
    with pytest.raises(ImportError, match=r"user/medusa-heads needs hf_specgen.*pip install hf-specgen"):
        code["generate"](tiny_model("llama"))
