"""EAGLE heads: one or a few decoder layers that extrapolate the target's hidden states autoregressively.

A head reads the feature of a position (hidden states of the target) and the embedding of the *next* token, and predicts
the token after that. Its own output replaces the feature of the next position:

    position          0    1    2    3  |  4    5        the target has processed x0 … x3 and chosen x4
    feature           f0   f1   f2   f3 |  h3   h4       f: the target's, h: the head's own output
    token             x1   x2   x3   x4 |  d5   d6
    prediction        ·    ·    ·    d5 |  d6   d7

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024), "EAGLE-2" (2024), and
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025). P-EAGLE (2026,
https://arxiv.org/abs/2602.01469) predicts several tokens in one pass, with a learned vector for unknown features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_specgen.heads.base import DraftHead, HeadConfig, HeadInputs, HeadOutput
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.layers import DecoderLayer, LayerConfig, RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """Configuration of `Eagle1Head` and `Eagle3Head`; with a mask token it is a P-EAGLE head."""

    layer: LayerConfig
    num_layers: int = 1
    projects_features: bool = True  # by a linear layer; otherwise they are used unchanged
    projection_bias: bool = False  # of that linear layer
    norm_before_residual: bool = False  # the first residual stream starts from the normalised feature
    norm_before_fc: bool = False  # one norm over all concatenated features
    fc_norm: bool = False  # one norm for each of the concatenated features (EAGLE-3.1)
    norm_output: bool = False  # pass the normalised output to the next step (EAGLE-3.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other; a head has one of them at most")
        width = self.target_hidden_size * self.num_aux_hidden_states
        if not self.projects_features and width != self.hidden_size:
            raise ValueError(
                f"features of width {width} need a linear layer (fc.weight) to get the width {self.hidden_size}"
            )


class Eagle1Head(DraftHead):
    """EAGLE-1 and EAGLE-2 (and HASS): predicts the target's last hidden state, the input of its output matrix."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.projection_bias)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, index) for index in range(config.num_layers))
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = RotaryEmbedding(config.layer)

    def forward(self, inputs: HeadInputs, cache: Cache | None = None) -> HeadOutput:
        """One pass over known positions, one draft step, or one level of a draft tree."""
        embeddings, hidden, positions, mask = inputs
        states = self.fc(torch.cat((embeddings, hidden), dim=-1))
        rotary = self.rotary(states, positions)
        for layer in self.layers:
            states = layer(states, rotary, mask, cache)
        return HeadOutput(states, states)


class Eagle3Head(DraftHead):
    """EAGLE-3 and P-EAGLE, with the options of speculators, SpecForge, ModelOpt and DeepSpec."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        count = config.num_aux_hidden_states
        width = config.target_hidden_size
        eps = config.layer.rms_norm_eps
        features = count * width
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(features, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(count))
        if config.projects_features:
            self.fc = nn.Linear(features, config.hidden_size, bias=config.projection_bias)
        rest = (DecoderLayer(config.layer, index) for index in range(1, config.num_layers))
        self.layers = nn.ModuleList((FusedLayer(config.layer, config.norm_before_residual), *rest))
        self.norm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.rotary = RotaryEmbedding(config.layer)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, features))

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """A low, a middle and a high state; the last one for a head that reads a single state."""
        return eagle_layers(num_layers) if self.config.num_aux_hidden_states > 1 else (num_layers,)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """`[batch, length, layers * target_hidden]` features to `[batch, length, hidden]` states."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_aux_hidden_states, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features) if self.config.projects_features else features

    def forward(self, inputs: HeadInputs, cache: Cache | None = None) -> HeadOutput:
        """As `Eagle1Head.forward`."""
        embeddings, hidden, positions, mask = inputs
        rotary = self.rotary(hidden, positions)
        states: Any = (embeddings * self.config.input_embedding_scale, hidden)
        for layer in self.layers:
            states = layer(states, rotary, mask, cache)
        normed = self.norm(states)
        return HeadOutput(normed if self.config.norm_output else states, normed)


class FusedLayer(DecoderLayer):
    """The first layer of EAGLE-3: the input of its attention is the concatenated embedding and hidden state."""

    def __init__(self, config: LayerConfig, norm_before_residual: bool) -> None:
        super().__init__(config, layer_index=0, attention_input=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor], *places: Any) -> torch.Tensor:  # type: ignore[override]
        """`[batch, length, hidden]` embeddings and states to `[batch, length, hidden]`; `places` as for `Attention`."""
        embeddings, hidden = inputs
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        return self.add(normed if self.norm_before_residual else hidden, self.self_attn(both, *places))


def eagle_layers(num_layers: int) -> tuple[int, ...]:
    """Which states EAGLE-3 reads by default: low, middle, high; with six layers the last two coincide."""
    return tuple(dict.fromkeys((2, num_layers // 2, num_layers - 3)))


def _check_full_attention(file: HeadFile) -> None:
    """Raise a `ValueError` if the config gives a layer a sliding window; Qwen ignores it where its use is off."""
    layers = file.of_layers
    use = layers.get("use_sliding_window")
    window = None if use is False else layers.optional_integer("sliding_window")
    if window is None:
        return
    types = layers.values.get("layer_types")
    if types is None and use:
        full = layers.optional_integer("max_window_layers") or 0
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(file.num_layers)]
    if "sliding_attention" in list(types or ())[: file.num_layers]:
        raise ValueError(
            f"EAGLE heads with a sliding window ({window} positions) are not supported; load one with full attention"
        )


def load_eagle1(file: HeadFile) -> Eagle1Head:
    """An EAGLE-1, EAGLE-2 or HASS head: a Llama config, and a layer without the first norm."""
    _check_full_attention(file)
    options = file.common(projects=False)
    if options["layer"].is_gemma:
        raise ValueError("EAGLE-1 heads with layers of Gemma 4 are not supported; load an EAGLE-3 head")
    config = EagleConfig(**options, num_layers=file.num_layers, projection_bias=file.has("fc.bias"))
    return file.build(Eagle1Head, config)


def load_eagle3(file: HeadFile) -> Eagle3Head:
    """An EAGLE-3 or P-EAGLE head: a Llama or Qwen3 config, flat or in the format of speculators."""
    _check_full_attention(file)
    fields = file.fields
    # In other flat files the field says whether there is a norm before the output matrix.
    feeds_back = file.is_nested or file.has("layers.0.self_attn.kv_b_proj.weight")
    if not feeds_back and fields.get("norm_output") is False:
        raise ValueError("a head without a norm before its output matrix (norm_output: false) is not supported")
    projects = fields.get("use_aux_hidden_state") is not False
    is_parallel = file.has("mask_hidden") or fields.get("mask_token_id") is not None
    config = EagleConfig(
        **file.common(projects),
        num_layers=file.num_layers,
        projects_features=projects,
        projection_bias=file.has("fc.bias"),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc") or file.has("input_norm.weight"),
        fc_norm=fields.flag("fc_norm") or fields.flag("use_aux_norm") or file.has("fc_norm.0.weight"),
        norm_output=feeds_back and fields.flag("norm_output"),
        mask_token_id=file.mask_token() if is_parallel else None,
    )
    return file.build(Eagle3Head, config)
