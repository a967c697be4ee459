"""What a speculative `generate` call returns: the output of plain `generate`, with the statistics of the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specgen.counters import Statistics
from hf_specgen.outputs import OutputCollector
from hf_specgen.state import Call


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate`, with the statistics of the call in `speculation`."""

    speculation: Statistics | None = None


@dataclass
class EncoderDecoderSpeculativeOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder target."""

    speculation: Statistics | None = None


def call_output(
    call: Call, outputs: OutputCollector, past_key_values: Any
) -> SpeculativeOutput | EncoderDecoderSpeculativeOutput | torch.Tensor:
    """The return value of a call: its ids, or with `return_dict_in_generate=True` an output object.

    Args:
        call: a call that is over.
        outputs: the ids of the call, and its scores.
        past_key_values: the cache to return.
    """
    if not call.config.return_dict_in_generate:
        return outputs.output_ids()
    assert call.model is not None
    fields: dict[str, Any] = {
        "sequences": outputs.output_ids(),
        "scores": tuple(outputs.scores) if call.keeps_scores else None,
        "logits": tuple(outputs.logits) if call.keeps_logits else None,
        "past_key_values": past_key_values,
    }
    if not call.model.config.is_encoder_decoder:
        return SpeculativeOutput(**fields, speculation=call.statistics)
    output = EncoderDecoderSpeculativeOutput(**fields)
    # An attribute, and no item: `generate` of Whisper takes items apart by rows.
    object.__setattr__(output, "speculation", call.statistics)
    return output
