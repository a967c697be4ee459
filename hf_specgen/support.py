"""Which models can verify a draft tree, and a clear sentence for those that cannot.

What a model must do: place tokens by `position_ids`, take a 4-D attention mask, and keep all its state in a key/value
cache (a recurrent state cannot be rolled back when a guess is rejected).
"""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def check_model(model: PreTrainedModel) -> None:
    """Raise unless `model` can verify several guesses in one forward pass.

    Args:
        model: a causal language model.

    Raises:
        ValueError: one sentence on what the model lacks and what to do.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model; candidate_generator= works with decoder-only models, so leave it out"
        )
    layer_types = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(layer_types.difference(LAYER_TYPES))
    if model._is_stateful or unknown:
        kinds = f" (layer types {', '.join(unknown)})" if unknown else ""
        raise ValueError(
            f"{name} keeps a state that cannot be rolled back when a guess is rejected{kinds}; "
            "call generate() without candidate_generator="
        )
    implementation = config._attn_implementation
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {implementation!r} takes no tree-shaped mask; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    if reason := _position_problem(model):
        raise ValueError(
            f"{name} {reason}, so guesses cannot be placed in a tree; call generate() without candidate_generator="
        )


def _position_problem(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if getattr(config, "alibi", False):
        return "derives positions from a 2-D mask (ALiBi)"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "builds its local attention mask inside the layers"
    return None
