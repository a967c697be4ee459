"""Attaches a strategy to a model, so that every `model.generate()` of any library speculates.

The strategy and its settings are one attribute of the model object, which the patched `generate` reads, see
`hf_specgen.patch`. So whatever wraps, copies or pickles the model carries it along; the config, the weights and
checkpoints do not contain it.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.call import UnrepeatableError
from hf_specgen.call_statistics import CallTotals, Statistics
from hf_specgen.candidates.combined import Preset
from hf_specgen.generate import Speculation, by_name, run
from hf_specgen.libraries import adapter_hooks_removed, unwrapped_model
from hf_specgen.patch import ATTACHMENT, install
from hf_specgen.settings import KEYWORDS, Settings, settings_in
from hf_specgen.targets.early_exit import divisible_layers
from hf_specgen.targets.hooks import own_attributes
from hf_specgen.targets.support import check_architecture
from hf_specgen.unsupported_calls import unsupported_argument
from hf_specgen.verification import ExactVerifier
from hf_specgen.verification.processors import name_of

M = TypeVar("M", bound=nn.Module)


def attach(
    model: M, candidate_generator: CandidateGenerator | Preset = "auto", *, strict: bool = False, **settings: Any
) -> M:
    """Make every `model.generate()` speculate, whoever calls it, until `detach(model)`.

    The tokens are those of plain `generate`. The strategy stays with the model when it is wrapped (PEFT, DDP,
    `accelerate.prepare`, `torch.compile`), copied or pickled; a copy counts its own statistics, and a pickled model
    loses the monitor. `generate(candidate_generator=…)` takes precedence for one call, and None there generates
    plainly; `verification=`, `policy=` and the other settings of `speculate` may be given for one call too. Calls that
    `generate` itself makes for the same model, as with `assistant_early_exit`, are plain and not counted.

    Args:
        model: a causal language model, or a wrapper of one. A strategy that is attached to it already is replaced.
        candidate_generator: proposes draft tokens; or a preset, "auto", "latency", "throughput" or "memory".
        strict: raise for a call that cannot speculate (beam search, an assistant model, an unsupported cache). By
            default it falls back to plain generation, with one warning for each reason.
        settings: `verification`, `policy`, `monitor`, `compile`, `memory`, `prediction`, `history` and
            `grammar_drafts`, as for `speculate`.

    Returns:
        `model`, the same object.

    Raises:
        ValueError: if the model cannot speculate at all, or the strategy does not fit it.
        TypeError: if it is no model, or the strategy is no candidate generator.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_specgen import NgramCandidates, attach, statistics
        >>> model = attach(AutoModelForCausalLM.from_pretrained("benchmarks/assets/reference-lm"), NgramCandidates())
        >>> ids = model.generate(model.dummy_inputs["input_ids"][:1], max_new_tokens=4, do_sample=False)
        >>> statistics(model).calls
        1
    """
    target = _target(model, "attach")
    setattr(target, ATTACHMENT, _attachment(target, candidate_generator, strict, settings))
    install()
    return model


def _attachment(target: PreTrainedModel, candidate_generator: Any, strict: Any, keywords: dict[str, Any]) -> Attachment:
    """A strategy to attach; raises if it does not fit the model."""
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    if unknown := keywords.keys() - set(KEYWORDS):
        raise TypeError(f"attach takes {', '.join(KEYWORDS)} and strict, got {sorted(unknown)[0]}=")
    settings = Settings.parse(candidate_generator, **keywords)
    check_architecture(target)
    requirements = settings.for_model(target).candidates.target_requirements(target)
    if requirements.exit_layer is not None:
        divisible_layers(target, requirements.exit_layer)
    return Attachment(settings, strict)


def detach(model: M) -> M:
    """Undo `attach`: `model.generate()` is plain again. Does nothing if no strategy is attached.

    Returns:
        `model`, the same object.
    """
    with suppress(AttributeError):  # nothing is attached
        delattr(_target(model, "detach"), ATTACHMENT)
    return model


@contextmanager
def attached(
    model: nn.Module, candidate_generator: CandidateGenerator | Preset = "auto", **settings: Any
) -> Iterator[CallTotals]:
    """Attach a strategy for the duration of a `with` block; then restore what was attached before.

    Args:
        model, candidate_generator, settings: as for `attach`.

    Yields:
        the statistics of the calls in the block, updated with every call.
    """
    target = _target(model, "attached")
    attachment = _attachment(target, candidate_generator, settings.pop("strict", False), settings)
    with _block(target, attachment):
        token = _own_blocks.set({**_own_blocks.get(), id(target): attachment})
        try:
            yield attachment.totals
        finally:
            with suppress(ValueError):  # left in another context, as by asynchronous generators
                _own_blocks.reset(token)


def attached_to_every_model(attachment: Attachment) -> AbstractContextManager[Attachment]:
    """Attach a strategy to all models of the process that have none of their own, such as those that a server loads."""
    return _block(GenerationMixin, attachment)


def _attached_to(owner: Any) -> Attachment | None:
    """The attachment of a model itself, or of the class of all models; not what a model has from its class."""
    return own_attributes(owner).get(ATTACHMENT)


@contextmanager
def _block(owner: Any, attachment: Attachment) -> Iterator[Attachment]:
    """Set the attachment of a model, or of the class of all models; then restore that of a block which still runs."""
    install()
    with _lock:
        attachment.before = _attached_to(owner)
        setattr(owner, ATTACHMENT, attachment)
    try:
        yield attachment
    finally:
        with _lock:
            attachment.has_ended = True
            current = _attached_to(owner)
            while current is not None and current.has_ended:  # blocks of several threads end in any order
                current = current.before
                delattr(owner, ATTACHMENT) if current is None else setattr(owner, ATTACHMENT, current)


def statistics(model: nn.Module) -> CallTotals:
    """A copy of the statistics of all `generate` calls since `attach(model, …)`.

    Raises:
        ValueError: if no strategy is attached.
    """
    target = _target(model, "statistics")
    attachment = _attached_to(target)
    if attachment is None:
        raise ValueError(
            f"no strategy is attached to this {type(target).__name__}; call hf_specgen.attach(model) first"
        )
    with attachment.lock:
        return copy.deepcopy(attachment.totals)


_lock = threading.Lock()
_own_blocks: ContextVar[Mapping[int, Attachment]] = ContextVar("hf_specgen_own_blocks", default=MappingProxyType({}))
"""By model, the innermost `attached` block of this thread: its calls count there, whatever other threads attach."""
_running: ContextVar[frozenset[int]] = ContextVar("hf_specgen_running", default=frozenset())
"""Models of which a `generate` call runs in this thread: calls inside it are plain."""


class Attachment:
    """An attached strategy and the statistics of its calls. May be used by several threads."""

    before: Attachment | None = None  # what was attached when the block of this one began
    has_ended = False

    def __init__(self, settings: Settings, strict: bool = False):
        self.settings = settings
        self.strict = strict
        self.totals = CallTotals()
        self.lock = threading.Lock()
        self._reasons: dict[str, str] = {}  # a reason without its numbers -> the first reason of that kind

    def generate(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`model.generate(*args, **kwargs)` with the attached strategy, or without it if the call cannot speculate."""
        if id(model) in _running.get():
            return original(model, *args, **kwargs)
        token = _running.set(_running.get() | {id(model)})
        try:
            with adapter_hooks_removed(model):
                return self.of_thread(model)._generate(original, model, by_name(original, args, kwargs))
        finally:
            _running.reset(token)

    def _generate(self, original: Callable[..., Any], model: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("custom_generate") is not None:  # its keywords may have names of this package's
            self.report_plain("custom_generate= names another decoding method")
            return original(model, **kwargs)
        settings = self.settings.updated(**settings_in(kwargs, model))
        reason = unsupported_argument(kwargs)
        if reason is None:
            streamer = None if kwargs.get("streamer") is None else _ResumedStreamer(kwargs["streamer"])
            attempt = Speculation(settings, streamer)
            try:
                output = run(original, model, {**kwargs, "streamer": None}, attempt)
            except ValueError as error:
                # Plain decoding takes over a call that the checks of this package refused before its first token. A
                # call that is wrong without speculation too, or that has begun to generate, is not repeated plainly;
                # except where it was undone, and what was streamed are the tokens that plain decoding repeats.
                is_refused = attempt.is_prepared and attempt.statistics is None
                is_undone = isinstance(error, UnrepeatableError)
                can_resume = streamer is None or isinstance(settings.verifier, ExactVerifier)
                if self.strict or not (is_refused or (is_undone and can_resume)):
                    raise
                if is_undone and streamer is not None:
                    streamer.position = 0
                    kwargs = {**kwargs, "streamer": streamer}
                reason = str(error)
            else:
                if attempt.statistics is not None:
                    self.add(attempt.statistics)
                return output
        self.report_plain(reason)
        return original(model, **kwargs)

    def of_thread(self, model: Any) -> Attachment:
        """The attachment that counts for calls of this thread: that of its innermost `attached` block, if any."""
        return _own_blocks.get().get(id(model), self)

    def add(self, statistics: Statistics) -> None:
        """Count a call that speculated."""
        with self.lock:
            self.totals.add(statistics)

    def report_plain(self, reason: str) -> None:
        """Count a call that falls back, and warn of a new reason; raises a ValueError if the attachment is strict."""
        if self.strict:
            raise ValueError(reason)
        # Reasons that differ in a number are one reason.
        kind = re.sub(r"\d+", "", reason)
        with self.lock:
            is_new = kind not in self._reasons
            self.totals.plain_calls[self._reasons.setdefault(kind, reason)] += 1
        if is_new:
            warnings.warn(
                f"a strategy is attached to this model, but this call runs without speculation: {reason}",
                stacklevel=compat.stacklevel_of_user(),
            )

    def __deepcopy__(self, memo: Any) -> Attachment:
        return Attachment(self.settings, self.strict)

    def __reduce__(self) -> Any:
        return Attachment, (replace(self.settings, monitor=None), self.strict)


class _ResumedStreamer(BaseStreamer):
    """Passes on to a streamer what it has not received yet, when a call is made again from its beginning."""

    def __init__(self, streamer: BaseStreamer):
        super().__init__()
        self._streamer = streamer
        self._received = 0
        self.position = 0
        self.__name__ = name_of(streamer)

    def put(self, value: torch.Tensor) -> None:
        self.position += 1
        if self.position > self._received:
            self._received = self.position
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


def _target(model: Any, function: str) -> PreTrainedModel:
    """The Transformers model inside wrappers, which a function was given."""
    inner = unwrapped_model(model)
    if inner is None or not hasattr(inner, "generate"):
        raise TypeError(f"{function} takes a Transformers model that can generate, got {type(model).__name__}")
    return inner
