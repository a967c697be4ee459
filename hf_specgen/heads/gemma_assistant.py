"""Gemma 4 assistants: a stack without keys and values of its own, which attends to the target's; loader and runner.

Every layer reads the keys and values that the target's last full-attention layer, or its last sliding one, has in its
cache. All draft tokens of a step have the position of the last known token, and influence later ones only through the
state that is passed on.

Source: Google, "Gemma 4" (2026), as implemented by `transformers.models.gemma4_assistant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.base import BoundHead, DraftHead, HeadConfig, HeadOutput
from hf_specgen.heads.checkpoint import Fields
from hf_specgen.heads.head_file import Format, HeadFile
from hf_specgen.heads.layers import LayerConfig, Rotary, RotaryEmbedding, count_layers, matrix_shape, read_rope
from hf_specgen.targets.inputs import spread_rows
from hf_specgen.targets.target import Target

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
RENAMED = {
    "model.embed_tokens.weight": "lm_head.weight",
    "masked_embedding.centroids.weight": "lm_head.centroids.weight",
    "masked_embedding.token_ordering": "lm_head.token_ordering",
}
Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each `[batch, kv_heads, length, head_dim]`."""
KeysValues = Mapping[str, Pair]
"""By layer type."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """Configuration of `AssistantHead`; `hidden_size` is the target's, which the passed-on states have."""

    layers: tuple[LayerConfig, ...]
    layer_types: tuple[str, ...]
    sliding_window: int  # keys before the last one that a sliding layer sees
    num_centroids: int | None = None  # groups of tokens, of which the best are scored; None: all tokens
    top_centroids: int = 0  # how many groups are scored

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or len(self.layers) != len(self.layer_types):
            raise ValueError(f"{len(self.layers)} layers need as many layer types, got {self.layer_types}")
        if self.num_centroids is not None and (
            self.num_centroids < 1
            or self.vocab_size % self.num_centroids
            or not 1 <= self.top_centroids <= self.num_centroids
        ):
            raise ValueError(
                f"{self.num_centroids} centroids, of which {self.top_centroids} are scored, cannot divide a vocabulary "
                f"of {self.vocab_size} tokens"
            )


class SharedAttention(nn.Module):
    """Queries only; keys and values are given. Scores are not scaled, since queries and keys are normalised."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)

    def forward(
        self, states: torch.Tensor, rotary: Rotary, keys_values: Pair, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`[batch, length, hidden]` to the same."""
        queries = self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        keys, values = keys_values
        queries, grouped = rotary.rotate(queries), queries.shape[1] != keys.shape[1]
        attended = scaled_dot_product_attention(queries, keys, values, attention_mask, scale=1.0, enable_gqa=grouped)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class AssistantLayer(nn.Module):
    """Attention and MLP, each between two norms, and a learned factor on the whole."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = SharedAttention(config), LlamaMLP(config)
        norms = (nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(4))
        self.input_layernorm, self.post_attention_layernorm = next(norms), next(norms)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = next(norms), next(norms)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self, states: torch.Tensor, rotary: Rotary, keys_values: Pair, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`[batch, length, hidden]` to the same."""
        attended = self.self_attn(self.input_layernorm(states), rotary, keys_values, attention_mask)
        states = states + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(states))
        return (states + self.post_feedforward_layernorm(fed_forward)) * self.layer_scalar


