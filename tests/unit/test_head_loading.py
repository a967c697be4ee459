"""Loading draft heads: layouts of files, the Hub, the target that fits; damaged files: `test_damaged_heads.py`."""

import copy
import dataclasses
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specgen import AutoCandidates, EagleCandidates, MedusaCandidates
from hf_specgen.evaluation.workloads import BUNDLED_ADAPTER, BUNDLED_HEADS
from hf_specgen.heads import checkpoint, load_exit_head
from hf_specgen.heads.eagle import Eagle3Head
from hf_specgen.heads.exit_head import exit_layer_of
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from hf_specgen.heads.source import Source, source_errors
from tests.helpers import fresh_model, prompts
from tests.helpers.head_fixtures import FIXTURES, small_eagle
from tests.helpers.medusa import random_heads
from tests.helpers.network import unreachable_hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good EAGLE-3 checkpoint in the original layout."""
    export_head(small_eagle(), tmp_path / "head", "eagle")
    return tmp_path / "head"


def test_load_head_with_the_quantisation_of_its_target_in_the_config_loads(folder: Path) -> None:
    """Would catch: a head refused because its config is a copy of that of a quantised target."""
    path, original = folder / "config.json", load_head(folder).state_dict()
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    loaded = load_head(folder).state_dict()
    assert loaded.keys() == original.keys() and all(torch.equal(loaded[name], original[name]) for name in original)


Tensors = dict[str, torch.Tensor]


def compressed(weights: Tensors, layout: str, kind: str, bits: int) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
    """Weights quantised by compressed-tensors, with metadata and config."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    settings = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": settings, "format": layout}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    [scheme] = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    tensors: Tensors = {}
    for name, weight in weights.items():
        scale = weight.abs().amax(dim=1, keepdim=True) / (448 if kind == "float" else 2 ** (bits - 1) - 1)
        state = {"weight": weight, "weight_scale": scale}
        packed = compressors.BaseCompressor.get_value_from_registry(layout).compress(state, scheme)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}
    return tensors, {}, config


def by_torchao(weights: Tensors, layout: str, kind: str, bits: int) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
    """Weights quantised by torchao, as Transformers saves them, with metadata and config."""
    quantization = pytest.importorskip("torchao.quantization")
    safetensors = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    modules = {name: torch.nn.Linear(*reversed(weight.shape), bias=False) for name, weight in weights.items()}
    for name, module in modules.items():
        module.weight.data = weights[name]
        quantization.quantize_(module, getattr(quantization, layout)())
    quantised = {name: module.weight.detach() for name, module in modules.items()}
    return *safetensors.flatten_tensor_state_dict(quantised), {"quant_method": "torchao"}


@pytest.mark.parametrize(
    ("quantise", "layout", "kind", "bits"),
    [
        (compressed, "pack-quantized", "int", 4),
        (compressed, "int-quantized", "int", 8),
        (compressed, "float-quantized", "float", 8),
        (by_torchao, "Int8WeightOnlyConfig", "int", 8),
        (by_torchao, "IntxWeightOnlyConfig", "int", 8),
        (by_torchao, "Float8WeightOnlyConfig", "float", 8),
    ],
)
def test_load_head_of_a_quantising_library_has_its_weights(
    folder: Path, quantise: Any, layout: str, kind: str, bits: int
) -> None:
    """Would catch: scales left out, a format that is not recognised, other matrices lost."""
    original, tensors = load_head(folder).state_dict(), load_file(folder / "model.safetensors")
    weights = {name: tensors.pop(name) for name in ("fc.weight", "midlayer.mlp.up_proj.weight")}
    parts, metadata, config = quantise(weights, layout, kind, bits)
    save_file(tensors | parts, folder / "model.safetensors", metadata)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    assert isinstance(AutoCandidates.from_pretrained(folder), EagleCandidates)
    for name, tensor in load_head(folder).state_dict().items():
        step = original[name].abs().amax() / (14 if kind == "float" else 2 ** (bits - 1) - 1)
        tolerance = step * 0.51 if name in ("fc.weight", "layers.0.mlp.up_proj.weight") else 0.0
        torch.testing.assert_close(tensor, original[name], atol=float(tolerance), rtol=0.0)


def test_load_from_the_hub_passes_on_its_arguments(folder: Path, monkeypatch: Any) -> None:
    """Would catch: a revision, token or folder that is dropped for a file, or a missing optional file as an error."""
    requests: list[Any] = []

    def download(repository: str, name: str, **where: Any) -> str:
        requests.append((repository, where))
        if not (folder / name).exists():
            raise EntryNotFoundError("404")
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    where: dict[str, Any] = {"revision": "v2", "token": "t", "subfolder": "draft", "cache_dir": "/cache"}
    assert isinstance(load_head("org/head", **where), Eagle3Head)
    assert requests and all(entry == ("org/head", where) for entry in requests)


