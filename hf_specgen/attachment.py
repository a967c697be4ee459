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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.candidates.base import Candidates
from hf_specgen.depth import Policy
from hf_specgen.generate import by_name, generate_speculatively, unsupported_argument
from hf_specgen.monitoring.monitor import Monitor
from hf_specgen.patch import ATTACHMENT, install
from hf_specgen.speculation import Speculation, as_candidates
from hf_specgen.state import Call
from hf_specgen.targets.compilable import Compile
from hf_specgen.targets.model_parts import unwrapped_model
from hf_specgen.targets.support import check_architecture
from hf_specgen.totals import CallTotals
from hf_specgen.verification import Verifier

M = TypeVar("M", bound=nn.Module)


def attach(
    model: M,
    candidate_generator: CandidateGenerator | Literal["auto"] = "auto",
    *,
    strict: bool = False,
    verification: str | Verifier = "exact",
    policy: Policy | None = None,
    monitor: Monitor | None = None,
    compile: Compile = False,
    pack_weights: bool | None = None,
) -> M:
    """Make every `model.generate()` speculate, whoever calls it, until `detach(model)`.

    The tokens are those of plain `generate`. The strategy stays with the model when it is wrapped (PEFT, DDP,
    `accelerate.prepare`, `torch.compile`), copied or pickled; a copy counts its own statistics, and a pickled model
    loses the monitor. `generate(candidate_generator=…)` takes precedence for one call, and None there generates
    plainly.

    Args:
        model: a causal language model, or a wrapper of one. A strategy that is attached to it already is replaced.
        candidate_generator: proposes draft tokens; "auto" for the default strategy.
        strict: raise for a call that cannot speculate (beam search, an assistant model, an unsupported cache). By
            default it falls back to plain generation, with one warning for each reason.
        verification, policy, monitor, compile, pack_weights: as for `speculate`.

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
    target, candidates = _target(model), as_candidates(candidate_generator)
    settings = AttachedSettings(candidates, verification, policy, monitor, strict, compile, pack_weights)
    Speculation(candidates, verification, policy=policy, monitor=monitor)  # raises for an unsuitable setting
    check_architecture(target)
    candidates.target_requirements(target)
    install()
    setattr(target, ATTACHMENT, Attachment(settings))
    return model


def detach(model: M) -> M:
    """Undo `attach`: `model.generate()` is plain again. Does nothing if no strategy is attached.

    Returns:
        `model`, the same object.
    """
    vars(_target(model)).pop(ATTACHMENT, None)
    return model


@contextmanager
def attached(
    model: nn.Module, candidate_generator: CandidateGenerator | Literal["auto"] = "auto", **settings: Any
) -> Iterator[CallTotals]:
    """Attach a strategy for the duration of a `with` block; then restore what was attached before.

    Args:
        model, candidate_generator, settings: as for `attach`.

    Yields:
        the statistics of the calls in the block, updated with every call.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("benchmarks/assets/reference-lm")
        >>> with attached(model, "auto") as totals:
        ...     ids = model.generate(model.dummy_inputs["input_ids"][:1], max_new_tokens=4, do_sample=False)
        >>> totals.calls, totals.emitted
        (1, 4)
    """
    target = _target(model)
    before = vars(target).get(ATTACHMENT)
    attach(model, candidate_generator, **settings)
    try:
        yield vars(target)[ATTACHMENT].totals
    finally:
        detach(model)
        if before is not None:
            setattr(target, ATTACHMENT, before)


def statistics(model: nn.Module) -> CallTotals:
    """A copy of the statistics of all `generate` calls since `attach(model, …)`.

    Raises:
        ValueError: if no strategy is attached.
    """
    target = _target(model)
    attachment = vars(target).get(ATTACHMENT)
    if attachment is None:
        raise ValueError(
            f"no strategy is attached to this {type(target).__name__}; call hf_specgen.attach(model) first"
        )
    with attachment.lock:
        return copy.deepcopy(attachment.totals)


@dataclass(frozen=True)
class AttachedSettings:
    """What `attach` was given; shared by copies of the model."""

    candidates: Candidates
    verification: str | Verifier
    policy: Policy | None
    monitor: Monitor | None
    strict: bool
    compile: Compile = False
    pack_weights: bool | None = None


class Attachment:
    """An attached strategy and the statistics of its calls. May be used by several threads."""

    def __init__(self, settings: AttachedSettings):
        self.settings = settings
        self.totals = CallTotals()
        self.lock = threading.Lock()
        self._reasons: dict[str, str] = {}  # without numbers -> as first given

    def generate(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`model.generate(*args, **kwargs)` with the attached strategy, or without it if the call cannot speculate.

        Args:
            original: `GenerationMixin.generate` as it was before it was patched.
            model, args, kwargs: of the call.
        """
        kwargs = by_name(original, args, kwargs)
        reason = unsupported_argument(kwargs)
        if kwargs.get("custom_generate") is not None:
            reason = "custom_generate= names another decoding method"
        if reason is None:
            attempt = _Attempt(self.settings, kwargs.get("streamer"))
            arguments = {**kwargs, "custom_generate": attempt, "streamer": None}
            try:
                output = generate_speculatively(original, model, (), arguments)
            except ValueError as error:
                if attempt.call is not None or not attempt.reached or self.settings.strict:
                    raise
                reason = str(error)
            else:
                if attempt.call is not None:
                    with self.lock:
                        self.totals.add(attempt.call.statistics)
                return output
        if self.settings.strict:
            raise ValueError(reason)
        self._report_plain(reason)
        return original(model, **kwargs)

    def _report_plain(self, reason: str) -> None:
        """Count a call that falls back, and warn of a new reason; those that differ in a number are one reason."""
        kind = re.sub(r"\d+", "", reason)
        with self.lock:
            is_new = kind not in self._reasons
            self.totals.add_plain(self._reasons.setdefault(kind, reason))
        if is_new:
            warnings.warn(
                f"a strategy is attached to this model, but this generate() runs without speculation: {reason}",
                stacklevel=4,  # the line that calls generate()
            )

    def __deepcopy__(self, memo: Any) -> Attachment:
        return Attachment(self.settings)

    def __reduce__(self) -> Any:
        return Attachment, (replace(self.settings, monitor=None),)


class _Attempt(Speculation):
    """One attached call. A ValueError after `reached` and before `call` is set means that it cannot speculate."""

    def __init__(self, settings: AttachedSettings, streamer: Any):
        super().__init__(
            settings.candidates,
            settings.verification,
            streamer,
            settings.policy,
            settings.monitor,
            settings.compile,
            settings.pack_weights,
        )
        self.reached = False
        self.call: Call | None = None

    def checking(self, model: PreTrainedModel) -> None:
        self.reached = True

    def starting(self, call: Call) -> None:
        self.call = call


def _target(model: Any) -> PreTrainedModel:
    """The Transformers model inside wrappers.

    Raises:
        TypeError: if there is none.
    """
    inner = unwrapped_model(model)
    if inner is None or not hasattr(inner, "generate"):
        raise TypeError(f"attach takes a Transformers model that can generate, got {type(model).__name__}")
    return inner
