"""Which hidden states of the target a draft head reads, counted as Transformers counts `hidden_states`.

Index 0 is the embedding, index i the output of layer i - 1, and the last index the state after the final norm. Formats
count differently; only this file converts them:

| field of config.json | written by | index |
|---|---|---|
| `eagle_aux_hidden_state_layer_ids` | speculators, vLLM (eagle3, peagle) | id |
| `eagle_config.eagle_aux_hidden_state_layer_ids` | SGLang, SpecForge, ModelOpt | id + 1 |
| `aux_hidden_state_layer_ids` | speculators (dflash) | id |
| `dflash_config.target_layer_ids` | z-lab DFlash, JetSpec | id + 1 |
| `target_layer_ids` | DeepSpec | id + 1 |

A wrong index never changes the generated text, but the draft tokens are accepted less often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version

# Earlier versions count a list of indices without the embedding.
SELECTS_HIDDEN_STATES = Version(transformers.__version__) >= Version("5.23")

FIELDS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_aux_hidden_state_layer_ids",), 0),
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 1),
    (("aux_hidden_state_layer_ids",), 0),
    (("dflash_config", "target_layer_ids"), 1),
    (("target_layer_ids",), 1),
)


def read_taps(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The `hidden_states` indices that a head's config.json names, or None if it leaves them to the default.

    Raises:
        ValueError: if a field holds something other than a list of layer numbers, or two fields disagree.

    Example:
        >>> read_taps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}})
        (2, 12, 22)
    """
    found: dict[str, tuple[int, ...]] = {}
    for path, offset in FIELDS:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            continue
        name = ".".join(path)
        # Where ids count outputs of layers, -1 is the embedding.
        if (
            not isinstance(value, list)
            or not value
            or not all(type(entry) is int and entry >= -offset for entry in value)
        ):
            raise ValueError(f"{name} must be a list of layer numbers, got {str(value)[:80]!r}")
        found[name] = tuple(entry + offset for entry in value)
    if len(set(found.values())) > 1:
        raise ValueError(f"config.json names the target's layers twice, and differently: {found}; remove one of them")
    return next(iter(found.values()), None)


def eagle_taps(num_layers: int) -> tuple[int, ...]:
    """Where EAGLE-3 reads a target of that many layers if its config does not say: low, middle, high.

    With six layers the last two coincide, and the original implementation then reads two states.

    Example:
        >>> eagle_taps(32), eagle_taps(6)
        ((2, 16, 29), (2, 3))
    """
    return tuple(dict.fromkeys((2, num_layers // 2, num_layers - 3)))


def block_taps(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Where DFlash reads a target if its config does not say: spread evenly, one state for each draft layer.

    Example:
        >>> block_taps(36, 5)
        (2, 10, 18, 26, 34)
    """
    if num_draft_layers == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + layer * step) + 1 for layer in range(num_draft_layers))


def capture_arguments(taps: Sequence[int]) -> dict[str, Any]:
    """Arguments of the target's forward pass that make it return these hidden states, and keep no others.

    Transformers captures them per call, so passes of other threads are not mixed up. Before 5.23 all states are kept.
    """
    return {"output_hidden_states": list(taps) if SELECTS_HIDDEN_STATES else True}


def concatenate(hidden_states: Sequence[torch.Tensor | None], taps: Sequence[int]) -> torch.Tensor:
    """The features that a head reads.

    Args:
        hidden_states: of the target's output: a tuple of `[batch, length, hidden]`, None where not captured.
        taps: the indices, in the order in which the head was trained.

    Returns:
        `[batch, length, taps * hidden]`.
    """
    chosen = [hidden_states[tap] for tap in taps]
    missing = [tap for tap, state in zip(taps, chosen, strict=True) if state is None]
    if missing:
        raise ValueError(f"the target did not return its hidden states {missing}; pass it `capture_arguments(taps)`")
    return torch.cat([state for state in chosen if state is not None], dim=-1)
