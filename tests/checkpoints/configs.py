"""Tiny configurations of any type: each part is given the small sizes whose names it knows."""

from typing import Any

from transformers import CONFIG_MAPPING

from tests.fuzz.models import DEPTHS, LAYER_KINDS, POSITIONS, SIZES, VOCAB, takes

IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = VOCAB - 1, VOCAB - 2, VOCAB - 3
"""Placeholders of features in the text."""
FIRST_SPECIAL = 84
"""Prompts and texts consist of smaller ids; special tokens begin here."""
MEDIA = 32
"""Width of encoders."""

TEXT: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name not in ("vision_config", "is_decoder")},
    **{"d_kv": 16, "d_ff": 96, "text_vocab_size": VOCAB, "rotary_dim": 8, "num_kv_shared_layers": 0, "eos_token_id": 2},
    **{"n_shared_experts": 1, "moe_num_shared_experts": 1, "moe_k": 2, "mamba_n_heads": 4, "mamba_d_head": 32},
    **{"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8, "state_size": 16, "lru_width": 64},
    **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "dense_intermediate_size": 96, "laurel_rank": 8},
    **{"shared_intermediate_size": 48, "attention_window_size": 8, "altup_num_inputs": 2},
    **dict.fromkeys(("projection_dim", "projector_hidden_size", "alignment_intermediate_size"), 64),
    **dict.fromkeys(POSITIONS, 256),
    **dict.fromkeys(DEPTHS, 2),
}
ENCODER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "num_filters", "projector_input_dim"), MEDIA),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_hidden_size"), MEDIA),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "decoder_attention_heads", "conf_num_attention_heads"), 2),
    **dict.fromkeys((*DEPTHS, "depth", "num_blocks", "conf_num_hidden_layers"), 2),
    **dict.fromkeys(("out_hidden_size", "output_dim", "projection_dim", "projector_output_dim"), 64),
    **{"image_size": 16, "patch_size": 4, "num_position_embeddings": 16, "head_dim": 16, "window_size": 16},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1], "num_mel_bins": 8, "max_source_positions": 8},
    **{"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256},
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
}
WHOLE: dict[str, Any] = {
    **TEXT,
    **dict.fromkeys(("image_token_id", "image_token_index", "image_patch_id"), IMAGE_TOKEN),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO_TOKEN),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO_TOKEN),
    **{"vision_start_token_id": 95, "vision_end_token_id": 94, "image_start_token_id": 95, "image_end_token_id": 94},
    **{"video_start_token_id": 93, "video_end_token_id": 92, "audio_start_token_id": 91, "audio_end_token_id": 90},
    **dict.fromkeys(("boi_token_id", "boi_token_index"), 95),
    **dict.fromkeys(("eoi_token_id", "eoi_token_index"), 94),
    **dict.fromkeys(("boa_token_id", "boa_token_index"), 91),
    **dict.fromkeys(("eoa_token_id", "eoa_token_index"), 90),
    **dict.fromkeys(("mm_tokens_per_image", "num_query_tokens", "vision_soft_tokens_per_image"), 4),
    **{"decoder_start_token_id": 3, "forced_eos_token_id": None, "forced_bos_token_id": None},
}
TEXT_PARTS = ("text_config", "decoder", "decoder_config")


def tiny_config(kind: str, **given: Any) -> Any:
    """A tiny configuration of a type; `given` comes first, for a part as the dictionary of its name.

    A part may be of another type, its `model_type`; `layers` of a part has a letter of `LAYER_KINDS` for each layer.
    """
    return _part(CONFIG_MAPPING[kind], WHOLE, given)


def _part(config_class: Any, sizes: dict[str, Any], given: dict[str, Any]) -> Any:
    parts: dict[str, Any] = getattr(config_class, "sub_configs", {})
    kinds = {name: {"model_type": value["model_type"]} for name, value in given.items() if "model_type" in _dict(value)}
    known = config_class(**{name: kinds.get(name, {}) for name in parts if name in kinds})
    arguments = {name: value for name, value in sizes.items() if name not in parts and takes(known, name)}
    given = dict(given)
    if hasattr(known, "qk_rope_head_dim"):  # of which latent attention computes it
        arguments.pop("head_dim", None)
    layers = given.pop("layers", "")
    if layers:
        arguments |= dict.fromkeys([name for name in DEPTHS if name in arguments], len(layers))
        arguments["layer_types"] = [LAYER_KINDS.get(letter, letter) for letter in layers]
    for name in parts:
        default = getattr(known, name, None)
        if default is not None:
            of_part = dict(given.pop(name, {}))
            of_part.pop("model_type", None)
            sizes_of_part = WHOLE if name in TEXT_PARTS else ENCODER
            arguments[name] = _part(type(default), sizes_of_part, of_part)
    return config_class(**{**arguments, **given})


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
