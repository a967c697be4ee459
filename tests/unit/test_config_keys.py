"""Keys of a head's config.json that are not known to change nothing are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hf_specgen.candidates.parallel_draft import ParallelDraft
from hf_specgen.heads import config_keys
from hf_specgen.heads.config_keys import HEAD, check_keys
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from tests.helpers.head_fixtures import FIXTURES

HEADS = [name for name, one in FIXTURES.items() if "head" in one.expected and not name.startswith("medusa")]
PLACES = ("transformer_layer_config", "text_config", "dflash_config", "rope_parameters")


@pytest.mark.parametrize("name", [*HEADS, "medusa_v1"])
def test_key_that_is_not_known_raises_in_every_format_and_place(name: str, tmp_path: Path) -> None:
    """Would catch: a head that is computed without what a new key means, and whose drafts are never accepted."""
    shutil.copytree(FIXTURES[name].head_folder, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    is_model = name.startswith("pard")  # whose objects for layers Transformers reads

    def load() -> None:
        if name == "speculators_mtp_qwen3":
            load_mtp(FIXTURES[name].target, str(path.parent))
        elif is_model:
            ParallelDraft.from_model(AutoModelForCausalLM.from_pretrained(path.parent))
        else:
            load_head(path.parent)

    load()
    for place in (None, *PLACES):
        if place is not None and (is_model or place not in config):
            continue
        changed = json.loads(json.dumps(config))
        (changed if place is None else changed[place])["attention_wobble"] = 0.7
        path.write_text(json.dumps(changed))
        key = "attention_wobble" if place is None else f"{place}.attention_wobble"
        with pytest.raises(ValueError, match=rf"head: config.json has {key} = '0.7', which may change what"):
            load()


QWEN3: dict[str, Any] = {
    **{"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128},
    **{
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
    },
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_target_layers": 64, "vocab_size": 248320},
    **{"max_position_embeddings": 262144, "tie_word_embeddings": False, "eos_token_id": 248044, "sliding_window": 2048},
}
DFLASH2 = {"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
PUBLISHED: dict[str, tuple[frozenset[str], dict[str, Any]]] = {
    "DFlash2 for Qwen3.8": (
        config_keys.DFLASH2,
        {
            **{"architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 5},
            **{"dflash_config": DFLASH2, "max_window_layers": 5, "use_sliding_window": True, "dtype": "bfloat16"},
            **{"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "initializer_range": 0.02},
        },
    ),
    "DFlash2 for Muse Glimmer": (
        config_keys.DFLASH2,
        {"dflash_config": {**DFLASH2, "final_logit_softcapping": 20.0, "output_multiplier": 0.196}},
    ),
    "DFlash for MiMo-V2.5": (
        config_keys.BLOCK,
        {
            **{"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "v_head_dim": 128, "partial_rotary_factor": 0.5},
            "dflash_config": {
                **{"target_layer_ids": [0, 15], "mask_token_id": 151669, "num_anchors": 4096, "loss_decay_gamma": 7.0},
                **{"use_swa": True, "swa_window_size": 1024, "backbone_rotary_base": 5000000, "block_size": 8},
                **{"attention_value_scale": 0.612, "attention_sink_bias": True},
            },
        },
    ),
}
"""Keys of published configs, without those of identities."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_configs_are_known(name: str) -> None:
    """Would catch: a published head that is refused for a key which says nothing of its computation, or is read."""
    keys, config = PUBLISHED[name]
    check_keys(QWEN3 | config, keys)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("residual_multiplier", 0.5, r"residual_multiplier = '0.5'.* is not read \(1 or 1.0 is\)"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping = '50.0'"),
        ("eagle_config", {"use_last_layernorm": False}, r"eagle_config.use_last_layernorm = 'False'.* \(True is\)"),
        ("rope_scaling", {"rope_type": "yarn", "ramp": 3}, "rope_scaling.ramp = '3'"),
        ("is_upside_down", False, "is_upside_down = 'False'"),
        ("markov_rank", 8, "markov_rank = '8'"),
        ("residual_multiplier", 1.0, None),
        ("markov_rank", False, None),
        ("use_wobble", False, None),
        ("attention_wobble", None, None),
        ("num_experts_per_tok", 8, None),
        ("image_token_id", 8, None),
        ("quantization_config", {"quant_method": "fp8"}, None),
    ],
)
def test_values_of_keys_that_are_not_read(key: str, value: Any, reason: str | None) -> None:
    """Would catch: options that are off, training data or parts of a target taken for something unknown."""
    config = {"model_type": "llama", "hidden_act": "silu", key: value}
    if reason is None:
        return check_keys(config, HEAD)
    with pytest.raises(ValueError, match=reason):
        check_keys(config, HEAD)


def test_attention_to_later_tokens_of_gemma_is_refused() -> None:
    """Would catch: a head that attends in both directions, and is computed as a causal one."""
    config = {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    check_keys(config, config_keys.EAGLE3)
    with pytest.raises(ValueError, match=r"use_bidirectional_attention = 'all'.* is not read \(vision is\)"):
        check_keys(config | {"use_bidirectional_attention": "all"}, config_keys.EAGLE3)
