"""What a strategy needs from the target's forward passes, and the `Target` class that provides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen.targets.base import Target
from hf_specgen.targets.common_length import CommonLengthTarget
from hf_specgen.targets.compilable import Compile, named
from hf_specgen.targets.compiled import compiled_passes
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.encoder import takes_positions
from hf_specgen.targets.hidden_states import HiddenStateTarget

OUTPUT_STATE = -1
"""The tap of the output matrix's input (after the final norm)."""


@dataclass(frozen=True)
class TargetRequirements:
    """What a strategy needs from the target's forward passes.

    Args:
        taps: hidden states to capture, as indices into Transformers' `hidden_states` tuple: 0 the embeddings, i the
            output of layer i - 1, the number of layers the state after the final norm; `OUTPUT_STATE` the input of the
            output matrix, which for a prompt may be the last position alone.
        exit_layer: number of first layers that run separately to draft; None if not needed.

    Example:
        >>> TargetRequirements(taps=(2, 4)) | TargetRequirements(taps=(4, 6))
        TargetRequirements(taps=(2, 4, 6), exit_layer=None)
    """

    taps: tuple[int, ...] = ()
    exit_layer: int | None = None

    def __or__(self, other: TargetRequirements) -> TargetRequirements:
        """Both requirements together.

        Raises:
            ValueError: for two different exit layers, or an exit layer beside taps.
        """
        exits = {self.exit_layer, other.exit_layer} - {None}
        taps = (*self.taps, *(tap for tap in other.taps if tap not in self.taps))
        if len(exits) > 1 or (exits and taps):
            raise ValueError(
                "these strategies run the target in different ways (an early exit, hidden states); keep one of them"
            )
        return TargetRequirements(taps, exits.pop() if exits else None)


def check_decoder_only(model: PreTrainedModel, strategy: str) -> None:
    """Raise if a strategy that reads hidden states or divides the layers is used with an encoder-decoder model.

    Args:
        model: the target.
        strategy: its name.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{strategy} does not work with {type(model).__name__}: it needs hidden states or an early exit, which are "
            "implemented for decoder-only models, whose layers read nothing beside the text; with an encoder-decoder "
            "use NgramCandidates, RecyclingCandidates or DraftModelCandidates"
        )


def make_target(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    compile: Compile = False,
) -> Target:
    """The target of one call, with compiled or captured passes unless `compile` is False.

    Raises:
        ValueError: if the model cannot provide what is required, or cannot be compiled.
    """
    if "encoder_outputs" in model_kwargs:
        if requirements.taps or requirements.exit_layer is not None:
            check_decoder_only(model, "this strategy")
        if compile:
            raise ValueError(f"{named(compile)} works with decoder-only models; leave it out for encoder-decoders")
        kind = Target if takes_positions(model) else CommonLengthTarget
        return kind(model, input_ids, config, model_kwargs)
    if compile and requirements.exit_layer is not None:
        raise ValueError(
            f"{named(compile)} does not work with strategies that run a part of the target's layers (layer skip); "
            "leave it out, or use another candidate generator"
        )
    compiled = compiled_passes(model, compile) if compile else None
    if requirements.exit_layer is not None:
        return EarlyExitTarget(model, input_ids, config, model_kwargs, requirements.exit_layer)
    if requirements.taps:
        return HiddenStateTarget(model, input_ids, config, model_kwargs, requirements.taps, compiled)
    return Target(model, input_ids, config, model_kwargs, compiled)
