"""Loading draft heads: formats are recognised, and damaged or hostile files are refused with one clear sentence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specgen.heads import checkpoint
from hf_specgen.heads.eagle import Eagle3Head, EagleConfig
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import FORMATS, load_head
from hf_specgen.heads.layers import LayerConfig

LAYER = LayerConfig(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8)
SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 40, "target_hidden_size": 16, "num_aux_hidden_states": 3}
Tensors = dict[str, torch.Tensor]


def make_head(**options: Any) -> Eagle3Head:
    settings = SIZES | {"draft_vocab_size": 12, "own_lm_head": True} | options
    return Eagle3Head(EagleConfig(layer=LAYER, **settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good EAGLE-3 checkpoint in the original layout."""
    export_head(make_head(), tmp_path / "head", "eagle")
    return tmp_path / "head"


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "REMOVE"}), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_load_good_head_is_frozen_and_in_evaluation_mode(folder: Path) -> None:
    head = load_head(folder)
    assert not head.training and not any(parameter.requires_grad for parameter in head.parameters())


def test_load_with_taps_overrides_the_config(folder: Path) -> None:
    assert load_head(folder, aux_hidden_state_layers=[1, 2, 3]).config.aux_hidden_state_layers == (1, 2, 3)


def test_load_from_subfolder(folder: Path) -> None:
    assert isinstance(load_head(folder.parent, subfolder="head"), Eagle3Head)


def test_load_pickled_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(load_head(folder).fc.weight, tensors["fc.weight"])


def test_load_sharded_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": list(tensors)[:4], "b.safetensors": list(tensors)[4:]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert torch.equal(load_head(folder).fc.weight, tensors["fc.weight"])


def test_load_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    save_file({"heads.0.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a draft head of a known format") as error:
        load_head(tmp_path)
    assert all(known.name in str(error.value) for known in FORMATS)


def test_load_unknown_speculators_type_lists_the_known_ones(folder: Path) -> None:
    change_config(folder, speculators_model_type="dspark")
    with pytest.raises(ValueError, match="type 'dspark' are not a draft head of a known format; known are speculators"):
        load_head(folder)


def test_load_plain_model_is_not_taken_for_a_head(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a draft head of a known format"):
        load_head(tmp_path)


def test_load_medusa_heads_names_the_right_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 5}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"it holds Medusa heads, which hf_specgen\.heads\.load_medusa reads"):
        load_head(tmp_path)


@pytest.mark.parametrize("path", ["/nonexistent/folder", "nobody/there-is-no-such-head", "not a/repository/id"])
def test_load_from_nowhere_raises_file_not_found(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder|is not a folder"):
        load_head(path)


@pytest.mark.parametrize("missing", [EntryNotFoundError("404"), LocalEntryNotFoundError("offline")])
def test_load_from_the_hub_passes_on_where_to_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: Exception
) -> None:
    asked: list[Any] = []

    def download(repository: str, name: str, **where: Any) -> str:
        asked.append((repository, where))
        if not (folder / name).exists():
            raise missing
        return str(folder / name)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    where: dict[str, Any] = {"revision": "v2", "token": "t", "subfolder": "draft", "cache_dir": "/cache"}
    assert isinstance(load_head("org/head", **where), Eagle3Head)
    assert asked and all(entry == ("org/head", where) for entry in asked)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_load_without_file_names_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_head(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 2000])
