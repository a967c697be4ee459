"""Auxiliary hidden states: which states of the target a head reads, counted as Transformers counts `hidden_states`.

Index 0 is the embedding, index i the output of layer i - 1, and the last index the state after the final norm. Formats
count differently; only this file converts them. A wrong index never changes the generated text, but the draft tokens
are accepted less often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_aux_hidden_state_layer_ids",), 0),  # speculators, vLLM (eagle3, peagle)
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 1),  # SGLang, SpecForge, ModelOpt
    (("aux_hidden_state_layer_ids",), 0),  # speculators (dflash)
    (("dflash_config", "target_layer_ids"), 1),  # z-lab DFlash, JetSpec
    (("target_layer_ids",), 1),  # DeepSpec
)
"""Fields of config.json that name layers, and what to add to their numbers."""


def configured_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The `hidden_states` indices that a head's config.json names, or None if it leaves them to the default."""
    layers: dict[str, tuple[int, ...]] = {}
    for path, offset in FIELDS:
        ids: Any = config
        for key in path:
            ids = ids.get(key) if isinstance(ids, Mapping) else None
        if ids is None:
            continue
        name = ".".join(path)
        # Where ids count outputs of layers, -1 is the embedding.
        if not isinstance(ids, list) or not ids or not all(type(entry) is int and entry >= -offset for entry in ids):
            raise ValueError(f"{name} must be a list of layer numbers, got {str(ids)[:80]!r}")
        layers[name] = tuple(entry + offset for entry in ids)
    if len(set(layers.values())) > 1:
        raise ValueError(f"config.json names the target's layers twice, and differently: {layers}; remove one of them")
    return next(iter(layers.values()), None)


def eagle_layers(num_layers: int) -> tuple[int, ...]:
    """Which states EAGLE-3 reads by default: low, middle, high; with six layers the last two coincide."""
    return tuple(dict.fromkeys((2, num_layers // 2, num_layers - 3)))


def block_layers(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Which states DFlash reads by default: spread evenly, one for each draft layer."""
    if num_draft_layers == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + layer * step) + 1 for layer in range(num_draft_layers))
