"""What is known of a model before its weights are loaded: its configuration, its sizes, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.evaluation.workloads import torch_dtype
from hf_specgen.heads.checkpoint import source_errors


@dataclass
class Blueprint:
    """A model without weights.

    Args:
        name: Hub id or folder.
        model: its modules on the meta device.
        tokenizer: None if there is none.
        dtype: data type in which it will be loaded.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype

    @property
    def config(self) -> Any:
        """The configuration of the language model."""
        return self.model.config.get_text_config()

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.dtype.itemsize

    def cache_bytes(self, batch: int, length: int) -> int:
        """Bytes of keys and values for `batch` rows of `length` tokens; sliding windows do not reduce them here."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * int(config.num_hidden_layers) * heads * width * batch * length * self.dtype.itemsize


def blueprint(name: str, dtype: str) -> Blueprint:
    """Read the configuration and the tokenizer of a model; nothing else is loaded.

    Args:
        name: Hub id or folder.
        dtype: "auto" for that of the checkpoint.

    Raises:
        OSError, ValueError: if there is no such model, or it is no causal language model.
    """
    with source_errors(name):
        config = AutoConfig.from_pretrained(name)
        chosen = torch_dtype(dtype) if dtype != "auto" else config.dtype or torch.float32
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (
        Exception
    ):  # damaged files and missing packages raise errors of many types; the check of tokenizers reports it
        tokenizer = None
    return Blueprint(name, model, tokenizer, chosen)


def readable(count: float) -> str:
    """A number of parameters, such as 16.2M or 7.0B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.0f}"


def gigabytes(count: float) -> str:
    """A number of bytes in GiB."""
    return f"{count / 2**30:.2f} GiB"
