"""Applies logits processors at every node of a draft tree, each with the prefix that plain `generate` would pass.

Processors fall into three kinds:

- *score-only* (temperature, top-k, top-p, …) ignore the tokens: one call for all nodes of all rows;
- *row-wise* (repetition penalty, bad words, minimum length, …) are functions of one row's tokens and scores: called
  position by position along the accepted path, while rows advance independently;
- any other processor may keep a state from call to call (grammars, guidance, some watermarks): the rows then advance
  in lockstep, one call per position, in the order of plain `generate`. A custom row-wise processor can declare itself
  with an attribute ``row_wise = True``; it must accept other rows padded at their end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_specgen import compat
from hf_specgen.call import GenerationState, UnrepeatableError
from hf_specgen.random_state import RandomOperations, global_generator


def _classes(names: str) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name))


SCORE_ONLY = _classes(
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization SuppressTokensLogitsProcessor"
)
READS_ON_HOST = _classes("TopHLogitsWarper EtaLogitsWarper")
"""Score-only processors that read scores on the host, which a CUDA graph cannot repeat."""
REMOVES_NAN = _classes("InfNanRemoveLogitsProcessor")
"""Processors that replace NaN in scores, so that these no longer show that hidden states of the step were NaN."""
STATEFUL_OF_TRANSFORMERS = _classes(
    "UnbatchedClassifierFreeGuidanceLogitsProcessor SynthIDTextWatermarkLogitsProcessor"
)
ROW_WISE = _classes(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor "
    "EncoderRepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor "
    "SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty "
    "SuppressTokensAtBeginLogitsProcessor WatermarkLogitsProcessor WhisperTimeStampLogitsProcessor"
)


@contextmanager
def refusing_side_effects(
    functions: Sequence[Any],
    ids: torch.Tensor,
    do_sample: bool,
    default_device: torch.device,
    error: type[ValueError] = UnrepeatableError,
) -> Iterator[None]:
    """A context for calls of a user's functions with `ids`, `[batch, length]`; raises if they have side effects.

    These are ids changed in place, with which plain `generate` would continue, and numbers drawn from the generator
    that samples the tokens: here the noise of several steps is drawn at once. Other threads may draw from it at any
    time: where there are some, the operators of this thread are observed.
    """
    functions = list(filter(is_user_defined, functions))
    if not functions:
        yield
        return
    before = ids.clone()
    generator = global_generator(ids.device)
    random_state = generator.get_state() if do_sample else None
    has_others = do_sample and threading.active_count() > 1
    observed = RandomOperations(ids.device) if has_others else nullcontext(None)
    with compat.default_device(default_device), observed as operations:
        yield
    names = ", ".join(map(name_of, functions))
    if not torch.equal(ids, before):
        raise error(
            f"{names} changed input_ids in place, which plain generate() continues with; return new scores instead, or "
            "use plain generate(candidate_generator=None)"
        )
    if random_state is None or torch.equal(random_state, generator.get_state()):
        return
    seeded = torch.Generator(ids.device).manual_seed(generator.initial_seed())
    is_seeded = torch.equal(seeded.get_state(), generator.get_state())  # which no operation of a thread shows
    if operations.found if operations is not None else not is_seeded:
        raise error(
            f"{names} drew from PyTorch's global random generator, which samples the tokens too; use a torch.Generator "
            "of its own, or use plain generate(candidate_generator=None)"
        )
    if is_seeded:
        raise error(
            f"torch.manual_seed was called while {names} ran, by it or by another thread, and the generator samples "
            "the tokens too; use a torch.Generator there, or use plain "
            "generate(candidate_generator=None)"
        )


def undo_of(functions: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that resets the attributes of user-defined functions, such as counters, to present values.

    It also resets those of Transformers' own stateful processors.
    """
    functions = [
        function for function in functions if is_user_defined(function) or type(function) in STATEFUL_OF_TRANSFORMERS
    ]
    attributes = [vars(function) for function in functions if hasattr(function, "__dict__")]
    copies = [{name: _copied(value) for name, value in values.items()} for values in attributes]
    generators = [value for values in attributes for value in values.values() if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]

    def undo() -> None:
        for values, copied in zip(attributes, copies, strict=True):
            values.clear()
            values.update(copied)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return undo


