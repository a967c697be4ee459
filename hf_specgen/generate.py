"""The keyword `generate(candidate_generator=…)` and `speculate()`: checks a call, then runs the decoding loop."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.call import Call, Compile, EncoderInput, GenerationState, Prediction, UnrepeatableError
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.combined import Preset
from hf_specgen.decoding import DecodingLoop
from hf_specgen.depth import Policy
from hf_specgen.libraries import adapter_hooks_removed
from hf_specgen.monitor import Monitor
from hf_specgen.outputs import EncoderDecoderSpeculativeOutput, SpeculativeOutput
from hf_specgen.settings import History, Settings, Verification, settings_in
from hf_specgen.targets.inputs import check_step_arguments, healed_prompt
from hf_specgen.targets.model_parts import decoder_argument
from hf_specgen.targets.requirements import make_target
from hf_specgen.targets.self_check import check_computation
from hf_specgen.targets.support import check_length, check_model
from hf_specgen.unsupported_calls import problems, unsupported_argument
from hf_specgen.verification import Verifier
from hf_specgen.verification.processors import undo_of

ASSISTANT_SETTINGS = {
    "num_assistant_tokens": "give k= to the strategy, or policy=",
    "num_assistant_tokens_schedule": "give policy=, such as MovingWindow()",
    "assistant_confidence_threshold": "give confidence_threshold= to DraftModelCandidates",
    "max_matching_ngram_size": "give max_ngram= to NgramCandidates, which by default weighs matches of all lengths",
    "assistant_lookbehind": "other tokenizers need no such setting here",
    "target_lookbehind": "other tokenizers need no such setting here",
    "assistant_tokenizer": "DraftModelCandidates loads the tokenizer with the draft model",
    "assistant_ensemble_weight": "it changes the distribution; verification='typical' is the lossy mode here",
    "speculation_type": "AutoCandidates.from_pretrained chooses the strategy for a checkpoint",
}
"""Settings of Transformers' assisted generation that have no effect here, and what to do instead."""


def store_statistics(candidates: Candidates, statistics: Statistics) -> None:
    """Keep the statistics of a call with its strategy, unless the strategy is immutable: the answer is not lost."""
    with suppress(AttributeError):
        candidates.speculation = statistics


class CallTokenizer(NamedTuple):
    """The tokenizer of a call, and whether the end of the prompt is healed with it."""

    tokenizer: PreTrainedTokenizerBase | None = None
    heals_prompt: bool = False


NO_TOKENIZER = CallTokenizer()