@pytest.mark.parametrize("layout", ["safetensors", "subfolder", "pickled", "sharded"])
def test_load_head_from_each_layout_of_files(folder: Path, layout: str) -> None:
    """Would catch: a shard that is not read, or a head that would be trained or drop out."""
    content = load_file(folder / "model.safetensors")
    if layout == "pickled":
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")
    if layout == "sharded":
        parts = {"a.safetensors": list(content)[:4], "b.safetensors": list(content)[4:]}
        for file, names in parts.items():
            save_file({name: content[name] for name in names}, folder / file)
        weight_map = {name: file for file, names in parts.items() for name in names}
        (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (folder / "model.safetensors").unlink()
    head: Any = load_head(folder.parent, subfolder="head") if layout == "subfolder" else load_head(folder)
    assert torch.equal(head.fc.weight, content["fc.weight"])
    assert not head.training and not any(parameter.requires_grad for parameter in head.parameters())


def target(**changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 8}
    return LlamaForCausalLM(LlamaConfig(**({"vocab_size": 40} | sizes | changes)))


def test_bind_layers_are_those_given_then_configured_then_default(folder: Path) -> None:
    """Would catch: layers of the config that overrule those given."""
    assert load_head(folder).bind(target()).aux_hidden_state_layers == (2, 4, 5)
    configured = load_head(folder)
    configured.config = replace(configured.config, aux_hidden_state_layers=(1, 2, 3))
    assert configured.bind(target()).aux_hidden_state_layers == (1, 2, 3)
    assert configured.bind(target(), [1, 2, 8]).aux_hidden_state_layers == (1, 2, 8)


@pytest.mark.parametrize(
    ("changes", "layers", "reason"),
    [
        ({"hidden_size": 32}, None, "a hidden size of 16, but this target has 32; load the head that belongs to it"),
        ({"vocab_size": 41}, None, "with a vocabulary of 40, but this target has 41"),
        ({"num_hidden_layers": 6}, None, r"reads 3 hidden states .* aux_hidden_state_layers are \(2, 3\)"),
        ({}, [1, 2], r"reads 3 hidden states of the target, but aux_hidden_state_layers are \(1, 2\)"),
        ({}, [1, 2, 9], "not all between 0 and 8"),
        ({}, [-1, 2, 3], "not all between 0 and 8"),
    ],
)
def test_bind_to_a_target_that_does_not_fit_raises(folder: Path, changes: Any, layers: Any, reason: str) -> None:
    """Would catch: an error of shapes in the first draft in place of the reason."""
    with pytest.raises(ValueError, match=reason):
        load_head(folder).bind(target(**changes), layers)


def test_bind_shares_what_the_head_lacks_and_saves_none_of_it(tmp_path: Path) -> None:
    """Would catch: a copy of the target's embedding in memory, or in the head's checkpoint."""
    head = small_eagle(draft_vocab_size=40, own_lm_head=False)
    model = target()
    bound = head.bind(model)
    tokens, states = torch.tensor([[3, 5]]), torch.randn(1, 2, 16)
    assert torch.equal(bound.embed(tokens), model.model.embed_tokens(tokens))
    assert torch.equal(bound.logits(states), model.lm_head(states))
    save_head(head, tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "model.safetensors").keys()


def test_mtp_of_target_without_a_name_raises() -> None:
    """Would catch: an error of a path that nobody gave."""
    with pytest.raises(ValueError, match="name its checkpoint"):
        load_mtp(target())


SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 8}


