"""Prompts of a text with one image or recording, as a processor would make them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from tests.checkpoints.configs import AUDIO_TOKEN, FIRST_SPECIAL, IMAGE_TOKEN
from tests.checkpoints.table import Checkpoint

Inputs = dict[str, torch.Tensor]
Random = Callable[..., torch.Tensor]
SIDE = 16
"""Pixels of an image, in both directions."""
PATCHES = 4
"""Patches of an image, in both directions."""
TEXT_LENGTH = 12
AUDIO = ("mel", "mel_seen", "mel_masked", "mel_last", "wave")


def text(model: Any, batch: int) -> Inputs:
    """Texts of different lengths, padded on the left, without placeholders."""
    return _prompt(model, batch, 0, IMAGE_TOKEN)


def with_media(checkpoint: Checkpoint, model: Any, batch: int) -> Inputs:
    """The same with one image or recording each, at different places; or the input of an encoder."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    media = MEDIA[checkpoint.media](model.config, batch, random)
    if checkpoint.media.startswith("encoder_"):
        return media
    token = AUDIO_TOKEN if checkpoint.media in AUDIO else IMAGE_TOKEN
    return _prompt(model, batch, checkpoint.features, token) | media


def _prompt(model: Any, batch: int, features: int, token: int) -> Inputs:
    length = TEXT_LENGTH + features
    input_ids = torch.randint(4, FIRST_SPECIAL, (batch, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(input_ids)
    for row in range(batch):
        padding, first = 3 * row % 8, 3 * row % 8 + 2
        input_ids[row, :padding], mask[row, :padding] = 0, 0
        input_ids[row, first : first + features] = token
    prompt = {"input_ids": input_ids, "attention_mask": mask}
    takes = inspect.signature(model.forward).parameters
    types = (input_ids == token).long()
    return prompt | {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in takes and features}


def _grid(config: Any, batch: int, random: Random) -> Inputs:
    """Flat patches of frames, and how many there are in each direction."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    size = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return {"pixel_values": random(batch * PATCHES**2, size), "image_grid_thw": _grids(batch)}


def _grid_pixels(config: Any, batch: int, random: Random) -> Inputs:
    side = config.vision_config.patch_size
    return {"pixel_values": random(batch * PATCHES**2, 3, side, side), "image_grid_thw": _grids(batch)}


def _grids(batch: int) -> torch.Tensor:
    return torch.tensor([[1, PATCHES, PATCHES]] * batch)


def _pixels(config: Any, batch: int, random: Random) -> Inputs:
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]] * batch)} if hasattr(config, "spatial_merge_size") else {}
    return {"pixel_values": random(batch, 3, SIDE, SIDE), **sizes}


def _tiles(config: Any, batch: int, random: Random) -> Inputs:
    return {"pixel_values": random(batch, 1, 3, SIDE, SIDE)}


def _tiles_of_size(config: Any, batch: int, random: Random) -> Inputs:
    return {"pixel_values": random(batch, 2, 3, SIDE, SIDE), "image_sizes": torch.tensor([[SIDE, SIDE]] * batch)}


def _patches(config: Any, batch: int, random: Random) -> Inputs:
    """Flat patches with the position of each, which is that of merged ones in Gemma 4 12B."""
    places = torch.tensor([[x, y] for y in range(PATCHES) for x in range(PATCHES)]).expand(batch, -1, -1)
    size = 3 * getattr(config.vision_config, "model_patch_size", config.vision_config.patch_size) ** 2
    return {"pixel_values": random(batch, PATCHES**2, size), "image_position_ids": places}


def _naflex(config: Any, batch: int, random: Random) -> Inputs:
    size = 3 * config.vision_config.patch_size**2
    seen = torch.ones(batch, PATCHES**2, dtype=torch.long)
    shapes = torch.tensor([[PATCHES, PATCHES]] * batch)
    return {"pixel_values": random(batch, PATCHES**2, size), "spatial_shapes": shapes, "pixel_attention_mask": seen}


def _minicpm(config: Any, batch: int, random: Random) -> Inputs:
    side = config.vision_config.patch_size
    pixels = random(1, 3, side, batch * PATCHES**2 * side)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[PATCHES, PATCHES]] * batch)}


def _instructed(config: Any, batch: int, random: Random) -> Inputs:
    return {**_pixels(config, batch, random), "qformer_input_ids": torch.ones(batch, 3, dtype=torch.long)}


def _marked_pixels(config: Any, batch: int, random: Random) -> Inputs:
    """Whose place in the text is a mask, the same in all rows."""
    places = torch.zeros(batch, TEXT_LENGTH + config.latent_query_num, dtype=torch.long)
    places[:, 8 : 8 + config.latent_query_num] = 1
    return {"pixel_values": random(batch, 3, SIDE, SIDE), "image_embeds_position_mask": places}


def _mllama(config: Any, batch: int, random: Random) -> Inputs:
    tiles = config.vision_config.max_num_tiles
    return {
        "pixel_values": random(batch, 1, tiles, 3, SIDE, SIDE),
        "aspect_ratio_mask": torch.ones(batch, 1, tiles, dtype=torch.long),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, TEXT_LENGTH, 1, tiles, dtype=torch.long),
    }


def _crops(config: Any, batch: int, random: Random) -> Inputs:
    """The whole image, and a crop that shows all of it."""
    return {
        "image_pixel_values": random(batch, 2, 3, SIDE, SIDE),
        "image_sizes": torch.tensor([[SIDE, SIDE]] * batch),
        "image_attention_mask": torch.ones(batch, 2, PATCHES, PATCHES),
    }


def _mel(config: Any, batch: int, random: Random) -> Inputs:
    audio = config.audio_config
    frames = 2 * getattr(audio, "max_source_positions", 40)
    if hasattr(config, "audio_length_per_tok"):  # each token of the text reads some
        frames = 60 * config.audio_length_per_tok
    return {"input_features": random(batch, audio.num_mel_bins, frames)}


def _mel_seen(config: Any, batch: int, random: Random) -> Inputs:
    features = _mel(config, batch, random)["input_features"]
    return {
        "input_features": features,
        "feature_attention_mask": torch.ones(batch, features.shape[2], dtype=torch.long),
    }


def _mel_masked(config: Any, batch: int, random: Random) -> Inputs:
    frames = 2 * getattr(config.audio_config, "n_window", 8)
    features = random(batch, config.audio_config.num_mel_bins, frames)
    return {"input_features": features, "input_features_mask": torch.ones(batch, frames, dtype=torch.long)}


def _encoder_pixels_text(config: Any, batch: int, random: Random) -> Inputs:
    """An image of 17 features before the text."""
    text = _encoder_text(config, batch, random)
    ids = pad(text["input_ids"], (PATCHES**2 + 1, 0), value=IMAGE_TOKEN)
    mask = pad(text["attention_mask"], (PATCHES**2 + 1, 0), value=1)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": random(batch, 3, SIDE, SIDE)}


def _encoder_text(config: Any, batch: int, random: Random) -> Inputs:
    input_ids = torch.randint(4, FIRST_SPECIAL, (batch, TEXT_LENGTH), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(input_ids)
    for row in range(batch):
        input_ids[row, TEXT_LENGTH - 4 * row % 9 :], mask[row, TEXT_LENGTH - 4 * row % 9 :] = 0, 0
    return {"input_ids": input_ids, "attention_mask": mask}


MEDIA: dict[str, Callable[[Any, int, Random], Inputs]] = {
    "grid": _grid,
    "grid_pixels": _grid_pixels,
    "pixels": _pixels,
    "tiles": _tiles,
    "tiles_of_size": _tiles_of_size,
    "patches": _patches,
    "naflex": _naflex,
    "minicpm": _minicpm,
    "instructed": _instructed,
    "marked_pixels": _marked_pixels,
    "mllama": _mllama,
    "mel": _mel,
    "mel_seen": _mel_seen,
    "mel_masked": _mel_masked,
    "mel_last": lambda config, batch, random: {"input_features": random(batch, 30, config.encoder_config.input_dim)},
    "crops": _crops,
    "flat_patches": lambda config, batch, random: {"pixel_values": random(batch, PATCHES**2, 3 * config.patch_size**2)},
    "encoder_pixels_text": _encoder_pixels_text,
    "encoder_text": _encoder_text,
    "encoder_mel": lambda config, batch, random: {"input_features": random(batch, config.num_mel_bins, 40)},
    "encoder_wave": lambda config, batch, random: {"input_values": random(batch, 16000)},
    "encoder_pixels": lambda config, batch, random: {"pixel_values": random(batch, 3, SIDE, SIDE)},
}
"""Kinds of images and recordings, and of what encoders read."""