class Speculation:
    """A decoding method for `generate(custom_generate=…)`; made by `speculate`."""

    _hf_specgen_speculation = True  # how `hf_specgen.patch` recognises it without importing this module
    seed: int | None = None  # see `Call.seed`
    joins_shared_target = False  # whether the call may become a row of a shared target
    is_prepared = False  # whether `generate` has prepared a call and the checks of this package have begun
    statistics: Statistics | None = None  # the statistics of the last call that has passed all checks

    def __init__(self, settings: Settings, streamer: BaseStreamer | None = None):
        self.settings = settings
        self.streamer = streamer

    def run(self, loop: DecodingLoop, stack: ExitStack) -> Any:
        """Run a call that has passed all checks; its sessions end when `stack` closes."""
        output = loop.run()
        store_statistics(self.settings.candidates, loop.statistics)
        return output

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        inputs_tensor: torch.Tensor | None = None,
        call_tokenizer: CallTokenizer = NO_TOKENIZER,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | EncoderDecoderSpeculativeOutput | torch.Tensor:
        """Run a call that `generate` has prepared; returns what plain `generate` returns.

        `generate` passes the arguments that it finds in this signature, the input of an encoder as `inputs_tensor`; but
        the tokenizer comes from `run`.
        """
        assert generation_config is not None
        self.is_prepared = True
        # Arguments that cannot be speculated with.
        check_model(model)
        if problem := next(problems(model, input_ids, generation_config, model_kwargs), ""):
            raise ValueError(problem)
        check_step_arguments(model, input_ids, model_kwargs)
        tokenizer = call_tokenizer.tokenizer
        if call_tokenizer.heals_prompt:
            input_ids = healed_prompt(model, input_ids, tokenizer)
        # The call, as plug-ins receive it.
        config = generation_config
        settings = self.settings.for_model(model)
        candidates = settings.candidates
        if settings.prediction is not None and not candidates.uses_prediction:
            remedy = "draft with CombinedCandidates([NgramCandidates(), …])"
            raise ValueError(f"prediction= needs n-grams, which {candidates!r} lacks; {remedy}")
        mask = model_kwargs.get(decoder_argument(model, "attention_mask"))
        state = GenerationState.of_call(input_ids, mask, stopping_criteria, compat.pad_token(config))
        call = Call(
            model,
            state,
            config,
            candidates.settings(),
            logits_processor,
            keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
            keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
            encoder=EncoderInput.of_call(inputs_tensor, state.batch, model_kwargs),
            settings=settings,
            seed=self.seed,
            tokenizer=tokenizer,
        )
        with compat.without_compilation(model), compat.default_device(), ExitStack() as stack:
            # The target and the loop.
            requirements = candidates.target_requirements(model)
            if requirements.aux_hidden_state_layers:
                call.check_prompt_ids("a draft head")
            check_computation(model, requirements, input_ids, config, model_kwargs)
            target = make_target(
                requirements, model, input_ids, config, model_kwargs, settings.compile, self.joins_shared_target
            )
            check_length(model, target.first_positions, call.max_new_tokens)
            loop = DecodingLoop(call, target, settings, stack, stopping_criteria, self.streamer)
            self.statistics = loop.statistics
            undo = undo_of([*call.logits_processor, *stopping_criteria])
            try:
                loop.outputs.stream(input_ids.cpu())
                return self.run(loop, stack)
            except UnrepeatableError:  # as if the call had not begun: so the random generator is set back to its start
                loop.outputs.emitted_positions = 0
                undo()
                raise


def speculate(
    candidate_generator: CandidateGenerator | Preset,
    *,
    verification: Verification | Verifier = "exact",
    streamer: BaseStreamer | None = None,
    policy: Policy | None = None,
    monitor: Monitor | None = None,
    compile: Compile = "auto",
    memory: bool = True,
    prediction: Prediction | None = None,
    history: History = False,
    grammar_drafts: bool = True,
) -> Speculation:
    """A decoding method for `generate(custom_generate=…)`, which needs no patched `generate`.

    Args:
        candidate_generator: proposes draft tokens, e.g. `NgramCandidates()`; or a preset, "auto", "latency",
            "throughput" or "memory", which needs neither a draft model nor training: see `PresetCandidates`.
        verification: "exact" (the tokens of plain `generate`, also when sampling with a seed), "rejection" (the same
            distribution, but not the same seed), "typical" (LOSSY: accepts what the target finds plausible), or a
            `Verifier`.
        streamer: receives the prompt, then every emitted position, as a streamer given to `generate` does.
        policy: chooses the draft depth of this call, step by step; the strategy's own policy if left out.
        monitor: receives every step.
        compile: "auto" captures forward passes as CUDA graphs on a GPU, after the first steps and where it works;
            "graphs" captures from the first step on, and raises where it does not work; False or None runs all passes
            eagerly.
        memory: whether the acceptance observed in earlier calls with the same target and strategy is used, and that of
            this call kept. It decides how much is drafted, never which tokens are generated.
        prediction: the expected output, from which n-grams draft; see `NgramCandidates`.
        history: True to draft from the texts of earlier calls with this model too, and to add those of this call: the
            earlier answers to its prompt, or to one that differs in a few tokens, are expected outputs. They are kept
            as long as the model object. The name of a file keeps them there, see `NgramHistory.of_file`; or an
            `NgramHistory`.
        grammar_drafts: whether the grammar of a logits processor (xgrammar, llguidance, outlines, lm-format-enforcer)
            is used in drafting: tokens that it forces are drafted, tokens that it forbids are not.

    Returns:
        a callable for `custom_generate=`.

    Raises:
        ValueError, TypeError: for an unknown verification, or something that is no candidate generator, policy or
            monitor.

    Example:
        >>> from hf_specgen import NgramCandidates, speculate
        >>> method = speculate(NgramCandidates(k=5))  # model.generate(**inputs, custom_generate=method)
    """
    settings = Settings.parse(
        candidate_generator,
        verification=verification,
        policy=policy,
        monitor=monitor,
        compile=compile,
        memory=memory,
        prediction=prediction,
        history=history,
        grammar_drafts=grammar_drafts,
    )
    return Speculation(settings, streamer)


