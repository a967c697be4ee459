"""The keys of a head's config.json: those that are read, those that change nothing, and the values of all others.

A key that changes the computation changes no shape, so a reader that overlooks it loads the head without an error, and
hardly any draft token is accepted. So every key has to be in one of the tables of this file; another one is refused,
unless its value is empty, or false for an option such as `use_…`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from transformers import PretrainedConfig

from hf_specgen.heads.checkpoint import Fields


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


GENERAL = PretrainedConfig().to_dict().keys() | _names("tie_word_embeddings use_cache")
"""Keys that every config of Transformers has; none of them changes what a head computes."""
ROPE = _names(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow truncate "
    "short_factor long_factor low_freq_factor high_freq_factor mscale mscale_all_dim partial_rotary_factor rope_dim "
    "mrope_section mrope_interleaved"
)
"""Keys of rotary parameters; the sections of "mrope" change nothing where there is only text."""
ANYWHERE = _names("rope_is_neox_style is_neox_style use_gemma_norm attention_value_scale attention_sink_bias")
"""Keys that are read wherever they stand."""
LAYERS = ANYWHERE | _names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim v_head_dim "
    "vocab_size hidden_act rms_norm_eps max_position_embeddings rope_parameters rope_scaling rope_theta "
    "partial_rotary_factor swiglu_alpha swiglu_limit layer_types sliding_window use_sliding_window max_window_layers "
    # Whether there are biases is seen in the tensors; Llama computed the same in slices (tensor parallelism).
    "attention_bias mlp_bias pretraining_tp"
)
"""Keys of layers of Llama, Qwen2 and Qwen3."""
GEMMA = _names(
    "attention_k_eq_v enable_moe_block hidden_activation hidden_size_per_layer_input num_kv_shared_layers "
    "per_layer_config use_double_wide_mlp vocab_size_per_layer_input global_head_dim "
    "num_global_key_value_heads final_logit_softcapping"
)
"""Further keys of layers of Gemma 4."""
LATENT = _names(
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim rope_interleave mla_use_output_gate "
    # Of experts, which dense layers do not have.
    "n_group topk_group topk_method scoring_func routed_scaling_factor first_k_dense_replace ep_size seq_aux"
)
"""Further keys of layers with multi-head latent attention."""
MASK_TOKEN_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Names of the token that stands for positions which are predicted in parallel; earlier ones count more."""
HEAD = ANYWHERE.union(MASK_TOKEN_FIELDS) | _names(
    "target_hidden_size draft_vocab_size trained_length num_target_layers logit_scale output_multiplier "
    "final_logit_softcapping input_embedding_scale eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids "
    "target_layer_ids block_size bias"
)
"""Keys that any head may have."""
EAGLE1 = HEAD - {"input_embedding_scale"}
EAGLE3 = HEAD | _names("norm_before_residual norm_before_fc fc_norm use_aux_norm norm_output use_aux_hidden_state")
BLOCK = HEAD | _names(
    "projector_type sample_from_anchor shift_label dspark_bonus_anchor causal_head causal is_causal "
    "sliding_window_non_causal use_swa swa_window_size"
)
DSPARK = BLOCK | _names(
    "markov_rank markov_head_type enable_confidence_head use_confidence_head confidence_head_with_markov "
    "dspark_block_size dspark_markov_rank dspark_markov_head_type dspark_target_layer_ids ffn_hidden_size"
)
DFLASH2 = BLOCK | _names("conv_kernel_size conv_group_size selector_rank selector_top_k")
LILICORR = BLOCK - {"output_multiplier", "final_logit_softcapping"} | _names(
    "lilicorr_candidate_topk lilicorr_num_layers lilicorr_num_heads lilicorr_factor_dim lilicorr_mlp_ratio "
    "lilicorr_vector_eps lilicorr_logit_scale lilicorr_hidden_size lilicorr_enabled conv_kernel_size conv_group_size"
)
DOMINO = BLOCK | _names("emb_dim gru_hidden_dim pure_draft_prefix_len")
MEDUSA = _names(
    "medusa_num_heads medusa_num_layers num_heads num_layers lora_rank own_outputs reads_path reads_token acceptance "
    "truncated_vocab_size original_lm_head medusa_fc_bias base medusa_choices logit_scale"
)
MTP = _names("target_hidden_size draft_vocab_size")
ASSISTANT = _names("backbone_hidden_size use_ordered_embeddings num_centroids centroid_intermediate_top_k")
VALUES: Mapping[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "lilicorr_enabled": (False,),
    "add_full_attention_sink_bias": (True, False),  # as the tensors say
    "add_swa_attention_sink_bias": (True, False),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "swiglu_beta": (1, 1.0),
    "qk_norm_type": ("per_head",),
    "use_qk_norm": (True,),
    **dict.fromkeys(("use_dense_ffn", "dspark_use_dense_ffn"), (True,)),
    **dict.fromkeys(("hybrid_context_fusion", "dspark_hybrid_context_fusion"), (False,)),
    "tie_embedding_weights": (False,),
    "position_embedding_type": ("absolute", "rope"),
    "torchscript": (False,),
    "is_decoder": (True, False),
    "use_bidirectional_attention": ("vision",),  # Gemma 4; "all" is of text too
}
"""Keys that change the computation and are not read otherwise, each with the values that mean what heads compute."""
OBJECTS = _names(
    "auto_map speculators_config quantization_config vision_config audio_config task_specific_params id2label label2id "
    "generation_config pruned_heads training_config training_args"
)
"""Objects of which nothing is read here."""
OPTIONS = DSPARK | EAGLE3
"""Keys of other formats, which are off where they are false."""
HARMLESS_NAMES = re.compile(
    r"_.*|(bos|eos|pad|sep|unk|image|video|audio|vision_start|vision_end|decoder_start)_token_(id|ids|index)"
    r"|(.*_)?(version|commit|license|author|url|path|dataset|description|comment|date|seed|language)"
    r"|(base|model|base_model|target|verifier|run|project)_name"
    r"|(train|training|loss|optim|optimizer|lr|learning|warmup|epoch|wandb|log|ttt|step_loss|lambda_base)_.*"
    r"|.*dropout(_rate|_prob)?|.*_loss_(coef|alpha|weight)|initializer.*|init_.*|gradient_.*"
    r"|(torch_)?dtype|name|tags|metrics|model_max_length|speculators_model_type|embed_requires_grad|tokenizer_class"
    r"|(num|max)_anchors|num_eagle_features|has_lm_head|spd_type|modal_type|length|speculative_.*|qkv_bias"
    r"|use_(return_dict|bfloat16)|finetuning_task|tf_legacy_loss|cross_attention_hidden_size|tie_encoder_decoder"
    # Of a target from which the config was copied; layers that were built by them would have other tensors.
    r"|.*experts?(_.*)?|moe_.*|router_.*|decoder_sparse_step|norm_topk_prob|output_router_logits|mlp_only_layers"
    r"|linear_(conv|key|value|num)_.*|mamba_.*|mtp_.*|num_nextn_.*|full_attention_interval|attn_output_gate"
    r"|parallel_draft_heads_num_layers|output_gate_type|backbone_rotary_base"
)
"""Names of keys that change nothing: identities, training, and parts of a target that have tensors of their own."""
OPTION = re.compile(r"(use|enable|has|add|with|return|output|do|include)_.*|is_.*encoder.*|cross_attention_.*")
"""Names of options that are off where they are false."""
ROTARY_OBJECTS = frozenset(("rope_parameters", "rope_scaling", "sliding_attention", "full_attention"))
OF_MINIMAX = re.compile(
    r"text_config|(dspark_ffn_hidden|(dense|shared)_intermediate)_size|rotary_dim|partial_rotary_factor|mlp_layer_types"
    r"|index_.*|routed_.*"
)
"""Keys of a MiniMax-M3 config that its DSpark head has under other names, or that concern experts and sparse layers."""
HEAD_OBJECTS = ("eagle_config", "dflash_config", "dspark_config")  # later ones count more
PREFIXED = ("dspark_block_size", "dspark_markov_rank", "dspark_markov_head_type")
LAYER_OBJECTS = frozenset(("transformer_layer_config", "text_config"))


