"""Makes the target that a strategy needs: hidden states, an early exit, captured passes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel, QuantizedCache

from hf_specgen import compat
from hf_specgen.call import Compile
from hf_specgen.targets.cuda_graphs import CAPTURES
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.hidden_states import HiddenStateReplayTarget, HiddenStateRowTarget, HiddenStateTarget
from hf_specgen.targets.inputs import PreparedCall, accompanying_inputs
from hf_specgen.targets.model_parts import has_special_layers, image_layers, layer_kinds, text_config
from hf_specgen.targets.replay_target import ReplayTarget, needs_replay
from hf_specgen.targets.row_target import RowTarget
from hf_specgen.targets.support import first_problem
from hf_specgen.targets.target import Target

logger = logging.getLogger("hf_specgen")
OUTPUT_STATE = -1
"""Stands for the input of the output matrix (after the final norm)."""

_logged: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()
"""Why passes of a model are not captured, as far as it was logged."""


@dataclass(frozen=True)
class TargetRequirements:
    """What a strategy needs from the target's forward passes: hidden states, or layers that run separately.

    Args:
        aux_hidden_state_layers: indices into Transformers' `hidden_states`, whose states are captured; `OUTPUT_STATE`
            for the input of the output matrix, which for a prompt may be the last position alone.
        exit_layer: number of first layers that run separately to draft; None if not needed.
        reads_cache: whether drafting attends to the target's own keys and values.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    exit_layer: int | None = None
    reads_cache: bool = False

    def __or__(self, other: TargetRequirements) -> TargetRequirements:
        """Both requirements together; raises for two different exit layers, or an exit layer beside hidden states."""
        exits = {self.exit_layer, other.exit_layer} - {None}
        aux_layers = tuple(dict.fromkeys(self.aux_hidden_state_layers + other.aux_hidden_state_layers))
        if len(exits) > 1 or (exits and aux_layers):
            raise ValueError(
                "these strategies run the target in different ways (an early exit, hidden states); keep one of them"
            )
        return TargetRequirements(aux_layers, exits.pop() if exits else None, self.reads_cache or other.reads_cache)


def check_decoder_only(model: PreTrainedModel, strategy: str) -> None:
    """Raise if a strategy that divides the layers or adapts them is used with an encoder-decoder model."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{strategy} does not work with {type(model).__name__}: it runs layers of the target by itself, which is "
            "implemented for decoder-only models, whose layers read nothing beside the text; with an encoder-decoder "
            "use NgramCandidates, RecyclingCandidates, DraftModelCandidates or a draft head"
        )


def make_target(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    compile: Compile = False,
    joins_shared_target: bool = False,
) -> Target:
    """The target of one call, with captured passes as `compile` specifies; raises if it cannot be made.

    With `joins_shared_target`, one that can become a row of a shared target, unless the model needs another kind.
    """
    call = PreparedCall(model, input_ids, config, model_kwargs)
    is_possible = compile == "graphs" or (compile == "auto" and compat.input_device(model).type in CAPTURES)
    graphs: Compile = compile if is_possible else False
    if graphs and (problem := _capture_problem(requirements, call, graphs)) is not None:
        if graphs == "graphs":
            raise ValueError(f'{problem}; leave compile="graphs" out')
        if problem not in (logged := _logged.setdefault(model, set())):
            logger.info("no CUDA graphs: %s", problem)
            logged.add(problem)
        graphs = False
    if "encoder_outputs" in model_kwargs and requirements.exit_layer:
        check_decoder_only(model, "this strategy")
    if requirements.reads_cache and _is_compact(model_kwargs.get(compat.CACHE)):
        raise ValueError(
            "this strategy reads the target's keys and values, which an offloaded or quantized cache does not hold as "
            'they are; give cache_implementation="dynamic"'
        )
    if requirements.exit_layer is not None:
        return EarlyExitTarget(call, requirements.exit_layer)
    of_text: type[Target] = Target
    of_states = HiddenStateTarget
    if needs_replay(model, model_kwargs):
        of_text = ReplayTarget
        of_states = HiddenStateReplayTarget
    elif joins_shared_target:
        of_text = RowTarget
        of_states = HiddenStateRowTarget
    if aux_layers := requirements.aux_hidden_state_layers:
        return of_states(call, aux_layers, graphs)
    return of_text(call, graphs)


def _is_compact(cache: Any) -> bool:
    """Whether a cache of Transformers is offloaded or quantized."""
    return bool(getattr(cache, "offloading", False)) or isinstance(cache, QuantizedCache)


def _capture_problem(requirements: TargetRequirements, call: PreparedCall, mode: Compile) -> str | None:
    """Why passes of a model are not captured in a call, as far as is known before; None if they may be."""
    model, _, generation, model_kwargs = call
    device = compat.input_device(model).type
    config = text_config(model)
    implementation = compat.attention_implementation(config)
    given = model_kwargs.get(compat.CACHE)
    window = config.sliding_window if "sliding_attention" in layer_kinds(config) else 0
    is_long = generation.max_length is None or generation.max_length > 2 * window
    problems = {
        f"is on {device!r}, and CUDA graphs need a GPU": device not in CAPTURES,
        "reads an encoder, and passes of decoder-only models are captured": "encoder_outputs" in model_kwargs,
        "runs a part of its layers (layer skip), and whole passes are captured": requirements.exit_layer is not None,
        "is compiled already, and a pass is captured of a model that is not": compat.has_compiled_parts(model),
        "has weights that are offloaded or on several devices, which are moved in every pass": (
            compat.has_device_hooks(model)
        ),
        f"uses {implementation!r} attention, and passes are captured with 'sdpa' or 'eager'": (
            implementation not in ("sdpa", "eager")
        ),
        "keeps convolutions, recurrent states or indices in its cache, which captured passes do not write": (
            has_special_layers(config)
        ),
        "attends to images in layers of their own, whose keys captured passes do not read": bool(image_layers(config)),
        "runs under torch.autocast, which casts weights in every pass": torch.is_autocast_enabled(device),
        "gets inputs beside text, and passes over text are captured": bool(accompanying_inputs(model_kwargs)),
        "was given a cache without the slots outside of sliding windows, which captured passes need": (
            compat.is_user_defined(given) and any(getattr(given, "is_sliding", ()))
        ),
        "keeps its cache offloaded or quantized, and captured passes write keys and values": (_is_compact(given)),
        "has sliding windows, whose layers would keep all of a long text": mode == "auto" and window > 0 and is_long,
    }
    return first_problem(model, problems)