def generate_speculatively(
    original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`model.generate(*args, **kwargs)` with the keywords of this package; called by the `generate` of `patch`."""
    generator = kwargs.pop("candidate_generator", None)
    method: Any = kwargs.get("custom_generate")
    with adapter_hooks_removed(model):
        if generator is not None:
            if method is not None:
                raise ValueError("both candidate_generator= and custom_generate= were given; leave one out")
            method = Speculation(Settings.parse(generator, **settings_in(kwargs, model)))
        kwargs = by_name(original, args, kwargs)
        if reason := unsupported_argument(kwargs):
            raise ValueError(reason)
        streamer = kwargs.pop("streamer", None)  # `generate` would not pass it on
        if streamer is not None:
            if method.streamer is not None:
                raise ValueError("both generate(streamer=…) and speculate(streamer=…) were given; leave one out")
            method = Speculation(method.settings, streamer)
        return run(original, model, kwargs, method)


def run(original: Callable[..., Any], model: Any, kwargs: dict[str, Any], method: Speculation) -> Any:
    """Call `generate` with our decoding method, handling the arguments that it does not pass on to that."""
    _warn_of_assistant_settings(kwargs)
    replaced = _with_tokenizer(model, kwargs)
    tokenizer = CallTokenizer(kwargs.get("tokenizer"), heals_prompt="token_healing" in replaced)
    kwargs = {**kwargs, **replaced, "custom_generate": functools.partial(method, call_tokenizer=tokenizer)}
    for name in ("synced_gpus", "tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    return original(model, **kwargs)


def by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate` call, those given by position included."""
    signature = inspect.signature(original)
    signature.bind(None, *args, **kwargs)
    names = list(signature.parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _warn_of_assistant_settings(arguments: dict[str, Any]) -> None:
    """Name in one warning the settings of Transformers' own assistants that this call has and that have no effect."""
    # The model's own config is not looked at: it may hold them for other callers.
    config = arguments.get("generation_config")
    # The `generate` of Whisper writes defaults into its config.
    defaults = compat.default_generation_settings()
    names = [
        name
        for name in ASSISTANT_SETTINGS
        if arguments.get(name) is not None or getattr(config, name, None) not in (None, defaults.get(name))
    ]
    if names:
        remedies = "; ".join(f"{name}: {ASSISTANT_SETTINGS[name]}" for name in names)
        warnings.warn(
            f"settings of assistant_model= have no effect in speculative decoding by a strategy ({remedies})",
            stacklevel=compat.stacklevel_of_user(),
        )


def setting_of(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """A setting of a `generate` call: that of its arguments, also if it is None, else of its config or the model's."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def _with_tokenizer(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments to replace where `generate` needs a tokenizer, which it drops with `custom_generate`."""
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        return {}
    replaced: dict[str, Any] = {}
    stop_strings = setting_of(model, arguments, "stop_strings")
    if stop_strings is not None:
        criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
        # `generate` uses a criterion that the caller gave instead.
        if not any(type(criterion) is StopStringCriteria for criterion in criteria):
            criteria.append(StopStringCriteria(tokenizer, stop_strings))
        replaced["stop_strings"] = None
        replaced["stopping_criteria"] = criteria
    if setting_of(model, arguments, "token_healing"):  # by `healed_prompt`
        replaced["token_healing"] = False
    return replaced
