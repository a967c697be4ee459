"""Tiny random models that read images or audio beside text, and prompts for them."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, Qwen2AudioForConditionalGeneration

from tests.helpers.models import SPEC, VOCAB

FEATURE_TOKEN = VOCAB - 1
"""The placeholder of one image or audio feature in the text."""
FEATURES = 4
"""Placeholders per image or recording."""
MULTIMODAL = list(SPEC["multimodal"])


@cache
def multimodal_model(kind: str) -> Any:
    """A random model, shared by the tests of the process: never change it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SPEC["multimodal"][kind])
    if kind == "qwen2_audio":
        model = Qwen2AudioForConditionalGeneration(config).eval()
    else:
        attention = "eager" if kind in SPEC["eager_only"] else "sdpa"
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).eval()
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
    if kind == "paligemma":
        return {**inputs, "pixel_values": random(batch, 3, 16, 16), "token_type_ids": torch.zeros_like(input_ids)}
    if kind == "exaone4_5":
        grids = torch.tensor([[1, 4, 4]] * batch)
        return {**inputs, "pixel_values": random(batch * 16, 3 * 2 * 4 * 4), "image_grid_thw": grids}
    if kind == "qwen2_audio":
        seen = torch.ones(batch, 16, dtype=torch.long)
        return {**inputs, "input_features": random(batch, 8, 16), "feature_attention_mask": seen}
    return {
        **inputs,
        "mm_token_type_ids": types,
        "pixel_values": random(batch * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
    }
