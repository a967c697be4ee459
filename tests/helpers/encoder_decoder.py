"""Tiny random encoder-decoder models, and inputs for their encoders."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

from hf_specgen import Candidates
from tests.helpers.comparison import SEED
from tests.helpers.models import VOCAB

START = 3
EAGER_ONLY = (
    *("switch_transformers", "longt5", "pegasus_x", "mvp", "led", "t5gemma"),
    *("nllb-moe", "bigbird_pegasus", "fsmt", "prophetnet", "speech_to_text"),
)
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": START,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "switch_transformers": {
        **T5,
        "num_experts": 2,
        "expert_capacity": 64,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "longt5": T5,
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
    "pegasus_x": BART,
    "marian": BART,
    "m2m_100": BART,
    "blenderbot": BART,
    "blenderbot-small": BART,
    "mvp": BART,
    "plbart": BART,
    "led": {
        **BART,
        "max_encoder_position_embeddings": 96,
        "max_decoder_position_embeddings": 96,
        "attention_window": 8,
    },
    "nllb-moe": {**BART, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64},
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "fsmt": {
        **{name: value for name, value in BART.items() if name != "vocab_size"},
        "langs": ["en", "de"],
        "src_vocab_size": VOCAB,
        "tgt_vocab_size": VOCAB,
    },
    "prophetnet": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 96,
        "decoder_start_token_id": START,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "speech_to_text": {
        **{name: value for name, value in BART.items() if name != "max_position_embeddings"},
        "input_feat_per_channel": 8,
        "conv_channels": 16,
        "max_source_positions": 40,
        "max_target_positions": 96,
    },
    "moonshine": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "max_position_embeddings": 96,
        "decoder_start_token_id": START,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5gemma": {"encoder": GEMMA, "decoder": {**GEMMA, "num_hidden_layers": 2}, "vocab_size": VOCAB},
    "whisper": {
        **{name: value for name, value in BART.items() if name != "max_position_embeddings"},
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "max_target_positions": 96,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
MAPPINGS: Any = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)


@cache
def encoder_decoder(kind: str, attention: str = "sdpa", **overrides: Any) -> Any:
    """A random model, shared by all tests of the process: never change it."""
    return fresh_encoder_decoder(kind, attention, **overrides)


def fresh_encoder_decoder(kind: str, attention: str = "sdpa", **overrides: Any) -> Any:
    """A model like that of `encoder_decoder`, for a test that changes it."""
    torch.manual_seed(0)
    attention = "eager" if kind in EAGER_ONLY else attention
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


def run_both(model: Any, inputs: dict[str, Any], candidates: Any, **arguments: Any) -> Any:
    """The outputs of plain `generate` and of a strategy from one seed, and the statistics."""
    make = arguments.pop("make_processors", None)

    def run(**more: Any) -> Any:
        processors = {} if make is None else {"logits_processor": make()}
        torch.manual_seed(SEED)
        return model.generate(**inputs, **arguments, **processors, **more, return_dict_in_generate=True)

    plain = run()
    after_plain = torch.rand(3)
    begins = inputs.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
    strategy = candidates if isinstance(candidates, Candidates) else candidates(plain.sequences[:, begins:])
    ours = run(candidate_generator=strategy)
    assert torch.equal(torch.rand(3), after_plain), "the random generator is not where plain generate left it"
    return plain, ours, strategy.speculation