class CentroidOutput(nn.Module):
    """An output matrix that scores only the tokens of the best few groups; all others get a lower score."""

    token_ordering: torch.Tensor
    """`[vocab]` token ids, group by group."""

    def __init__(self, hidden_size: int, vocab_size: int, num_centroids: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.centroids = nn.Linear(hidden_size, num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(vocab_size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., vocab]`."""
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        tokens = groups[self.centroids(states).topk(self.top, dim=-1).indices].flatten(-2)
        scores = (self.weight[tokens] @ states[..., None])[..., 0]
        rest = scores.amin(dim=-1, keepdim=True) - 1
        logits = rest.expand(*rest.shape[:-1], self.weight.shape[0]).clone()
        return logits.scatter_(-1, tokens, scores)


class AssistantHead(DraftHead):
    """A Gemma 4 assistant."""

    config: AssistantConfig

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__(config)
        width = config.layers[0].hidden_size
        self.pre_projection = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(AssistantLayer(layer) for layer in config.layers)
        self.norm = nn.RMSNorm(width, eps=config.layers[0].rms_norm_eps)
        by_type = dict(zip(config.layer_types, config.layers, strict=True))
        self.rotary = nn.ModuleDict({name: RotaryEmbedding(layer) for name, layer in by_type.items()})
        if config.num_centroids is None:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        else:
            self.lm_head = CentroidOutput(width, config.vocab_size, config.num_centroids, config.top_centroids)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        keys_values: KeysValues,
        lengths: torch.Tensor,
        padding: torch.Tensor,
        dropped: Mapping[str, int],
    ) -> HeadOutput:
        """One draft step with the target's keys and values; positions are those of the last known token.

        `lengths` and `padding` are, for each row, the keys that count and how many of the first ones are padding.
        `dropped` is by layer type how many of the first keys the cache has dropped; they count in `lengths`.
        """
        states = self.pre_projection(torch.cat((embeddings, hidden), dim=-1))
        rotary = {name: embedding(states, position_ids) for name, embedding in self.rotary.items()}
        masks = {}
        for name in rotary:
            slots = dropped[name] + torch.arange(keys_values[name][0].shape[2], device=lengths.device)
            visible = (slots < lengths[:, None]) & (slots >= padding[:, None])
            if name == "sliding_attention":
                visible &= slots >= lengths[:, None] - 1 - self.config.sliding_window
            masks[name] = visible[:, None, None]
        for layer, name in zip(self.layers, self.config.layer_types, strict=True):
            states = layer(states, rotary[name], keys_values[name], masks[name])
        output = self.norm(states)
        return HeadOutput(self.post_projection(output), output)


def source_layers(target_config: PretrainedConfig) -> dict[str, int]:
    """For each layer type the target's last layer with keys and values of its own, which an assistant reads."""
    config: Any = target_config.get_text_config()
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return {name: index for index, name in enumerate(config.layer_types[:own])}


def load_assistant(file: HeadFile) -> AssistantHead:
    """A Gemma 4 assistant, with or without centroids. A copy of the embeddings in the file is not read."""
    names = {RENAMED.get(name, name.removeprefix("model.")): name for name in file.tensors if name != "lm_head.weight"}
    file.names = names
    fields = file.fields
    text = fields.nested("text_config")
    count, types = count_layers(text, names), text.get("layer_types")
    valid = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != count or not all(name in valid for name in types):
        raise ValueError(f"layer_types must name full or sliding attention for {count} layers, got {str(types)[:80]!r}")
    if "lm_head.weight" not in names:
        raise ValueError("the tensor model.embed_tokens.weight is missing")
    vocab = file.tensors[names["lm_head.weight"]].shape[0]
    if text.integer("vocab_size") != vocab:
        raise ValueError(f"config.json has vocab_size {text.integer('vocab_size')}, but the tensors have {vocab}")
    hidden = fields.integer("backbone_hidden_size")
    ordered = fields.flag("use_ordered_embeddings")
    config = AssistantConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        target_hidden_size=hidden,
        num_aux_hidden_states=1,
        aux_hidden_state_layers=file.aux_hidden_state_layers(),
        own_lm_head=True,
        layers=tuple(_layer_config(text, file, index, name) for index, name in enumerate(types)),
        layer_types=tuple(types),
        sliding_window=text.integer("sliding_window"),
        num_centroids=fields.integer("num_centroids") if ordered else None,
        top_centroids=fields.integer("centroid_intermediate_top_k") if ordered else 0,
    )
    return file.build(AssistantHead, config)


def _layer_config(text: Fields, file: HeadFile, index: int, layer_type: str) -> LayerConfig:
    """One layer: heads and MLP have the sizes of its tensors, rotary positions the parameters of its type."""
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")
    queries, output, gate = (matrix_shape(file.checkpoint, file.names, index, part)[0] for part in parts)
    heads, bias = text.integer("num_attention_heads"), text.flag("attention_bias")
    rope = text.nested("rope_parameters").nested(layer_type).values
    if queries % heads:
        raise ValueError(f"config.json has {heads} attention heads, but layer {index} has {queries} rows of queries")
    return LayerConfig(
        hidden_size=output,
        intermediate_size=gate,
        num_attention_heads=heads,
        num_key_value_heads=1,  # keys and values are the target's, in its number of heads
        head_dim=queries // heads,
        rms_norm_eps=text.number("rms_norm_eps"),
        hidden_act=text.text("hidden_activation"),
        qkv_bias=bias,
        output_bias=bias,
        max_position_embeddings=text.integer("max_position_embeddings"),
        rope_parameters=read_rope(Fields({"rope_parameters": rope})),
    )


FORMATS = (
    Format(
        "Gemma 4 assistant",
        "GemmaAssistantCandidates",
        lambda checkpoint: checkpoint.config.get("model_type") in MODEL_TYPES,
        load_assistant,
    ),
)


class AssistantRunner:
    """Runs a Gemma 4 assistant for one step: with the target's own keys and values, and no cache of its own."""

    def __init__(self, bound: BoundHead, target: Target):
        self.bound, self._target = bound, target
        self._sources = source_layers(target.model.config)
        self._like = next(bound.head.parameters())
        self._hidden = self._like.new_zeros(0)

    def first_logits(self, states: torch.Tensor, pending: Sequence[int]) -> torch.Tensor:
        """Draft from each row's last token; earlier draft tokens are dropped."""
        rows = self._target.rows
        output = self._run(torch.tensor([[pending[row]] for row in rows]), states[rows][:, None].to(self._like))
        self._hidden = output.hidden
        return spread_rows(self.bound.target_logits(output.output[:, 0]), rows, len(pending))

    def next_logits(self, tree: GrownTree, new: int) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last `new` nodes of a tree; as for `EagleRunner.next_logits`."""
        active = tree.select(self._target.rows)
        output = self._run(active.input_tokens(self._like.device)[:, -new:], active.of_parents(self._hidden))
        self._hidden = output.hidden
        return spread_rows(self.bound.target_logits(output.output), self._target.rows, tree.batch)

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> HeadOutput:
        """One pass; `tokens` `[rows, length]`, `hidden` `[rows, length, hidden]`."""
        device, filled = self._like.device, max(self._target.cache.lengths)
        lengths = torch.tensor(self._target.cache.lengths, device=device)
        padding = torch.tensor(self._target.padding, device=device)
        layers: dict[str, Any] = {name: self._target.cache.layers[index] for name, index in self._sources.items()}
        dropped = {name: layer.first for name, layer in layers.items()}
        shared: KeysValues = {
            name: tuple(part[:, :, : filled - layer.first].to(self._like) for part in (layer.keys, layer.values))
            for name, layer in layers.items()
        }
        positions = (lengths - padding)[:, None].expand(tokens.shape)
        head: Any = self.bound.head
        return cast(HeadOutput, head(self.bound.embed(tokens), hidden, positions, shared, lengths, padding, dropped))
