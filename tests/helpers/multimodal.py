"""Tiny random models that read images or audio beside text, and prompts for them."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, Qwen2AudioForConditionalGeneration

from tests.helpers.models import VOCAB

FEATURE_TOKEN = VOCAB - 1
"""The placeholder of one image or audio feature in the text."""
FEATURES = 4
"""Placeholders per image or recording."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
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


def _llava() -> Any:
    vision = CONFIG_MAPPING["clip_vision_model"](**{**VISION, "image_size": 8})
    return {"vision_config": vision, "text_config": CONFIG_MAPPING["llama"](**TEXT), "image_token_index": FEATURE_TOKEN}


def _idefics3() -> Any:
    text = CONFIG_MAPPING["llama"](**TEXT)
    return {
        "vision_config": VISION,
        "text_config": text,
        "image_token_id": FEATURE_TOKEN,
        "scale_factor": 2,
        "pad_token_id": 0,
    }


def _gemma3() -> Any:
    text = CONFIG_MAPPING["gemma3_text"](**TEXT, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    vision = CONFIG_MAPPING["siglip_vision_model"](**VISION)
    return {
        "vision_config": vision,
        "text_config": text,
        "mm_tokens_per_image": FEATURES,
        "image_token_index": FEATURE_TOKEN,
    }


def _qwen2_5_vl() -> Any:
    return {
        "text_config": {**TEXT, "rope_parameters": SEVERAL_AXES},
        "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    }


def _qwen3_vl() -> Any:
    return {
        "text_config": {**TEXT, "rope_parameters": {**SEVERAL_AXES, "mrope_interleaved": True}},
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    }


def _qwen2_audio() -> Any:
    audio = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 8,
    }
    return {"audio_config": audio, "text_config": {"model_type": "qwen2", **TEXT}, "audio_token_index": FEATURE_TOKEN}


CONFIGS = {
    "llava": _llava,
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen2_audio": _qwen2_audio,
}
MULTIMODAL = list(CONFIGS)


@cache
def multimodal_model(kind: str) -> Any:
    """A random model, shared by the tests of the process: never change it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**CONFIGS[kind]())
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
