"""Targets with quantized weights, by each library that is installed and runs on a CPU: quantized by `from_pretrained`,
or read from the packed numbers of a published file (GPTQ, AWQ, GGUF)."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.helpers.models import prompts, tiny_model
from tests.helpers.oracle import ORACLES

BITS, GROUP = 4, 32
"""Of packed weights, eight of which are in one number."""


def _torchao(name: str, **settings: Any) -> Any:
    from torchao import quantization

    return transformers.TorchAoConfig(getattr(quantization, name)(**settings))


def _torchao_int4() -> Any:
    from torchao.quantization import PerGroup

    return _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(GROUP))


def _bitsandbytes(**settings: Any) -> Any:
    return transformers.BitsAndBytesConfig(**settings)


QUANTIZED: dict[str, tuple[str, Callable[[], Any]]] = {
    "torchao_int8": ("torchao", lambda: _torchao("Int8WeightOnlyConfig")),
    "torchao_int4": ("torchao", _torchao_int4),
    "bitsandbytes_4_bit": (
        "bitsandbytes",
        lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ),
    "bitsandbytes_8_bit": ("bitsandbytes", lambda: _bitsandbytes(load_in_8bit=True)),
    "quanto_int8": ("optimum", lambda: transformers.QuantoConfig(weights="int8")),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_target_same_tokens(kind: str, tmp_path: Path) -> None:
    """Would catch: a target that is refused or drafts other tokens because its layers are not ordinary ones."""
    library, settings = QUANTIZED[kind]
    needs(library)
    # Blocks of 64 weights divide each layer.
    tiny_model("llama", intermediate_size=128).save_pretrained(tmp_path)
    loading = {"quantization_config": settings(), "device_map": "cpu", "dtype": torch.float32}
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, **loading))


def test_target_that_hqq_has_quantized_same_tokens() -> None:
    """Would catch: a target refused for layers of a library's own, which Transformers 5.24 does not make itself."""
    needs("hqq")
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = copy.deepcopy(tiny_model("llama", intermediate_size=128))
    settings = BaseQuantizeConfig(nbits=BITS, group_size=GROUP)
    AutoHQQHFModel.quantize_model(model, quant_config=settings, compute_dtype=torch.float32, device="cpu")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "HQQLinear"
    assert_same(model)


PACKED: dict[str, dict[str, Any]] = {
    "gptq": {"sym": False, "desc_act": False, "checkpoint_format": "gptq"},
    "awq": {"zero_point": True, "version": "gemm"},
}
"""By `quant_method`, what the config of a published file says beside bits and groups."""


@pytest.mark.parametrize("method", PACKED)
def test_target_of_packed_numbers_same_tokens(method: str, tmp_path: Path) -> None:
    """Would catch: a target that is refused or drafts other tokens because its layers hold packed numbers."""
    needs("gptqmodel")
    model = tiny_model("llama", intermediate_size=128)
    model.save_pretrained(tmp_path)
    settings = {"quant_method": method, "bits": BITS, "group_size": GROUP, **PACKED[method]}
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(packed_weights(model, method), tmp_path / "model.safetensors", {"format": "pt"})
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", dtype=torch.float32))


def packed_weights(model: Any, method: str) -> dict[str, torch.Tensor]:
    """The tensors of a file of this method, with random numbers in place of the weights of linear layers."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, weight in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if "proj" not in layer:
            tensors[name] = weight
            continue
        assert kind == "weight"
        rows, columns = weight.shape[::-1]
        packed = (rows // 8, columns) if method == "gptq" else (rows, columns // 8)
        for part, shape in (("qweight", packed), ("qzeros", (rows // GROUP, columns // 8))):
            numbers = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)
            tensors[f"{layer}.{part}"] = numbers.to(torch.int32)
        tensors[f"{layer}.scales"] = torch.full((rows // GROUP, columns), 0.03, dtype=torch.float16)
        if method == "gptq":
            tensors[f"{layer}.g_idx"] = torch.arange(rows, dtype=torch.int32) // GROUP
    return tensors


def test_target_of_a_gguf_file_same_tokens(tmp_path: Path) -> None:
    """Would catch: a target that `from_pretrained` dequantizes from a GGUF file, and that is then refused."""
    needs("gguf")
    write_gguf(tiny_model("llama", intermediate_size=128), tmp_path / "model.gguf")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32))


def write_gguf(model: Any, path: Path) -> None:
    """Write a Llama with weights of 8 bits."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        numbers, kind_of_numbers = weight.numpy(), gguf.GGMLQuantizationType.F32
        if weight.dim() > 1:
            kind_of_numbers = gguf.GGMLQuantizationType.Q8_0
            numbers = gguf.quants.quantize(numbers, kind_of_numbers)
        writer.add_tensor(f"{names.get_name(layer)}.{kind}", numbers, raw_dtype=kind_of_numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def needs(library: str) -> None:
    """Skip where a library is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def assert_same(model: Any) -> None:
    """Trees whose tokens are accepted give the tokens of plain `generate`, in rows of different lengths."""
    call: dict[str, Any] = {"max_new_tokens": 14, "return_dict_in_generate": True, "pad_token_id": 0}
    plain = model.generate(**prompts(3), **call).sequences
    oracle = ORACLES["tree"](plain[:, prompts(3)["input_ids"].shape[1] :])
    output = model.generate(**prompts(3), **call, candidate_generator=oracle)
    assert torch.equal(output.sequences, plain) and output.speculation.accepted > 0
