"""Damaged or hostile files of Medusa heads and adapters: one `ValueError` that names the file, and no memory taken."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_specgen.evaluation.workloads import EMBEDDED_ADAPTER, EMBEDDED_HEADS
from hf_specgen.heads import load_exit_head, load_head
from hf_specgen.heads.checkpoint import source_errors
from hf_specgen.heads.exit_head import exit_layer_of

HUGE = 10**9
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_HEADS, tmp_path / "heads"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_ADAPTER, tmp_path / "adapter"))


def load_all(heads: Path, adapter: Path, model: Any) -> None:
    load_head(heads).bind(model)
    load_exit_head(model, adapter)


HEADS, LORA, EXIT = "heads/config.json", "adapter/adapter_config.json", "adapter/exit_config.json"
FIELDS: list[tuple[str, str, Any, str]] = [
    (HEADS, "num_heads", HUGE, "num_heads is 1000000000"),
    (HEADS, "num_layers", HUGE, "num_layers is 1000000000"),
    (HEADS, "vocab_size", HUGE, "vocab_size 1000000000|should be|makes it"),
    (HEADS, "base", "zzz", "base must be an object"),
    (HEADS, "base", [1], "base must be an object"),
    (HEADS, "num_heads", "4", "num_heads must be a whole number"),
    (HEADS, "num_heads", True, "num_heads must be a whole number"),
    (HEADS, "num_layers", None, "has no num_layers"),
    (HEADS, "num_heads", -1, "num_heads must be a whole number"),
    (HEADS, "lora_rank", "x", "lora_rank must be a whole number"),
    (LORA, "r", HUGE, "1000000000"),  # would catch: PEFT building LoRA matrices of 10**9 rows, 1.5 TB
    (LORA, "r", 0, "r must be a positive integer, got 0"),
    (LORA, "r", "64", "r must be a positive integer, got '64'"),
    (LORA, "r", 32, "lora_A"),
    (LORA, "peft_type", "PREFIX_TUNING", "peft_type must be 'LORA'"),
    (LORA, "peft_type", None, "peft_type must be 'LORA'"),
    (LORA, "rank_pattern", {"head": HUGE}, "rank_pattern"),
    (LORA, "use_dora", True, "use_dora=True is not supported"),
    (LORA, "lora_alpha", "x", "lora_alpha must be a positive number"),
    (EXIT, "exit_layer", 99, "exit_layer must be between 1 and 7"),
    (EXIT, "exit_layer", "4", "exit_layer must be a positive integer, got '4'"),
    (EXIT, "exit_layer", None, "exit_layer must be a positive integer, got None"),
    (EXIT, "hidden_size", [384], "hidden_size must be a positive integer"),
    (EXIT, "vocab_size", 5, "vocab_size 5, but this target has 8192"),
]


@pytest.mark.parametrize(("file", "field", "value", "message"), FIELDS)
def test_config_with_a_wrong_field_is_refused_before_allocating(
    file: str, field: str, value: Any, message: str, heads: Path, adapter: Path, reference_model: Any
) -> None:
    """Would catch: 10**9 modules, built one after the other until memory ends."""
    path = heads.parent / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            load_all(heads, adapter, reference_model)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [DEEP, "", "{", '"text"', "\x00", '{"model_type": "medusa_heads"}'])
@pytest.mark.parametrize("file", [HEADS, LORA, EXIT])
def test_damaged_json_is_a_value_error_with_the_file(
    file: str, text: str, heads: Path, adapter: Path, reference_model: Any
) -> None:
    """Would catch: RecursionError, JSONDecodeError, KeyError or AttributeError from deep inside."""
    path = heads.parent / file
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path.parent)):
        load_all(heads, adapter, reference_model)


@pytest.mark.parametrize("keep", [0, 7, 100, 500_000])
@pytest.mark.parametrize(
    "file", ["heads/model.safetensors", "adapter/adapter_model.safetensors", "heads/lora/adapter_model.safetensors"]
)
def test_truncated_tensors_are_a_value_error_with_the_file(
    file: str, keep: int, heads: Path, adapter: Path, reference_model: Any
) -> None:
    path = heads.parent / file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path} cannot be read as tensors"):
        load_all(heads, adapter, reference_model)


def test_embedded_adapters_still_load(reference_model: Any) -> None:
    """The checks refuse nothing that is right: also tensors, not only shapes, are those of the files."""
    head = load_exit_head(reference_model, EMBEDDED_ADAPTER)
    saved = load_file(EMBEDDED_ADAPTER / "adapter_model.safetensors")
    norm: Any = head.norm.weight
    assert torch.equal(norm, saved["base_model.model.norm.weight"].float()) and not norm.requires_grad
    heads: Any = load_head(EMBEDDED_HEADS)
    of_lora = load_file(EMBEDDED_HEADS / "lora" / "adapter_model.safetensors")
    assert torch.equal(heads.lora_B[3].weight, of_lora["base_model.model.heads.3.lora_B.weight"].bfloat16())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nonexistent/dir", "there is no folder '/nonexistent/dir'"),
        ("./folder", "there is no folder './folder'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("org/none", r"org/none .* has no .*HF_HUB_OFFLINE is set|org/none has no .*HF_HUB_OFFLINE is set"),
    ],
)
@pytest.mark.parametrize("load", [load_head, exit_layer_of])
def test_unknown_source_is_named(source: str, message: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=message):
        load(source)


@pytest.mark.parametrize("error", [KeyError("model_type"), RecursionError("deep"), AttributeError("x"), TypeError("y")])
def test_source_errors_other_errors_become_a_value_error_with_the_name(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=rf"cannot load 'org/model': {type(error).__name__}"),
        source_errors("org/model"),
    ):
        raise error