@pytest.mark.parametrize("name", ["speculators_peagle_llama", "speculators_eagle3_b_qwen3_nbr", "eagle1_original"])
@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({**SLIDING, "use_sliding_window": True}, True),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}, True),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 28, "layer_types": None}, False),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"]}, False),
        ({**SLIDING, "use_sliding_window": False}, False),
        ({**SLIDING, "sliding_window": None}, False),
    ],
)
def test_eagle_head_with_a_sliding_window_is_refused(name: str, changes: Any, is_refused: bool, tmp_path: Path) -> None:
    """Would catch: a window that is ignored, so that drafts of long texts are those of another head."""
    folder = tmp_path / "head"
    shutil.copytree(FIXTURES[name].checkpoint_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("transformer_layer_config", config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"sliding window \(8 positions\)") if is_refused else nullcontext():
        load_head(folder)


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({**SLIDING, "use_sliding_window": True}, True),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}, True),
        ({**SLIDING, "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, False),
        ({**SLIDING, "use_sliding_window": False}, False),
    ],
)
def test_mtp_layer_of_speculators_with_a_sliding_window_is_refused(
    changes: Any, is_refused: bool, tmp_path: Path
) -> None:
    """Would catch: a window that is ignored; a refusal because of layers other than the first, which it has not."""
    folder = tmp_path / "head"
    shutil.copytree(FIXTURES["speculators_mtp_qwen3"].head_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["transformer_layer_config"]
    layers |= {"num_hidden_layers": len(changes["layer_types"] or layers["layer_types"]), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"type sliding_attention are not supp") if is_refused else nullcontext():
        load_mtp(FIXTURES["speculators_mtp_qwen3"].target, str(folder))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("output_multiplier", 2.0, "output_multiplier = '2.0', which may change what the head computes"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping = '30.0', which may change"),
        ("input_embedding_scale", 8.0, "input_embedding_scale = '8.0', which may change"),
        ("mask_token_id", 3, "mask_token_id = '3', which may change"),
        ("draft_vocab_size", 64, "draft_vocab_size 64, but this target has 128"),
        ("draft_vocab_size", 128, None),
        ("target_hidden_size", 32, "target_hidden_size 32, but this target has 64"),
    ],
)
def test_keys_of_heads_that_mtp_layers_do_not_read_are_refused(
    key: str, value: Any, words: str | None, tmp_path: Path
) -> None:
    """Would catch: a key that other heads read, as the factor of logits, and that is passed over here."""
    folder = tmp_path / "head"
    shutil.copytree(FIXTURES["speculators_mtp_qwen3"].head_folder, folder)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        load_mtp(FIXTURES["speculators_mtp_qwen3"].target, str(folder))


def test_mtp_layers_of_a_target_with_another_type_of_attention_are_refused() -> None:
    """Would catch: layers that attend to all positions in place of those that the target's config describes."""
    fixture = FIXTURES["mtp_qwen3_next_native"]
    model = copy.deepcopy(fixture.target)
    model.config.mtp_layer_types = ["linear_attention"]
    with pytest.raises(ValueError, match="MTP layers of type linear_attention are not supported"):
        load_mtp(model, str(fixture.checkpoint_folder))


REFUSED_LORA = {
    *("rank_pattern", "alpha_pattern", "megatron_config", "trainable_token_indices", "use_dora", "velora_config"),
    *("alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication", "lora_bias", "use_bdlora"),
    *("target_parameters", "arrow_config", "kasa_config", "ensure_weight_tying"),
}
"""Fields of `LoraConfig` that have to be empty."""


