"""MTP layers of a target's own checkpoint, against what Transformers computes where it can use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from hf_specgen.heads.mtp import load_mtp
from tests.helpers.head_sessions import LayeredMTP

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def save_checkpoint(folder: Path, mtp_layers: int) -> None:
    """A tiny DeepSeek-V3 with MTP layers behind its own."""
    torch.manual_seed(0)
    longer = DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=LAYERS + mtp_layers, **SIZES))
    longer.save_pretrained(folder)
    tensors = {name: torch.randn_like(value) * 0.2 for name, value in load_file(folder / "model.safetensors").items()}
    for layer in range(LAYERS, LAYERS + mtp_layers):
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.2 * torch.randn(32)
        tensors[f"model.layers.{layer}.eh_proj.weight"] = 0.2 * torch.randn(32, 64)
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": mtp_layers, "num_mtp_layers": mtp_layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def load_target(folder: Path, attention: str = "sdpa") -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mtp_layers", [1, 2, 3])
@torch.no_grad()
def test_mtp_layers_draft_what_transformers_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mtp_layers: int, attention: str
) -> None:
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this Transformers has no MTP")
    save_checkpoint(tmp_path, mtp_layers)
    # Transformers finds MTP layers by the numbers that they have in published checkpoints.
    patterns = [rf"model\.layers\.{LAYERS + layer}\." for layer in range(mtp_layers)]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    target: Any = load_target(tmp_path, attention)
    reference = modeling_layers.MtpModel.from_pretrained(target).eval()
    text = torch.randint(48, (1, 12))
    states = target(text, output_hidden_states=True).hidden_states[-1]
    next_token = torch.tensor([[7]])
    cache = cache_utils.MtpCache(config=target.config.get_mtp_config())
    shifted = torch.cat((text[:, 1:], next_token), dim=1)
    tokens, logits, _ = reference(shifted, states, None, torch.arange(1, 13)[None], cache)

    bound = load_mtp(target).bind(target)
    session = LayeredMTP(bound, 1)
    # In two pieces, so that the last positions are read again by all layers.
    session.round([states[0, :8]], [shifted[0, :8]])
    _, own_logits, own_tokens = session.round([states[0, 8:]], [shifted[0, 8:]])
    assert bound.aux_hidden_state_layers == (LAYERS,)
    torch.testing.assert_close(own_logits[0], logits[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(own_tokens[0], tokens[0])


def test_mtp_of_checkpoint_without_any_raises(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 0)
    with pytest.raises(ValueError, match=r"no MTP layers: neither .* nor mtp\.fc\.weight"):
        load_mtp(load_target(tmp_path))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("eh_proj.weight", "no MTP layers"),
        ("hnorm.weight", r"has no hnorm\.weight"),
        ("self_attn.o_proj.weight", "missing_keys: .*o_proj"),
        ("mlp.experts.1.up_proj.weight", "do not fit this target"),
    ],
)
def test_mtp_with_missing_tensor_raises(tmp_path: Path, part: str, reason: str) -> None:
    save_checkpoint(tmp_path, 1)
    target = load_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.{part}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        load_mtp(target)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("eh_proj.weight", torch.zeros(32, 32), r"has shape \(32, 32\)"),
        ("enorm.weight", torch.zeros(32, dtype=torch.int8), "dtype torch.int8"),
        ("self_attn.o_proj.weight", torch.zeros(3, 3), "do not fit this target"),
        ("self_attn.o_proj.weight", torch.zeros(32, 16, dtype=torch.int8), "quantised MTP layers"),
        ("self_attn.extra.weight", torch.zeros(2), "unexpected_keys: .*extra"),
    ],
)
def test_mtp_with_wrong_tensor_raises(tmp_path: Path, part: str, value: torch.Tensor, reason: str) -> None:
    save_checkpoint(tmp_path, 1)
    target = load_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {f"model.layers.{LAYERS}.{part}": value}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        load_mtp(target)


def test_mtp_of_target_without_a_name_raises() -> None:
    target: Any = DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=LAYERS, **SIZES))
    with pytest.raises(ValueError, match="name its checkpoint"):
        load_mtp(target)


def test_loading_mtp_leaves_the_target_and_its_config_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1)
    target = load_target(tmp_path)
    before = target.config.to_dict()
    names = {name for name, _ in target.named_modules()}
    load_mtp(target)
    assert target.config.to_dict() == before and {name for name, _ in target.named_modules()} == names
