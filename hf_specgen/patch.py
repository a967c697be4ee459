"""Adds the keyword `candidate_generator=` to `GenerationMixin.generate` without importing PyTorch.

Transformers' generation code takes seconds to import. If it is loaded already, `install` patches `generate` at once;
otherwise an import hook patches it when a program loads it. The rest of this package is imported by the first call that
passes the keyword.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GENERATION = "transformers.generation.utils"  # the module that defines `GenerationMixin`
ATTACHMENT = "_hf_specgen_attachment"
"""Name of the attribute that holds the strategy attached to a model, see `hf_specgen.attachment`."""
OWN_KEYWORDS = {"verification", "policy", "monitor", "prediction", "history", "grammar_drafts"}
"""Keywords that make no sense without a strategy, and that no model takes."""


def install() -> None:
    """Add the keyword `candidate_generator=` to `GenerationMixin.generate`, and those of `speculate`. Idempotent.

    Without `candidate_generator`, `generate` does exactly what it did before. `import hf_specgen` calls this.
    """
    mixin = getattr(sys.modules.get(GENERATION), "GenerationMixin", None)
    if mixin is not None:
        _patch(mixin)
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


def uninstall() -> None:
    """Remove the keyword: `generate` is then what it was before `install`.

    A wrapper that other code has put around ours since then stays; inside it, ours only passes calls on.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PatchOnImport)]
    mixin = getattr(sys.modules.get(GENERATION), "GenerationMixin", None)
    for name in WRAPPERS:
        patched = getattr(getattr(mixin, name, None), "_hf_specgen_patched", None)
        if patched is not None:
            patched._hf_specgen_enabled = False
            if getattr(mixin, name) is patched:
                setattr(mixin, name, patched._hf_specgen_original)


def _patch(mixin: Any) -> None:
    for name, wrap in WRAPPERS.items():
        if (original := getattr(mixin, name, None)) is None:
            continue
        # `functools.wraps` copies attributes, so this finds our function inside other wrappers too.
        patched = getattr(original, "_hf_specgen_patched", None)
        if patched is None:
            patched = wrap(original)
            # As deep as without us: of a `generate` below `no_grad`, `__wrapped__` is the one that keeps gradients.
            patched.__wrapped__ = getattr(original, "__wrapped__", original)
            patched._hf_specgen_original = original
            patched._hf_specgen_patched = patched
            setattr(mixin, name, patched)
        patched._hf_specgen_enabled = True


def _with_keyword(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not generate._hf_specgen_enabled:  # type: ignore[attr-defined]
            return original(self, *args, **kwargs)
        _check_configs(getattr(self, "generation_config", None), kwargs.get("generation_config"), *args[1:2])
        # Recognised without an import: other threads may be importing the module of `Speculation` now.
        is_ours = getattr(type(kwargs.get("custom_generate")), "_hf_specgen_speculation", False)
        if hasattr(kwargs.get("custom_generate"), "get_candidates"):
            raise ValueError("custom_generate= takes no strategy; give it as candidate_generator=, or as speculate(…)")
        if is_ours or kwargs.get("candidate_generator") is not None:
            from hf_specgen.generate import generate_speculatively

            return generate_speculatively(original, self, args, kwargs)
        attachment = None if "candidate_generator" in kwargs else getattr(self, ATTACHMENT, None)
        kwargs.pop("candidate_generator", None)
        if attachment is None:
            keywords = kwargs.keys() & OWN_KEYWORDS
            # A decoding method of somebody else may have settings of these names.
            if keywords and kwargs.get("custom_generate") is None:
                raise ValueError(f'{min(keywords)}= needs a strategy: give candidate_generator= too, such as "auto"')
            return original(self, *args, **kwargs)
        return attachment.generate(original, self, args, kwargs)

    return generate


def _of_continuous_batching(function: str) -> Callable[[Callable[..., Any]], Any]:
    """The wrapper of a method of continuous batching: a function of `hf_specgen.batching.continuous`.

    Without an attached strategy and keywords of ours nothing is imported, and the method does what it did before.
    """

    def wrap(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            attachment = getattr(self, ATTACHMENT, None)
            module = sys.modules.get("hf_specgen.batching.continuous")
            is_ours = attachment is not None or "candidate_generator" in kwargs or module is not None
            if not method._hf_specgen_enabled or not is_ours:  # type: ignore[attr-defined]
                return original(self, *args, **kwargs)
            from hf_specgen.batching import continuous

            return getattr(continuous, function)(original, self, args, kwargs, attachment)

        return method

    return wrap


WRAPPERS = {
    "generate": _with_keyword,
    "generate_batch": _of_continuous_batching("generate_batch"),
    "init_continuous_batching": _of_continuous_batching("init_manager"),
}
"""The methods of `GenerationMixin` that are patched, and what makes their wrappers."""


def _check_configs(*configs: Any) -> None:
    """Raise for a strategy in a generation config, where it would be ignored and could not be saved."""
    for config in configs:
        if getattr(config, "candidate_generator", None) is not None:
            raise ValueError(
                "a GenerationConfig cannot hold candidate_generator: it would be ignored, and the config could not be "
                "saved. Give it to generate(candidate_generator=…), or call hf_specgen.attach(model, …) once, so that "
                "every model.generate() speculates"
            )


class _PatchOnImport(MetaPathFinder):
    """Import hook that patches `generate` as soon as the module that defines it has been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != GENERATION:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_patch(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:  # not uninstalled meanwhile
                    sys.meta_path.remove(self)
                    _patch(module.GenerationMixin)

            spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec
