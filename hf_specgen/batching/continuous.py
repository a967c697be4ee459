"""`generate_batch(candidate_generator=…)`, and continuous batching of models with an attached strategy.

    model.generate_batch(...)                   `generate_batch` here: the settings of the call, its statistics
        model.init_continuous_batching(...)     `init_manager` here: may this manager speculate?
            every batch processor               gets `PackedSteps`, which extend its steps

A server calls `init_continuous_batching` alone; then the attached strategy of the model decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any

from transformers import ContinuousBatchingConfig

from hf_specgen import compat
from hf_specgen.batching import transformers_batching
from hf_specgen.batching.packed_steps import PackedSteps
from hf_specgen.call_statistics import Statistics
from hf_specgen.depth import Policy
from hf_specgen.depth.adaptive import WithTargetCurve
from hf_specgen.depth.calibrate import model_curve
from hf_specgen.generate import by_name, store_statistics
from hf_specgen.settings import Settings, settings_in
from hf_specgen.targets.support import check_length
from hf_specgen.verification import ExactVerifier
from hf_specgen.verification.processors import SCORE_ONLY


def _raise(reason: str) -> None:
    raise ValueError(reason)


@dataclass
class ContinuousBatchingRun:
    """Settings and callbacks of a `generate_batch` call, or of an attached strategy, for the managers made in it."""

    settings: Settings | None  # as the user gave them; None to run plainly
    # Receives the counters of every request that has ended.
    add_statistics: Callable[[Statistics], None] = lambda _: None
    report_plain: Callable[[str], None] = _raise  # receives the reason why a manager cannot speculate
    is_plain: bool = False  # whether a manager of the call runs plainly; later ones then do too
    # Receives the reason for which the strategy refuses a request, which then fails; None: such requests run plainly.
    report_refusal: Callable[[str], None] | None = None


_run: ContextVar[ContinuousBatchingRun | None] = ContextVar("hf_specgen_continuous_batching_run", default=None)
"""The run of the `generate_batch` call of this thread."""


def generate_batch(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attachment: Any
) -> Any:
    """`model.generate_batch(*args, **kwargs)` with the keywords of this package, or an attached strategy.

    Where it cannot speculate (`_unsupported_settings`), it raises a `ValueError`, or runs an attached strategy plainly.
    """
    begin = perf_counter()
    run = _run_of(kwargs, attachment and attachment.of_thread(model))
    # Requests add their statistics to a list: together they are reported as one call.
    add_statistics_of_call = run.add_statistics
    requests = list[Statistics]()
    run.add_statistics = requests.append
    refusals = list[str]()
    if run.report_refusal is not None:
        run.report_refusal = refusals.append
    token = _run.set(run)
    try:
        results = original(model, *args, **kwargs)
        if refusals:
            raise ValueError(refusals[0])
    finally:
        _run.reset(token)
    if run.settings is not None and not run.is_plain:
        rows = [row for request in requests for row in request.rows]
        lengths = [request.emitted for request in requests]
        seconds = {"total": perf_counter() - begin}
        candidates = run.settings.candidates
        statistics = Statistics(rows, lengths, seconds, strategy=repr(candidates))
        store_statistics(candidates, statistics)
        add_statistics_of_call(statistics)
    return results


def _run_of(kwargs: dict[str, Any], attachment: Any) -> ContinuousBatchingRun:
    """The run of a call, with settings from its keywords, which are removed, or from the attached strategy."""
    if "candidate_generator" in kwargs:
        candidates = kwargs.pop("candidate_generator")
        keywords = settings_in(kwargs)
        return ContinuousBatchingRun(None if candidates is None else Settings.parse(candidates, **keywords))
    if attachment is None:
        return ContinuousBatchingRun(None)
    settings = attachment.settings.updated(**settings_in(kwargs))
    # The future of a refused request has the reason; only a call of `generate_batch` collects them.
    report_refusal = (lambda _: None) if attachment.strict else None
    return ContinuousBatchingRun(settings, attachment.add, attachment.report_plain, report_refusal=report_refusal)


def init_manager(original: Callable[..., Any], model: Any, args: Any, kwargs: dict[str, Any], attachment: Any) -> Any:
    """`model.init_continuous_batching(*args, **kwargs)`: a manager that speculates if the call or the model does."""
    arguments = by_name(original, args, kwargs)
    # The run of the `generate_batch` call that makes the manager; without such a call, that of the attached strategy.
    run = _run.get() or _run_of({}, attachment and attachment.of_thread(model))
    settings = None if run.is_plain else run.settings
    if settings is not None:
        with compat.default_device():  # whatever that of the program is; the thread that runs the steps has none
            settings = _settings_of_manager(run, settings, model, arguments)
    manager = original(model, **arguments)

    def make_steps(manager: Any, processor: Any) -> PackedSteps | None:
        if settings is None:
            return None
        return PackedSteps(processor, manager, settings, run.add_statistics, run.report_refusal)

    transformers_batching.on_batch_processor(manager, make_steps)
    return manager


def _settings_of_manager(
    run: ContinuousBatchingRun, settings: Settings, model: Any, arguments: dict[str, Any]
) -> Settings | None:
    """The settings of a manager that speculates; None, and a report to the run, if it cannot.

    The `continuous_batching_config` among the arguments of `init_continuous_batching` is replaced.
    """
    # Transformers would choose asynchronous steps and CUDA graphs by itself: here only if the config requests them.
    config = arguments.get("continuous_batching_config") or ContinuousBatchingConfig()
    is_async = config.use_async_batching or False
    config = replace(config, use_async_batching=is_async, use_cuda_graph=config.use_cuda_graph or False)
    settings = settings.for_model(compat.unwrapped(model))
    if reason := _unsupported_reason(settings, model, arguments.get("generation_config"), config):
        run.report_plain(reason)
        run.is_plain = True
        return None
    arguments["continuous_batching_config"] = config
    policy = _packed_step_policy(settings.policy, compat.unwrapped(model))
    return replace(settings, policy=policy, compile=False)


def _packed_step_policy(policy: Policy, model: Any) -> Policy:
    """The policy for packed steps: with T(q), the time of a pass over q tokens, of the model with unpaged attention.

    A packed step also takes time for scheduling, however many tokens it has. As T(q) leaves it out, a draft token seems
    to lengthen a step by a larger factor than it does: drafts may be shorter than the fastest ones, but not longer.
    Without T(q) nothing is drafted.
    """
    if not policy.measures_latency():
        return policy
    with transformers_batching.unpaged_attention(model):
        return WithTargetCurve(policy, model_curve(model))


def _unsupported_reason(
    settings: Settings, model: Any, generation_config: Any, config: ContinuousBatchingConfig
) -> str:
    """Why a new manager cannot speculate; empty if it can."""
    # Transformers returns a manager that it kept, whose config then applies instead of the one passed here.
    cached = transformers_batching.cached_manager(model)
    in_use = config if cached is None else cached.continuous_batching_config
    generation_config = generation_config or model.generation_config

    def reason(batching: ContinuousBatchingConfig) -> str:
        processors = transformers_batching.packed_step_processors(model, generation_config, batching)
        return next(_unsupported_settings(settings, model, batching, processors), "")

    of_cached = reason(in_use)
    if of_cached and in_use is not config and not reason(config):
        return (
            "the manager that an earlier call has kept (persistent_manager=True) has another config, by which it "
            f"cannot speculate ({of_cached}); call model.destroy_cached_continuous_batching_manager() first"
        )
    return of_cached


def _unsupported_settings(settings: Settings, model: Any, config: Any, processors: Sequence[Any]) -> Iterator[str]:
    """Every reason against speculation: settings, model, `ContinuousBatchingConfig` and logits processors."""
    if not isinstance(settings.verifier, ExactVerifier):
        yield "continuous batching verifies exactly; leave verification= out"
    unsupported = {
        "monitor=": settings.monitor is not None,
        "prediction=": settings.prediction is not None,
        'compile="graphs"': settings.compile == "graphs",
    }
    if names := [name for name, is_given in unsupported.items() if is_given]:
        yield f"continuous batching speculates without {' and '.join(names)}; leave {'them' if names[1:] else 'it'} out"
    requirements = settings.candidates.target_requirements(model)
    if requirements.exit_layer is not None or requirements.reads_cache:
        yield (
            f"{type(settings.candidates).__name__} needs a part of the target's layers, or its keys and values, which "
            "the packed steps of continuous batching do not give; use a draft model, another head or NgramCandidates"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        yield "continuous batching does not speculate with tensor parallel models, whose ranks must draft alike"
    try:
        check_length(model, [0], inf)
    except ValueError as error:
        yield str(error)
    if config.use_async_batching:
        yield "asynchronous batching schedules a step before the tokens of the last one are known; set it to False"
    compiled = config.default_compile_level or config.varlen_compile_config or config.decode_compile_config
    if compiled or any(config.cuda_graph_booleans):
        yield "drafts change the shape of every step, so that CUDA graphs and compilation do not work; leave them out"
    types = [type(processor) for processor in processors if not transformers_batching.is_per_request(processor)]
    # Those that read the text before a token, and not the scores alone.
    if prefix_readers := ", ".join(cls.__name__ for cls in types if cls not in SCORE_ONLY):
        yield f"continuous batching does not pass the text to {prefix_readers}; leave this logits processor out"
