"""Tiny random models with convolutions, recurrent states and indexed attention."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.helpers.models import SHARED, VOCAB

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Attention over latent keys and values."""
INDEXED: dict[str, Any] = {
    **LATENT,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "pad_token_id": None,
}
"""The indexer selects fewer tokens than the prompt has. Exact ties among its scores fall by the layout of memory: with
few heads many scores would be 0, as would those of a padding token, whose embedding is 0."""
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}

CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "conv_L_cache": 3,
        "sliding_window": 8,
    },
}
INDEXED_ATTENTION: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**INDEXED, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**INDEXED, "first_k_dense_replace": 1},
    "hy_v4": {**INDEXED, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": DELTA["layer_types"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "kimi_linear": {
        **LATENT,
        "layer_types": DELTA["layer_types"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "topk_group": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "chunk_size": 8,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
}
COUNTING_SLOTS: dict[str, dict[str, Any]] = {
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "d_rel": 8,
        "rel_extent": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }
}
"""Positions are counted in the cache, whose rows may have different lengths."""
CONFIGS = {**CONVOLUTIONAL, **INDEXED_ATTENTION, **RECURRENT, **COUNTING_SLOTS}


@cache
def stateful_model(kind: str) -> Any:
    """A random model, shared by the tests of a file: never change it."""
    config = CONFIG_MAPPING[kind](**{**TEXT, **CONFIGS[kind]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that logits are far apart: chunked and recurrent kernels round differently
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 3
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    SHARED.add(model)
    return model
