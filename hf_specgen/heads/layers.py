"""The decoder layer that draft heads are made of: pre-norm attention with rotary positions, then a gated MLP.

This is the layer of Llama and Qwen3, with the options that draft checkpoints use (biases, query and key norms, an
attention that reads a wider input than the residual stream). Keys and values go through Transformers' cache interface,
`cache.update(key, value, layer_index)`, so a head works with any cache, including one whose rows differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)


class Rotary(NamedTuple):
    """Cosines and sines of the positions of one pass, each `[batch, length, head_dim]`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the rotation to `[batch, heads, length, head_dim]` queries or keys."""
        first, second = states.chunk(2, dim=-1)
        return states * self.cos[:, None] + torch.cat((-second, first), dim=-1) * self.sin[:, None]


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of one decoder layer.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_heads, num_kv_heads, head_dim: shape of the attention.
        norm_eps: epsilon of every RMSNorm.
        activation: name of the MLP's activation function, as in Transformers.
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
        max_position_embeddings: the context length that RoPE scaling refers to.
        rope: rotary parameters in the form of Transformers 5 (`rope_type`, `rope_theta`, …).

    Raises:
        ValueError: if the values are invalid or contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.activation not in ACT2FN:
            raise ValueError(f"unknown activation {self.activation!r}; use one that Transformers knows, such as 'silu'")
        if self.rope.get("rope_type", "default") not in ROPE_TYPES:
            raise ValueError(f"unknown rope_type {self.rope['rope_type']!r}; known are {', '.join(ROPE_TYPES)}")


class RotaryEmbedding(nn.Module):
    """Rotary position embeddings of any type that Transformers supports; kept in float32 for any dtype of the head."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        try:
            parameters = LlamaConfig(
                hidden_size=config.num_heads * config.head_dim,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope),
            )
            with torch.device("cpu"):  # computed, not loaded, so also where the head is built on "meta"
                self.frequencies = LlamaRotaryEmbedding(parameters)
        except Exception as error:  # whatever Transformers raises for numbers that it cannot work with
            reason = str(error).strip().splitlines()[-1][:200]
            raise ValueError(f"the rotary parameters {dict(config.rope)} cannot be used ({reason})") from None

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        """`[batch, length]` position ids to cosines and sines in the dtype and on the device of `states`."""
        return Rotary(*self.frequencies(states, position_ids))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Move to other devices, but keep the dtype: frequencies in bfloat16 are too coarse for late positions."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)
        return self


class Attention(nn.Module):
    """Grouped-query attention over the cached and the new states.

    Args:
        config: the layer's configuration.
        layer_index: the cache layer that keys and values go to.
        input_size: width of the input if it is not `config.hidden_size`.
    """

    def __init__(self, config: LayerConfig, layer_index: int, input_size: int | None = None) -> None:
        super().__init__()
        self.layer_index, self.head_dim = layer_index, config.head_dim
        self.groups = config.num_heads // config.num_kv_heads
        width = input_size or config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        norm = (lambda: nn.RMSNorm(config.head_dim, eps=config.norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def keys_values(self, states: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """`[batch, length, width]` states to rotated keys and to values, `[batch, kv_heads, length, head_dim]`."""
        keys = self.k_norm(self._heads(self.k_proj(states)))
        return rotary.rotate(keys.transpose(1, 2)), self._heads(self.v_proj(states)).transpose(1, 2)

    def forward(
        self, states: torch.Tensor, rotary: Rotary, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Attend from every state to the cached and the new ones.

        Args:
            states: `[batch, length, width]`.
            rotary: of the states' positions.
            attention_mask: `[batch, 1, length, cached + length]` bool, True where a query sees a key; None: everywhere.
            cache: receives the new keys and values and returns all; None attends to the new ones alone.

        Returns:
            `[batch, length, hidden]`.
        """
        queries = rotary.rotate(self.q_norm(self._heads(self.q_proj(states))).transpose(1, 2))
        keys, values = self.keys_values(states, rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_index)
        attended = scaled_dot_product_attention(queries, keys, values, attention_mask, enable_gqa=self.groups > 1)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.activation]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))


class DecoderLayer(nn.Module):
    """Attention and MLP, each applied to the normalised residual stream and added to it.

    Args:
        config: the layer's configuration.
        layer_index: the cache layer that keys and values go to.
        attention_input: width of the attention's input if it is not `config.hidden_size`.
    """

    def __init__(self, config: LayerConfig, layer_index: int, attention_input: int | None = None) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config, layer_index, attention_input)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """`[batch, length, hidden]` to the same; the other arguments as for `Attention`."""
        attended = self.self_attn(self.input_layernorm(hidden), rotary, attention_mask, cache)
        return self.add_mlp(hidden + attended)

    def add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The second half of the layer."""
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def causal_mask(lengths: Sequence[int], queries: int, device: torch.device | str | None = None) -> torch.Tensor:
    """A causal mask for a batch whose rows have different numbers of cached tokens.

    Args:
        lengths: the number of cached tokens of each row; its new tokens follow directly in the cache.
        queries: the number of new tokens, the same for all rows.
        device: where the mask is made.

    Returns:
        `[batch, 1, queries, max(lengths) + queries]` bool, True where a query sees a cache slot.

    Example:
        >>> causal_mask([2, 0], 2).int()[:, 0].tolist()
        [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    """
    slots = torch.arange(max(lengths) + queries, device=device)
    own = torch.tensor(lengths, device=device)[:, None] + torch.arange(queries, device=device)
    return (slots <= own[..., None])[:, None]


def causal_default(
    mask: torch.Tensor | None, states: torch.Tensor, cache: Cache | None, layer_index: int = 0
) -> torch.Tensor | None:
    """The given mask; if None, a causal one after the cached tokens, or None for a single query."""
    batch, queries = states.shape[:2]
    if mask is not None or queries == 1:
        return mask
    cached = cache.get_seq_length(layer_index) if cache is not None else 0
    return causal_mask([cached] * batch, queries, states.device)
