"""Damaged or hostile files of heads and adapters: one `ValueError` that names the file, and no memory taken."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specgen.evaluation.workloads import EMBEDDED_ADAPTER, EMBEDDED_HEADS
from hf_specgen.heads import load_exit_head, load_medusa
from hf_specgen.heads.checkpoint import source_errors, tensor_infos
from hf_specgen.heads.exit_head import exit_layer_of
from hf_specgen.heads.lora import load_lora
from hf_specgen.targets.model_parts import output_matrix

HUGE = 10**9
DEEP = "[" * 100_000 + "]" * 100_000


def edited(folder: Path, name: str, **fields: Any) -> Path:
    """The folder, after some fields of one of its JSON files were replaced."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_HEADS, tmp_path / "heads"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_ADAPTER, tmp_path / "adapter"))


@pytest.mark.parametrize("field", ["num_heads", "num_layers", "hidden_size", "vocab_size", "lora_rank"])
def test_load_medusa_huge_size_in_config_is_refused_before_allocating(
    field: str, heads: Path, reference_model: Any
) -> None:
    """Would catch: 10**9 modules, built one after the other until memory ends."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=str(HUGE) if field != "hidden_size" else "blocks.0"):
            loaded = load_medusa(edited(heads, "config.json", **{field: HUGE}), reference_model)
            load_lora(output_matrix(reference_model), loaded.config.num_heads, str(heads))
            raise ValueError(f"lora_rank {loaded.config.lora_rank} is not read: the adapter's own rank counts")
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", "zzz"),
        ("base", [1]),
        ("num_heads", "4"),
        ("num_heads", True),
        ("num_layers", None),
        ("num_heads", -1),
        ("reads_token", 1),
        ("acceptance", 3),
        ("acceptance", [[["x"]]]),
        ("acceptance", [[[0.5, float("nan")]] * 6] * 4),
        ("acceptance", [[[0.5, 0.6]] * 6] * 4),
    ],
)
def test_load_medusa_malformed_config_field_is_a_value_error_with_the_folder(
    field: str, value: Any, heads: Path, reference_model: Any
) -> None:
    with pytest.raises(ValueError, match=str(heads)):
        load_medusa(edited(heads, "config.json", **{field: value}), reference_model)


@pytest.mark.parametrize("text", [DEEP, "", "{", '"text"', "\x00", '{"model_type": "medusa_heads"}'])
@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "exit_config.json"])
def test_damaged_json_is_a_value_error_with_the_file(
    name: str, text: str, heads: Path, adapter: Path, reference_model: Any
) -> None:
    """Would catch: RecursionError, JSONDecodeError, KeyError or AttributeError from deep inside."""
    folder = heads if name == "config.json" else adapter
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=str(folder)):
        load_medusa(heads, reference_model)
        load_exit_head(reference_model, adapter)


@pytest.mark.parametrize("keep", [0, 7, 100, 500_000])
@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors", "lora/adapter_model.safetensors"])
def test_truncated_tensors_are_a_value_error_with_the_file(
    name: str, keep: int, heads: Path, adapter: Path, reference_model: Any
) -> None:
    folder = adapter if name == "adapter_model.safetensors" else heads
    (folder / name).write_bytes((folder / name).read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{folder / name} cannot be read as tensors"):
        loaded = load_medusa(heads, reference_model)
        load_lora(output_matrix(reference_model), loaded.config.num_heads, str(heads))
        load_exit_head(reference_model, adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": HUGE}, "1000000000"),
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"r": "64"}, "r must be a positive integer, got '64'"),
        ({"r": 32}, "lora_A"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type must be 'LORA'"),
        ({"peft_type": None}, "peft_type must be 'LORA'"),
        ({"rank_pattern": {"head": HUGE}}, "rank_pattern"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"lora_alpha": "x"}, "lora_alpha must be a positive number"),
    ],
)
def test_load_exit_head_adapter_config_that_does_not_fit_is_refused_before_allocating(
    fields: dict[str, Any], message: str, adapter: Path, reference_model: Any
) -> None:
    """Would catch: PEFT building LoRA matrices of 10**9 rows, 1.5 TB."""
    with pytest.raises(ValueError, match=message):
        load_exit_head(reference_model, edited(adapter, "adapter_config.json", **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exit_layer": 99}, "exit_layer must be between 1 and 7"),
        ({"exit_layer": "4"}, "exit_layer must be a positive integer, got '4'"),
        ({"exit_layer": None}, "exit_layer must be a positive integer, got None"),
        ({"hidden_size": [384]}, "hidden_size must be a positive integer"),
        ({"vocab_size": 5}, "vocab_size 5, but this target has 8192"),
    ],
)
def test_load_exit_head_malformed_exit_config_is_a_value_error(
    fields: dict[str, Any], message: str, adapter: Path, reference_model: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        load_exit_head(reference_model, edited(adapter, "exit_config.json", **fields))


def test_exit_layer_of_a_folder_that_is_not_there_names_the_folder() -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder '/no/such/adapter'"):
        exit_layer_of("/no/such/adapter")


def test_embedded_adapters_still_load(reference_model: Any) -> None:
    """The checks refuse nothing that is right: also tensors, not only shapes, are those of the files."""
    head = load_exit_head(reference_model, EMBEDDED_ADAPTER)
    saved = load_file(EMBEDDED_ADAPTER / "adapter_model.safetensors")
    norm = head.norm.modules_to_save["default"].weight  # type: ignore[union-attr, index]
    assert torch.equal(norm, saved["base_model.model.norm.weight"].float()) and not norm.requires_grad
    loaded = load_medusa(EMBEDDED_HEADS, reference_model)
    lora = load_lora(output_matrix(reference_model), loaded.config.num_heads, str(EMBEDDED_HEADS))
    of_lora = load_file(EMBEDDED_HEADS / "lora" / "adapter_model.safetensors")
    weight = lora.base_model.model.heads[3].lora_B["default"].weight
    assert torch.equal(weight, of_lora["base_model.model.heads.3.lora_B.weight"])


def test_sharded_heads_load_and_a_missing_shard_is_named(heads: Path, reference_model: Any) -> None:
    tensors = load_file(heads / "model.safetensors")
    (heads / "model.safetensors").unlink()
    half = len(tensors) // 2
    weight_map = {}
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        save_file({name: tensors[name] for name in names}, heads / f"shard-{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"shard-{number}.safetensors")
    (heads / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(
        load_medusa(heads, reference_model).blocks[3].layers[1].weight,  # type: ignore[union-attr, index]
        tensors["blocks.3.layers.1.weight"],
    )
    (heads / "shard-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the file shard-1\.safetensors is missing"):
        load_medusa(heads, reference_model)
    (heads / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../shard"}}))
    with pytest.raises(ValueError, match="names a file outside of the checkpoint"):
        load_medusa(heads, reference_model)


def test_tensor_infos_pickled_tensor_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    """Would catch: a tensor with stride 0, that takes 4 TB as soon as it is copied."""
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": torch.zeros(1).expand(10**6, 10**6)}, file)
    with pytest.raises(ValueError, match="does not fit into the file"):
        tensor_infos(file)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nonexistent/dir", "there is no folder '/nonexistent/dir'"),
        ("./folder", "there is no folder './folder'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("org/none", "org/none has no Medusa heads.*HF_HUB_OFFLINE is set"),
    ],
)
def test_load_medusa_unknown_source_is_named(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=message):
        load_medusa(source)


@pytest.mark.parametrize("error", [KeyError("model_type"), RecursionError("deep"), AttributeError("x"), TypeError("y")])
def test_source_errors_other_errors_become_a_value_error_with_the_name(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=rf"cannot load 'org/model': {type(error).__name__}"),
        source_errors("org/model"),
    ):
        raise error