def merged_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the fields of its objects for heads at its top; MiniMax-M3 has some with a prefix there."""
    merged = dict(config)
    for name in HEAD_OBJECTS:
        inside = Fields(config).nested(name).values
        merged |= {key: value for key, value in inside.items() if value is not None}
    prefixed = {key.removeprefix("dspark_"): value for key, value in config.items() if key in PREFIXED}
    return merged | prefixed


def with_layers_of_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config; that of the DSpark head in a MiniMax-M3 checkpoint in the form of one with layers of Qwen3.

    Its layers are described in `text_config`, attend in both directions, and have an MLP size of their own.
    """
    if "DSparkMiniMaxDraftModel" not in str(config.get("architectures")):
        return dict(config)
    fields = Fields({**config, **Fields(config).nested("text_config").values})
    rope = {**fields.nested("rope_parameters").values}
    factor = rope.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor")
    rope["rope_dim"] = fields.integer("rotary_dim", 2) if factor is None else int(factor * fields.integer("head_dim"))
    kept = {name: value for name, value in fields.values.items() if not OF_MINIMAX.fullmatch(name)}
    size = fields.optional_integer("dspark_ffn_hidden_size") or fields.integer("dense_intermediate_size")
    own = {"model_type": "qwen3", "is_causal": False, "use_sliding_window": True, "intermediate_size": size}
    return kept | own | {"rope_parameters": rope}


