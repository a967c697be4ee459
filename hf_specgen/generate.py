"""The keyword `generate(candidate_generator=…)`: the arguments of such a call, and those that cannot accompany it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from hf_specgen.speculation import speculate

CALL_SETTINGS = ("verification", "policy", "monitor", "compile", "pack_weights")
"""Keywords of `generate` that may accompany `candidate_generator=`."""


def generate_speculatively(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`model.generate(*args, **kwargs)` with the keywords of this package; called by the `generate` of `patch`.

    Args:
        original: `GenerationMixin.generate` as it was before it was patched.
        model: the model.
        args, kwargs: the arguments of the call.
    """
    generator, method = kwargs.pop("candidate_generator", None), kwargs.get("custom_generate")
    if generator is not None:
        if method is not None:
            raise ValueError("both candidate_generator= and custom_generate= were given; leave one out")
        settings = {name: kwargs.pop(name) for name in CALL_SETTINGS if name in kwargs}
        method = speculate(generator, **settings)
    return _generate(original, model, args, kwargs, method)


def _generate(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: Any
) -> Any:
    """Call `generate` with our decoding method, handling the arguments that it does not pass on to that."""
    kwargs = by_name(original, args, kwargs)
    if reason := unsupported_argument(kwargs):
        raise ValueError(reason)
    kwargs.pop("synced_gpus", None)
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is not None:
        kwargs.update(_stop_strings_as_criteria(model, kwargs.get("generation_config"), tokenizer, kwargs))
    return original(model, **{**kwargs, "custom_generate": method})


def by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate` call, those given by position included.

    Raises:
        TypeError: as from `generate`, for an argument given twice or too many given by position.
    """
    signature = inspect.signature(original)
    signature.bind(None, *args, **kwargs)
    names = list(signature.parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def unsupported_argument(arguments: dict[str, Any]) -> str | None:
    """Why a call with these arguments cannot speculate, as far as `generate` would not pass them on to us."""
    if arguments.get("assistant_model") is not None:
        return "both candidate_generator= and assistant_model= were given; leave one out"
    if arguments.get("synced_gpus"):
        return "candidate_generator= does not work with synced_gpus=True (FSDP, ZeRO-3); leave it out"
    config = arguments.get("generation_config")
    if "paged" in (arguments.get("cache_implementation"), getattr(config, "cache_implementation", None)):
        return "candidate_generator= does not work with continuous batching (cache_implementation='paged')"
    return None


def _stop_strings_as_criteria(
    model: Any, config: GenerationConfig | None, tokenizer: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The stop strings of a call as a stopping criterion, whose tokenizer `generate` drops with `custom_generate`.

    Returns:
        the arguments of `generate` to replace; none without stop strings.
    """
    given = [kwargs.get("stop_strings"), config and config.stop_strings, model.generation_config.stop_strings]
    stop_strings = next((strings for strings in given if strings is not None), None)
    if stop_strings is None:
        return {}
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return {"stop_strings": None, "stopping_criteria": criteria}