def test_every_field_of_the_lora_config_is_read_harmless_or_refused() -> None:
    """Would catch: a field of a new PEFT that changes what layers compute, and that nobody has decided on."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    accepted = checkpoint.USED_LORA_KEYS | checkpoint.IGNORED_LORA_KEYS
    assert fields - accepted - REFUSED_LORA == set(), "decide on these fields, see IGNORED_LORA_KEYS"
    checkpoint.check_plain_lora(LoraConfig().to_dict())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"init_lora_weights": init}, None) for init in (True, False, "gaussian", "orthogonal", "eva", "mica")),
        *(({"init_lora_weights": init}, f"init_lora_weights='{init}'") for init in ("pissa", "pissa_niter_4", "olora")),
        ({"use_rslora": True}, None),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens=\[3\]"),
        ({"use_dora": True}, "use_dora=True"),
    ],
)
def test_merged_adapter_computes_what_peft_computes_or_is_refused(changes: Any, reason: Any, tmp_path: Path) -> None:
    """Would catch: options of an adapter that change the base weights, or when it acts, taken for a plain LoRA."""
    model, ids = fresh_model("llama"), prompts(1)["input_ids"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **changes)
    adapted = get_peft_model(copy.deepcopy(model), config)
    for name, weight in adapted.named_parameters():
        if ".lora_" in name:
            weight.data += 0.05 * torch.randn_like(weight)
    adapted.save_pretrained(tmp_path)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            checkpoint.merge_adapter(model, Source(str(tmp_path)))
        return
    expected = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()(ids).logits
    checkpoint.merge_adapter(model, Source(str(tmp_path)))
    torch.testing.assert_close(model(ids).logits, expected)


def test_adapter_of_a_head_names_the_revision_of_its_base(folder: Path) -> None:
    """Would catch: an adapter that is merged into the newest revision instead of the one it was trained on."""
    config = {"base_model_name_or_path": "org/head", "revision": "v2"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(OSError, match="org/head@v2"):
        load_head(folder)


def test_embedded_adapters_still_load(reference_model: Any) -> None:
    """The checks refuse nothing that is right: also tensors, not only shapes, are those of the files."""
    head = load_exit_head(reference_model, BUNDLED_ADAPTER)
    saved = load_file(BUNDLED_ADAPTER / "adapter_model.safetensors")
    norm: Any = head.norm.weight
    assert torch.equal(norm, saved["base_model.model.norm.weight"].float()) and not norm.requires_grad
    heads: Any = load_head(BUNDLED_HEADS)
    of_lora = load_file(BUNDLED_HEADS / "lora" / "adapter_model.safetensors")
    assert torch.equal(heads.lora_B[3].weight, of_lora["base_model.model.heads.3.lora_B.weight"].bfloat16())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nonexistent/dir", "there is no folder '/nonexistent/dir'"),
        ("./folder", "there is no folder './folder'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("org/none", "org/none is not in the local cache, and the Hub cannot be reached; HF_HUB_OFFLINE is set"),
    ],
)
@pytest.mark.parametrize("load", [load_head, exit_layer_of])
def test_unknown_source_is_named(source: str, message: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a folder that does not exist looked up on the Hub, or an error without its name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=message):
        load(source)


def test_source_file_without_a_network_fails_soon_or_uses_the_cache(folder: Path, tmp_path: Path) -> None:
    """Would catch: half a minute of attempts for every file, and then "has no config.json" instead of the reason."""
    begin, cache = perf_counter(), tmp_path / "hub"
    with (
        unreachable_hub(),
        pytest.raises(FileNotFoundError, match=r"org/none is not in .* cache, .* reached \(.*refused"),
    ):
        AutoCandidates.from_pretrained("org/none", cache_dir=cache)
    shutil.copytree(folder, cache / "models--org--head" / "snapshots" / ("01" * 20))
    (cache / "models--org--head" / "refs").mkdir()
    (cache / "models--org--head" / "refs" / "main").write_text("01" * 20)
    with unreachable_hub():
        assert isinstance(AutoCandidates.from_pretrained("org/head", cache_dir=cache), EagleCandidates)
    assert perf_counter() - begin < 10


@pytest.mark.parametrize("error", [KeyError("model_type"), RecursionError("deep"), AttributeError("x"), TypeError("y")])
def test_source_errors_other_errors_become_a_value_error_with_the_name(error: Exception) -> None:
    """Would catch: an error of a library from which one cannot see which checkpoint it is about."""
    with pytest.raises(ValueError, match=f"cannot load 'org/a': {type(error).__name__}"), source_errors("org/a"):
        raise error


@pytest.mark.parametrize("tokens", [120, 90])
def test_head_of_a_target_that_was_resized_is_bound_anew(tokens: int) -> None:
    """Would catch: drafts with the output matrix from before, or an index out of bounds where it is smaller now."""
    target = fresh_model("llama")
    candidates = MedusaCandidates(random_heads(target))
    target.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
    target.resize_token_embeddings(tokens, mean_resizing=False)
    with pytest.raises(ValueError, match=f"with a vocabulary of 99, but this target has {tokens}"):
        target.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)


def test_head_of_a_target_with_an_adapter_on_its_output_matrix_names_the_remedy() -> None:
    """Would catch: a refusal that calls the output matrix non-linear."""
    target = fresh_model("llama")
    candidates = MedusaCandidates(random_heads(target))
    adapted = get_peft_model(target, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"merge an adapter on it into the model \(merge_and_unload\(\)\)"):
        adapted.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)


def test_head_with_ids_outside_of_the_target_is_refused() -> None:
    """Would catch: an embedding that is read out of bounds."""
    head = small_eagle()
    head.draft_to_target += 10**6
    with pytest.raises(ValueError, match="draft_to_target of Eagle3Head has ids that are not below"):
        head.bind(fresh_model("llama"))


NOT_READ: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["Qwen3XPressModel"]}, "fc.weight", "xPress heads, whose refiner"),
    ({"speculators_model_type": "xpress"}, "fc.weight", "xPress heads, whose refiner"),
    ({"architectures": ["DFlashLagunaForCausalLM"]}, "fc.weight", "DFlash heads of Laguna, with gates"),
    ({"architectures": ["KimiK3DSpark4KDA1MLADraftModel"]}, "fc.weight", "recurrent layers"),
    ({"architectures": "MLPSpeculatorPreTrainedModel"}, "speculator.emb.0.weight", "MLP speculators of IBM"),
    ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "emb.weight", "LSTM speculators of Snowflake"),
    ({"architectures": ["DeepseekV4ForCausalLM"]}, "mtp.0.attn.wq_a.weight", "DSpark layers inside a DeepSeek-V4"),
]


@pytest.mark.parametrize("load", [load_head, AutoCandidates.from_pretrained])
@pytest.mark.parametrize(("config", "tensor", "reason"), NOT_READ)
def test_known_format_that_is_not_read_is_refused_by_name(
    config: dict[str, Any], tensor: str, reason: str, load: Any, tmp_path: Path
) -> None:
    """Would catch: a head that is taken for another one, or for a draft model, or a reason that names tensors only."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({tensor: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{reason}.* not supported; load a head of another format"):
        load(tmp_path)
