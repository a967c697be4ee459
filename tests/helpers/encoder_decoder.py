"""Tiny random encoder-decoder models, and inputs for their encoders."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

from tests.helpers.models import SPEC, VOCAB

START = 3
CONFIGS: dict[str, dict[str, Any]] = SPEC["encoder_decoder"]
MAPPINGS: Any = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)


@cache
def encoder_decoder(kind: str, attention: str = "sdpa", **overrides: Any) -> Any:
    """A random model, shared by all tests of the process: never change it."""
    return fresh_encoder_decoder(kind, attention, **overrides)


def fresh_encoder_decoder(kind: str, attention: str = "sdpa", **overrides: Any) -> Any:
    """A model like that of `encoder_decoder`, for a test that changes it."""
    torch.manual_seed(0)
    attention = "eager" if kind in SPEC["eager_only"] else attention
    config = CONFIG_MAPPING[kind](**{**CONFIGS[kind], **overrides})
    mapping = next(mapping for mapping in MAPPINGS if type(config) in mapping)
    model: Any = mapping[type(config)]._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # so that the text depends on the encoder's input and on positions
                parameter *= 3.0 if "embed_positions" not in name else 8.0
    settings = model.generation_config
    settings.pad_token_id, settings.eos_token_id, settings.decoder_start_token_id = 0, None, START
    settings.bos_token_id, settings.forced_bos_token_id, settings.forced_eos_token_id = 1, None, None
    settings.num_beams = 1
    return model


def encoder_inputs(kind: str, batch: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Random input of the encoder; texts of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(7)
    if kind == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    if kind == "moonshine":
        return {"input_values": torch.randn(batch, 16000, generator=generator)}
    if kind == "speech_to_text":
        features = torch.randn(batch, 40, 8, generator=generator)
        return {"input_features": features, "attention_mask": torch.ones(batch, 40, dtype=torch.long)}
    input_ids = torch.randint(4, VOCAB, (batch, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch):
        padding = 4 * row % (length - 3)
        input_ids[row, length - padding :] = 0
        attention_mask[row, length - padding :] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}
