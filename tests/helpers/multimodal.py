"""Tiny random models that read images or audio beside text, and prompts for them."""

import copy
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, Qwen2AudioForConditionalGeneration

from tests.helpers.models import VOCAB
from tests.helpers.stateful import TEXT as STATEFUL_TEXT

FEATURE_TOKEN = VOCAB - 1
"""The placeholder of one image or audio feature in the text."""
FEATURES = 4
"""Placeholders per image or recording."""
TEXT = {**STATEFUL_TEXT, "num_hidden_layers": 2, "eos_token_id": None, "initializer_range": 0.2}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SEVERAL_AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
QWEN_TOKENS = {
    "image_token_id": FEATURE_TOKEN,
    "video_token_id": VOCAB - 2,
    "vision_start_token_id": VOCAB - 3,
    "vision_end_token_id": VOCAB - 4,
}


LLAMA: dict[str, Any] = {"model_type": "llama", **TEXT}
AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 8,
}
WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 8},
        "text_config": LLAMA,
        "image_token_index": FEATURE_TOKEN,
    },
    "idefics3": {
        "vision_config": VISION,
        "text_config": LLAMA,
        "image_token_id": FEATURE_TOKEN,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "text_config": {"model_type": "gemma3_text", **TEXT, **WINDOWS},
        "mm_tokens_per_image": FEATURES,
        "image_token_index": FEATURE_TOKEN,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": SEVERAL_AXES},
        "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {**SEVERAL_AXES, "mrope_interleaved": True}},
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    },
    "qwen2_audio": {
        "audio_config": AUDIO,
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_token_index": FEATURE_TOKEN,
    },
}
MULTIMODAL = list(CONFIGS)


@cache
def multimodal_model(kind: str) -> Any:
    """A random model, shared by the tests of the process: never change it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**copy.deepcopy(CONFIGS[kind]))
    if kind == "qwen2_audio":
        model = Qwen2AudioForConditionalGeneration(config).eval()
    else:
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def multimodal_prompts(kind: str, batch: int, length: int = 16) -> dict[str, torch.Tensor]:
    """Prompts of different lengths with one image or recording each, at different places."""
    generator = torch.Generator().manual_seed(5)
    input_ids = torch.randint(2, 90, (batch, length), generator=generator)
    mask = torch.ones_like(input_ids)
    for row in range(batch):
        padding, first = 3 * row, 3 * row + 2
        input_ids[row, :padding], mask[row, :padding] = 0, 0
        input_ids[row, first : first + FEATURES] = FEATURE_TOKEN
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    types = (input_ids == FEATURE_TOKEN).long()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "llava":
        return {**inputs, "pixel_values": random(batch, 3, 8, 8)}
    if kind == "idefics3":
        return {**inputs, "pixel_values": random(batch, 1, 3, 16, 16)}
    if kind == "gemma3":
        return {**inputs, "pixel_values": random(batch, 3, 16, 16), "token_type_ids": types}
    if kind == "qwen2_audio":
        return {
            **inputs,
            "input_features": random(batch, 8, 16),
            "feature_attention_mask": torch.ones(batch, 16, dtype=torch.long),
        }
    return {
        **inputs,
        "mm_token_type_ids": types,
        "pixel_values": random(batch * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
    }