def check_keys(config: Mapping[str, Any], head: Set[str], further: Set[str] = frozenset()) -> None:
    """Raise a `ValueError` for the first key of config.json whose value may change the computation, and is not read.

    Beside the keys of `head`, those of layers of Llama, Qwen3, Gemma 4 and DeepSeek are read, and `further` ones.
    """
    nested = next((config[name] for name in sorted(LAYER_OBJECTS) if isinstance(config.get(name), dict)), None)
    of_layers = config if nested is None else nested
    layers = LAYERS | further
    if str(of_layers.get("model_type")).startswith("gemma4"):
        layers |= GEMMA
    if of_layers.get("kv_lora_rank") is not None:
        layers |= LATENT
    # Without an object for the layers, their keys are beside those of the head.
    _check(config, head | layers if nested is None else head, layers, head)


def check_read(values: Mapping[str, Any], read: Set[str]) -> None:
    """Raise, as `check_keys` does, for the first key that may change the computation and is not in `read`."""
    _check(values, read, frozenset(), read)


def _check(config: Mapping[str, Any], read: Set[str], layers: Set[str], head: Set[str], prefix: str = "") -> None:
    """Check an object of the config, of which the keys `read` are read, and the objects inside.

    `layers` and `head` are the keys that are read of objects for the layers and for the head. `prefix` is the path of
    the object in the config, with a dot at its end.
    """
    for name, value in config.items():
        inside = f"{prefix}{name}."
        if isinstance(value, dict) and name in ROTARY_OBJECTS:
            _check(value, ROPE, layers, head, inside)
        elif isinstance(value, dict) and name in HEAD_OBJECTS:
            _check(value, head, layers, head, inside)
        elif isinstance(value, dict) and name in LAYER_OBJECTS:
            _check(value, layers, layers, head, inside)
        elif value is not None and not _is_harmless(name, value, read):
            values = f" ({' or '.join(map(str, VALUES[name]))} is)" if name in VALUES else ""
            raise ValueError(
                f"config.json has {prefix}{name} = {str(value)[:80]!r}, which may change what the head computes and is "
                f"not read{values}; if it does not, remove it from config.json"
            )


def _is_harmless(name: str, value: Any, read: Set[str]) -> bool:
    """Whether a key is read, or changes nothing with this value."""
    if name in read or name in GENERAL or name in OBJECTS:
        return True
    if name in VALUES:
        return value in VALUES[name]
    if value in ([], {}, "") or HARMLESS_NAMES.fullmatch(name):
        return True
    return value is False and (OPTION.fullmatch(name) is not None or name in OPTIONS)