def test_load_truncated_safetensors_raises(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as tensors .*; download it again"):
        load_head(folder)


def test_load_safetensors_with_absurd_header_raises(folder: Path) -> None:
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        load_head(folder)


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_load_deeply_nested_config_raises(folder: Path, depth: int) -> None:
    (folder / "config.json").write_text('{"a":' * depth + "1" + "}" * depth, encoding="utf-8")
    with pytest.raises(ValueError, match=r"nested too deeply to be a config\.json"):
        load_head(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"a"'])
def test_load_config_that_is_no_object_raises(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|holds)"):
        load_head(folder)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 10**9}, "config.json has hidden_size 1000000000, but the tensors have 16"),
        ({"intermediate_size": 10**9}, "config.json has intermediate_size 1000000000, but the tensors have 24"),
        ({"num_hidden_layers": 10**9}, "config.json has 1000000000 layers, but the tensors have 1"),
        ({"num_attention_heads": 10**9}, "config.json has 1000000000 attention heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number between 1"),
        ({"num_key_value_heads": 3}, "config.json has 2 attention heads and 3 key/value heads"),
        ({"vocab_size": 10**9}, r"t2d has shape \(40,\), but config.json says vocab_size 1000000000"),
        ({"draft_vocab_size": 10**9}, "draft_vocab_size must be between 1 and the target's vocabulary size 40"),
        ({"draft_vocab_size": 13}, r"tensor lm_head.weight has shape \(12, 16\), but config.json makes it \(13, 16\)"),
        ({"target_hidden_size": 10**9}, "make a state of width 16 out of states of width 1000000000"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, got str 'small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "unknown rope_type 'spiral'; known are default"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "the rotary parameters .* cannot be used"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"hidden_act": "square"}, "unknown activation 'square'"),
        ({"hidden_act": None, "model_type": "mamba"}, "model_type 'mamba' are not supported, only llama, qwen2, qwen3"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "x"]}}, "must be a list of layer numbers"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            "reads 3 hidden states of the target, but aux_hidden_state_layers",
        ),
        ({"target_layer_ids": [1, 2, 3], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "twice, and differently"),
    ],
)
def test_load_config_with_wrong_values_says_which(folder: Path, values: dict[str, Any], reason: str) -> None:
    change_config(folder, **values)
    with pytest.raises(ValueError, match=reason) as error:
        load_head(folder)
    assert str(error.value).startswith(f"{folder}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("fc.weight"), "the tensor fc.weight is missing"),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), r"1 tensors are missing, such as layers.0.mlp.up_proj.weight"),
        (lambda t: t.pop("midlayer.self_attn.q_proj.weight"), "layers.0.self_attn.q_proj.weight is missing"),
        (lambda t: t.pop("d2t"), "needs an integer tensor d2t of that length, found none"),
        (lambda t: t.update(d2t=torch.zeros(12)), "needs an integer tensor d2t .* dtype torch.float32"),
        (lambda t: t.update(d2t=torch.full((12,), 40)), "d2t maps draft tokens to ids outside"),
        (lambda t: t.update(d2t=torch.full((12,), -20)), "d2t maps draft tokens to ids outside"),
        (lambda t: t.update(d2t=torch.zeros(3, dtype=torch.long)), r"found one of shape \(3,\)"),
        (lambda t: t.update({"norm.weight": torch.ones(17)}), r"tensor norm.weight has shape \(17,\)"),
        (lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int8)}), "dtype torch.int8; quantised heads"),
        (lambda t: t.update({"fc.weight": torch.ones(16, 47)}), "it has to make a state of width 16"),
        (lambda t: t.update({"fc.weight": torch.ones(48)}), "it has to make a state of width 16"),
        (lambda t: t.update({"markov.weight": torch.ones(4)}), "has no tensors such as markov.weight"),
        (lambda t: t.update({"layers.7.norm.weight": torch.ones(4)}), "no complete sequence of layers"),
    ],
)
def test_load_with_wrong_tensors_says_which(folder: Path, change: Callable[[Tensors], Any], reason: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=reason):
        load_head(folder)


class Malicious:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code from a checkpoint was run",)


@pytest.mark.parametrize("content", ["code", "list", "views", "garbage"])
def test_load_bad_pickle_raises_and_runs_nothing(
    folder: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    if content == "code":
        torch.save({"fc.weight": Malicious()}, path)
    elif content == "list":
        torch.save([torch.zeros(2)], path)
    elif content == "views":  # four bytes that claim to be 4 million terabytes
        torch.save({"fc.weight": torch.zeros(1).expand(10**9, 10**9)}, path)
    else:
        path.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load_head(folder)
    assert "code from a checkpoint" not in capsys.readouterr().out


def test_load_index_that_points_outside_raises(folder: Path) -> None:
    index = {"weight_map": {"fc.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match="names a file outside of the checkpoint"):
        load_head(folder)


def target(**changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **(sizes | changes)))


def test_attach_uses_default_layers_of_the_targets_depth(folder: Path) -> None:
    assert load_head(folder).bind(target()).aux_hidden_state_layers == (2, 4, 5)
    assert load_head(folder).bind(target(), aux_hidden_state_layers=[1, 2, 8]).aux_hidden_state_layers == (1, 2, 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 32}, "with a hidden size of 16, but this target has 32; load the head that belongs to it"),
        ({"vocab_size": 41}, "with a vocabulary of 40, but this target has 41"),
        ({"num_hidden_layers": 6}, r"reads 3 hidden states of the target, but aux_hidden_state_layers are \(2, 3\)"),
    ],
)
def test_attach_to_another_target_raises(folder: Path, changes: dict[str, Any], reason: str) -> None:
    config = {"vocab_size": 40} | changes
    with pytest.raises(ValueError, match=reason):
        load_head(folder).bind(LlamaForCausalLM(target().config.__class__(**target().config.to_dict() | config)))


@pytest.mark.parametrize("layers", [[1, 2], [1, 2, 9], [-1, 2, 3]])
def test_attach_with_impossible_layers_raises(folder: Path, layers: list[int]) -> None:
    with pytest.raises(ValueError, match="aux_hidden_state_layers"):
        load_head(folder).bind(target(), aux_hidden_state_layers=layers)


def test_attach_borrows_what_the_head_lacks_and_saves_none_of_it(tmp_path: Path) -> None:
    head = make_head(draft_vocab_size=40, own_lm_head=False)
    model = target()
    bound = head.bind(model)
    tokens = torch.tensor([[3, 5]])
    assert torch.equal(bound.embed(tokens), model.model.embed_tokens(tokens))
    states = torch.randn(1, 2, 16)
    assert torch.equal(bound.logits(states), model.lm_head(states))
    save_head(head, tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "model.safetensors").keys()
