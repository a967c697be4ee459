"""The decoder layer of draft heads: pre-norm attention with rotary positions, then a gated MLP.

These are the layers of Llama, Qwen3, Gemma 4, DeepSeek and MiniMax-M3, with the options that draft checkpoints use.
"""

from __future__ import annotations

from math import log
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from hf_specgen.heads.source import first_line

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the positions of one pass, each `[batch, length, rotated channels]`."""


def rotated(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """`[batch, heads, length, head_dim]` queries or keys, whose first channels are rotated by their positions."""
    cos, sin = (part[:, None] for part in rotary)
    rest = states[..., cos.shape[-1] :]
    if rest.shape[-1] == 0:
        return states * cos + rotate_half(states) * sin
    states = states[..., : cos.shape[-1]]
    return torch.cat((states * cos + rotate_half(states) * sin, rest), dim=-1)


class LayerConfig(LlamaConfig):
    """Sizes and options of one decoder layer: a Llama config, with options that the layers of other models have."""

    num_key_value_heads: int = 1
    head_dim: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # of each attention head, as in Qwen3
    attention_sinks: bool = False  # a learnt score of every attention head beside those of the keys
    is_gemma: bool = False  # norms of values and after each sublayer, attention scores that are not scaled (Gemma 4)
    values_are_keys: bool = False  # values are the projected keys before their norm (Gemma 4)
    kv_lora_rank: int = 0  # width of the latent from which keys and values are computed (DeepSeek); 0: there is none
    q_lora_rank: int = 0  # the same for queries
    qk_nope_head_dim: int = 0  # channels of queries and keys that are not rotated, beside `head_dim` rotated ones
    v_head_dim: int = 0  # channels of values
    rope_interleave: bool = False  # whether channels 2i and 2i + 1 are rotated together (DeepSeek)
    output_gate: bool = False  # the output of attention is multiplied by a sigmoid (Kimi K3)
    swiglu_alpha: float = 0.0  # slope of the gate of an MLP with a limit (gpt-oss, MiniMax-M3); 0: an ordinary MLP
    swiglu_limit: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        head_dim = self.head_dim
        if heads % kv_heads:
            raise ValueError(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary position embeddings of any type that Transformers supports."""

    def __init__(self, config: LayerConfig) -> None:
        try:
            with torch.device("cpu"):  # computed, not loaded, so also where the head is built on "meta"
                super().__init__(_of_rotated_channels(config))
        except Exception as error:  # whatever Transformers raises for numbers that it cannot work with
            raise ValueError(
                f"the rotary parameters {config.rope_parameters} cannot be used ({first_line(error)})"
            ) from None


def _of_rotated_channels(config: LayerConfig) -> LayerConfig:
    """The config of heads that have only the channels that are rotated."""
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if (width := rope.pop("rope_dim", None)) is None:
        return config
    return LayerConfig.from_dict({**config.to_dict(), "head_dim": width, "rope_parameters": rope})


