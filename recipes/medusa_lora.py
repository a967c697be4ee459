"""LoRA matrices of Medusa heads on their copies of the target's output matrix, for training."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from hf_specgen.heads.lora import HeadOutputs


def new_lora(matrix: nn.Linear, num_heads: int, rank: int) -> Any:
    """A `PeftModel` around `HeadOutputs` with new matrices, whose products are zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=r"heads\.\d+")
    return get_peft_model(cast(Any, HeadOutputs(matrix, num_heads)), config)


def output_of(adapter: Any, head: int) -> nn.Module:
    """The output matrix of one head with its LoRA matrices, from hidden state to vocabulary."""
    return cast(nn.Module, adapter.base_model.model.heads[head])