def _copied(value: Any) -> Any:
    """A copy of a container or tensor; anything else itself, as a model or tokenizer."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, list | dict | set | deque | np.ndarray) else value


def is_user_defined(function: Any) -> bool:
    """Whether a processor or criterion is none of Transformers' own, or calls a function of the user's."""
    is_of_transformers = type(function).__module__.startswith("transformers.")
    return not is_of_transformers or isinstance(function, logits_process.PrefixConstrainedLogitsProcessor)


def name_of(function: Any) -> str:
    """The name of a function, or of the class of an object that is called like one."""
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class ScoreProcessors:
    """Applies score-only processors; equal ones have equal settings, which are numbers only."""

    processors: tuple[Any, ...] = field(compare=False)
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, processors: Sequence[Any]) -> ScoreProcessors:
        """The score-only processors of a call."""
        score_only = tuple(processor for processor in processors if type(processor) in SCORE_ONLY)
        settings: list[Any] = []
        for processor in score_only:
            # A setting that is a number itself; of anything else, the identity.
            values = [value if isinstance(value, int | float) else id(value) for value in vars(processor).values()]
            settings.append((type(processor), *values))
        return cls(score_only, tuple(settings))

    @property
    def reads_on_host(self) -> bool:
        """Whether scores are read on the host."""
        return any(type(one) in READS_ON_HOST for one in self.processors)

    @property
    def hides_nan(self) -> bool:
        """Whether NaN logits may be followed by scores that are numbers, or are read on the host."""
        return any(type(one) in READS_ON_HOST | REMOVES_NAN for one in self.processors)

    def __call__(self, scores: torch.Tensor, all_tokens: bool = True) -> torch.Tensor:
        """`[…, vocab]` to the same; processors that name tokens are left out unless the scores are of all tokens."""
        for processor in self.processors:
            if all_tokens or type(processor) is not logits_process.SuppressTokensLogitsProcessor:
                flat = scores.flatten(0, -2)
                no_text = torch.empty(len(flat), 0, dtype=torch.long, device=flat.device)
                scores = processor(no_text, flat).view(scores.shape)
        return scores


class LogitsPipeline:
    """Applies the processors of one call."""

    def __init__(self, processors: LogitsProcessorList, state: GenerationState, do_sample: bool):
        self._processors: Any = processors
        self._state = state
        self._do_sample = do_sample
        self.score_processors = ScoreProcessors.of(processors)
        """Those that are applied to the scores of a draft, and if they are all of them to those of the target."""
        self.score_only = all(type(one) in SCORE_ONLY for one in processors)
        """Whether `score_processors` are all processors."""
        supported = SCORE_ONLY | ROW_WISE
        others = [one for one in processors if type(one) not in supported and not getattr(one, "row_wise", False)]
        self.may_be_stateful = [name_of(one) for one in others]
        """The processors that may keep a state from one call to the next."""
        self.lockstep = self.may_be_stateful if state.batch > 1 else []
        """The processors for which all rows have to advance by the same number of tokens."""

    def scores_at(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores of one generated position, `[batch, vocab]`; arbitrary for rows that have not reached it."""
        text = self._state.prefix(self._state.prompt_length + step)
        with refusing_side_effects(self._processors, text, self._do_sample, self._state.default_device):
            scores = cast(torch.Tensor, self._processors(text, logits))
        if scores is None or scores.shape[:-1] != logits.shape[:-1]:
            shape = "None" if scores is None else f"scores of shape {tuple(scores.shape)}"
            names = ", ".join(map(name_of, filter(is_user_defined, self._processors)))
            problem = f"{names} returned {shape} for {len(logits)} rows; return scores [rows, vocabulary]"
            raise UnrepeatableError(problem)
        return scores