class Attention(nn.Module):
    """Attention over the cached and the new states; subclasses project states to queries, keys and values."""

    o_proj: nn.Module

    def __init__(self, layer_index: int, head_dim: int, groups: int = 1, scale: float | None = None) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = head_dim
        self.groups = groups
        self.scale = scale
        self.g_proj: nn.Module | None = None
        self.attention_sink_bias: nn.Parameter | None = None

    def keys_values(self, states: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """`[batch, length, width]` states to rotated keys and to values, `[batch, kv_heads, length, …]`."""
        raise NotImplementedError

    def queries(self, states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """`[batch, length, width]` states to rotated queries, `[batch, heads, length, head_dim]`."""
        raise NotImplementedError

    def forward(
        self, states: torch.Tensor, rotary: Rotary, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Attend from every state to the cached and the new ones where the mask is True, `[batch, length, hidden]`."""
        queries = self.queries(states, rotary)
        keys, values = self.keys_values(states, rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_index)
        if self.attention_sink_bias is not None:
            keys, values, attention_mask = self._with_sinks(queries, keys, values, attention_mask)
        options: dict[str, Any] = {"enable_gqa": self.groups > 1, "scale": self.scale}
        attended = scaled_dot_product_attention(queries, keys, values, attention_mask, **options)
        attended = attended.transpose(1, 2).flatten(2)
        return self.o_proj(attended if self.g_proj is None else attended * self.g_proj(states).sigmoid())

    def _with_sinks(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One more key and value of zeros, whose score is the sink, and the additive mask with it."""
        length = keys.shape[2]
        scores = queries.new_zeros(*queries.shape[:3], length + 1)
        if mask is not None:
            scores[..., :length].masked_fill_(~mask, -torch.inf)
        scores[..., length] = cast(torch.Tensor, self.attention_sink_bias)[:, None]
        return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), scores

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class GroupedQueryAttention(Attention):
    """Attention whose query heads share key and value heads in groups (GQA)."""

    def __init__(self, config: LayerConfig, layer_index: int, input_size: int | None = None) -> None:
        groups = config.num_attention_heads // config.num_key_value_heads
        super().__init__(layer_index, config.head_dim, groups, 1.0 if config.is_gemma else None)
        width = input_size or config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = None if config.values_are_keys else nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        norm = (lambda: nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm = norm()
        self.k_norm = norm()
        self.v_norm: nn.Module = nn.Identity()
        if config.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))
        if config.is_gemma:
            self.v_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, elementwise_affine=False)

    def keys_values(self, states: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._heads(self.k_proj(states))
        values = keys if self.v_proj is None else self._heads(self.v_proj(states))
        return rotated(self.k_norm(keys).transpose(1, 2), rotary), self.v_norm(values).transpose(1, 2)

    def queries(self, states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return rotated(self.q_norm(self._heads(self.q_proj(states))).transpose(1, 2), rotary)


class LatentAttention(Attention):
    """Multi-head latent attention (MLA): keys and values of all heads are computed from one narrow latent.

    Queries and keys have channels that are not rotated, then rotated ones, which in keys are the same for all heads.
    The cache has the keys and values of each head. Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    def __init__(self, config: LayerConfig, layer_index: int, input_size: int | None = None) -> None:
        head_dim = config.qk_nope_head_dim + config.head_dim
        super().__init__(layer_index, head_dim, scale=head_dim**-0.5 * _yarn_factor(config.rope_parameters))
        self._config = config
        heads = config.num_attention_heads
        width = input_size or config.hidden_size
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_lora_rank + config.head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=config.rms_norm_eps)
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, rows, bias=False)
        if config.output_gate:
            self.g_proj = nn.Linear(width, heads * config.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=config.output_bias)

    def keys_values(self, states: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        latent, rope = self.kv_a_proj_with_mqa(states).split((config.kv_lora_rank, config.head_dim), dim=-1)
        parts = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (config.num_attention_heads, -1))
        nope, values = parts.transpose(1, 2).split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        rope = self._rotated(rope[:, None], rotary).expand(-1, config.num_attention_heads, -1, -1)
        return torch.cat((nope, rope), dim=-1), values

    def queries(self, states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        config = self._config
        reads = self.q_b_proj if config.q_lora_rank else self.q_proj
        states = self.q_a_layernorm(self.q_a_proj(states)) if config.q_lora_rank else states
        queries = self._heads(reads(states)).transpose(1, 2)
        nope, rope = queries.split((config.qk_nope_head_dim, config.head_dim), dim=-1)
        return torch.cat((nope, self._rotated(rope, rotary)), dim=-1)

    def _rotated(self, states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        if self._config.rope_interleave:  # products of queries and keys do not depend on the order of the channels
            states = states.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotated(states, rotary)


class LimitedMLP(LlamaMLP):
    """The MLP of gpt-oss and MiniMax-M3: its gate and values are limited, and 1 is added to the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, hidden]` states to the same."""
        config: Any = self.config
        gate = self.gate_proj(x).clamp(max=config.swiglu_limit)
        values = self.up_proj(x).clamp(-config.swiglu_limit, config.swiglu_limit)
        output: torch.Tensor = self.down_proj((values + 1) * gate * (config.swiglu_alpha * gate).sigmoid())
        return output


def _yarn_factor(rope: Any) -> float:
    """What DeepSeek multiplies attention scores by for a long context, beside the scale of its rotary positions."""
    strength = rope.get("mscale_all_dim") or 0.0
    factor = rope.get("factor") or 1.0
    return (0.1 * strength * log(factor) + 1.0) ** 2 if factor > 1.0 else 1.0


class DecoderLayer(nn.Module):
    """Attention and MLP, each applied to the normalised residual stream and added to it.

    A full-attention layer of Gemma 4 also normalises what it adds, and has a factor on the residual stream.
    """

    def __init__(self, config: LayerConfig, layer_index: int, attention_input: int | None = None) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        attention = LatentAttention if config.kv_lora_rank else GroupedQueryAttention
        self.self_attn = attention(config, layer_index, attention_input)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LimitedMLP(config) if config.swiglu_limit else LlamaMLP(config)
        self.is_gemma = config.is_gemma
        if config.is_gemma:
            self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden: torch.Tensor, *places: Any) -> torch.Tensor:
        """`[batch, length, hidden]` to the same; `places` are rotary, mask and cache, as for `Attention`."""
        return self.add(hidden, self.self_attn(self.input_layernorm(hidden), *places))

    def add(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream with the outputs of attention and MLP."""
        if not self.is_gemma:
            hidden = hidden + attended
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        hidden = hidden + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(fed_forward)) * self.layer_scalar
