"""Checks once per model that verification computes what plain `generate` computes, and refuses the model otherwise.

No interface guarantees that a model places tokens by `position_ids`, respects a 4-D mask, keeps all its state in the
cache, or can be divided at a layer. So a short text is decoded both ways (`hf_specgen.targets.trial`); for a prompt
with images or audio, and for an encoder-decoder, the prompt of the call is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets import trial
from hf_specgen.targets.early_exit import divisible_layers
from hf_specgen.targets.encoder import reads_encoder
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.targets.step_inputs import accompanying_inputs
from hf_specgen.targets.support import is_causal_kernel

ENCODER_DECODER_MASKS = ("attention_mask", "decoder_attention_mask")

_lock = threading.Lock()
_checked: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()


def check_computation(
    model: PreTrainedModel,
    requirements: TargetRequirements,
    input_ids: torch.Tensor | None = None,
    config: GenerationConfig | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> None:
    """Raise unless the model, run as `requirements` says, computes what plain `generate` computes.

    The result is cached by model, exit layer, dtype, device, attention implementation, training mode and names of the
    inputs beside text; for a model that reads an encoder also by its masks, and whether there are several rows. The
    result of a trial that failed is not cached, nor that of one in which plain decoding gave NaN, +inf or nothing but
    -inf: `generate` itself reports those.

    Args:
        model, requirements: what is run.
        input_ids, config, model_kwargs: the prompt of the call, as prepared by `generate`; text only if left out,
            which an encoder-decoder does not allow.

    Raises:
        ValueError: if there is no such exit layer, or the model computes something else, or fails.
    """
    if requirements.exit_layer is not None:
        divisible_layers(model, requirements.exit_layer)  # a layer that does not exist is no failure of a trial
    implementation = compat.attention_implementation(text_config(model))
    key = (requirements.exit_layer, model.dtype, compat.input_device(model), implementation, model.training)
    requirements = TargetRequirements(exit_layer=requirements.exit_layer)
    if reads_encoder(model):
        assert input_ids is not None and config is not None and model_kwargs is not None
        prompt = input_ids, config, model_kwargs
        shape = (len(input_ids) > 1, *(name for name in ENCODER_DECODER_MASKS if name in model_kwargs))
        _check(model, requirements, (*key, *shape), (), lambda: trial.compare(model, requirements, *prompt))
        return
    if is_causal_kernel(implementation):  # rows of a batch accept different numbers of tokens, which needs a mask
        _check_one_row(model, requirements, key, None, input_ids, model_kwargs)
    else:
        try:
            _check(model, requirements, key, (), lambda: trial.compare_text(model, requirements))
        except ValueError as refusal:
            _check_one_row(model, requirements, key, refusal, input_ids, model_kwargs)
    inputs = tuple(sorted(accompanying_inputs(model_kwargs or {})))
    if inputs:
        assert input_ids is not None and config is not None and model_kwargs is not None
        prompt = input_ids, config, model_kwargs
        _check(model, requirements, key, inputs, lambda: trial.compare(model, requirements, *prompt))


def _check_one_row(
    model: PreTrainedModel,
    requirements: TargetRequirements,
    key: tuple[Any, ...],
    refusal: ValueError | None,
    input_ids: torch.Tensor | None,
    model_kwargs: dict[str, Any] | None,
) -> None:
    """Raise the refusal of a model that fails in batches, unless it passes with one row and the call has no more."""
    one_row = (*key, "one row")
    try:
        _check(model, requirements, one_row, (), lambda: trial.compare_text(model, requirements, rows=1))
    except ValueError as error:
        raise (refusal or error) from None
    mask = None if model_kwargs is None else model_kwargs.get("attention_mask")
    if input_ids is None or len(input_ids) > 1 or (mask is not None and not bool(mask.all())):
        reason = "rows of different lengths get other scores than in plain decoding"
        if refusal is None:
            reason = f"{key[3]} takes no mask, which rows of different lengths need"
        raise _refusal(model, requirements, (), reason, "one row") from refusal


def _check(
    model: PreTrainedModel,
    requirements: TargetRequirements,
    key: tuple[Any, ...],
    inputs: tuple[str, ...],
    compare: Callable[[], None],
) -> None:
    """Run a comparison unless its result is known, and raise if it differed."""
    with _lock:
        known = _checked.setdefault(model, {})
        if (*key, inputs) not in known:
            try:
                compare()
                known[(*key, inputs)] = None
            except trial.DifferenceError as found:
                known[(*key, inputs)] = str(found)
            except trial.UndecidedError:
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                reason = f"a trial run failed ({type(error).__name__}: {error})"
                raise _refusal(model, requirements, inputs, reason) from error
        difference = known[(*key, inputs)]
    if difference is not None:
        raise _refusal(model, requirements, inputs, difference)


def _refusal(
    model: PreTrainedModel, requirements: TargetRequirements, inputs: tuple[str, ...], reason: str, works: str = ""
) -> ValueError:
    what, remedy = "verify draft tokens", "call generate() without candidate_generator="
    if works:
        remedy = "give one prompt at a time, without padding, or leave candidate_generator= out"
    if requirements.exit_layer:
        what, remedy = "draft with its own first layers", "use another candidate generator"
    given = f" with {', '.join(inputs)}" if inputs else ""
    return ValueError(f"{type(model).__name__} cannot {what}{given}: {reason}; {remedy}")
