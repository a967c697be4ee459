"""Applies logits processors at every node of a draft tree, each with the prefix that plain `generate` would pass.

Processors fall into three kinds:

- *score-only* (temperature, top-k, top-p, …) ignore the tokens: one call for all nodes of all rows;
- *row-wise* (repetition penalty, bad words, minimum length, …) are functions of one row's tokens and scores: called
  column by column along the accepted path, while rows advance independently;
- any other processor may keep a state from call to call (grammars, guidance, some watermarks): the rows then advance
  in lockstep, one call per column, in the order of plain `generate`. A custom row-wise processor can declare itself
  with an attribute ``row_wise = True``; it must accept other rows padded at their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_specgen.call import GenerationState


def _classes(names: str) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name))


SCORE_ONLY = _classes(
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization SuppressTokensLogitsProcessor"
)
READS_SCORES = _classes("TopHLogitsWarper EtaLogitsWarper")
"""Score-only processors that read scores on the host, which a CUDA graph cannot repeat."""
ROW_WISE = _classes(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor "
    "EncoderRepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor "
    "SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty "
    "SuppressTokensAtBeginLogitsProcessor WatermarkLogitsProcessor WhisperTimeStampLogitsProcessor"
)


@contextmanager
def checked(functions: Sequence[Any], ids: torch.Tensor, do_sample: bool) -> Iterator[None]:
    """Inside, a user's functions receive `ids`, `[batch, columns]`; raise if they do what cannot be repeated exactly.

    Plain `generate` would go on with ids that were changed in place. Its samples would come after numbers that a
    function drew from the same generator, where here the noise of several steps is drawn at once.
    """
    before, random_state = ids.clone(), rng_state(ids.device) if do_sample else None
    yield
    names = ", ".join(map(name_of, functions))
    if not torch.equal(ids, before):
        raise ValueError(
            f"{names} changed input_ids in place, which plain generate() goes on with; return new scores instead, or "
            "leave candidate_generator= out"
        )
    if random_state is not None and not torch.equal(random_state, rng_state(ids.device)):
        raise ValueError(
            f"{names} drew from PyTorch's global random generator, which samples the tokens too; use a torch.Generator "
            "of its own, or leave candidate_generator= out"
        )


def name_of(function: Any) -> str:
    """The name of a function, or of the class of an object that is called like one."""
    return str(getattr(function, "__name__", type(function).__name__))


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default random generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@dataclass(frozen=True)
class ScoreProcessors:
    """Applies score-only processors; equal ones have equal settings, which are numbers only."""

    processors: tuple[Any, ...] = field(compare=False)
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, processors: Sequence[Any]) -> ScoreProcessors:
        """Those of the processors of a call that are score-only."""
        chosen = tuple(one for one in processors if type(one) in SCORE_ONLY)
        return cls(chosen, tuple((type(one), *(_setting(value) for value in vars(one).values())) for one in chosen))

    @property
    def reads_scores(self) -> bool:
        """Whether scores are read on the host."""
        return any(type(one) in READS_SCORES for one in self.processors)

    def __call__(self, scores: torch.Tensor, all_tokens: bool = True) -> torch.Tensor:
        """`[…, vocab]` to the same; processors that name tokens are left out unless the scores are of all tokens."""
        for processor in self.processors:
            if all_tokens or type(processor) is not logits_process.SuppressTokensLogitsProcessor:
                flat = scores.flatten(0, -2)
                no_text = torch.empty(len(flat), 0, dtype=torch.long, device=flat.device)
                scores = processor(no_text, flat).view(scores.shape)
        return scores


def _setting(value: Any) -> Any:
    """A setting of a processor: a number itself; of anything else, the identity."""
    return value if isinstance(value, int | float) else id(value)


class LogitsPipeline:
    """Applies the processors of one call."""

    def __init__(self, processors: LogitsProcessorList, state: GenerationState, do_sample: bool):
        self._processors: Any = processors
        self._state, self._do_sample = state, do_sample
        self._own = [one for one in processors if not type(one).__module__.startswith("transformers.")]
        self.score_processors = ScoreProcessors.of(processors)
        """Those that are applied to the scores of a draft, and if they are all of them to those of the target."""
        kinds = [type(processor) for processor in processors]
        self.score_only = all(kind in SCORE_ONLY for kind in kinds)
        """Whether `score_processors` are all processors."""
        known = SCORE_ONLY | ROW_WISE
        dependent = [one for one in processors if type(one) not in known and not getattr(one, "row_wise", False)]
        self.stateful = [name_of(one) for one in dependent]
        """The processors that may keep a state from one call to the next."""
        self.lockstep = self.stateful if state.batch > 1 else []
        """The processors for which all rows have to advance by the same number of tokens."""

    def column(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores of one generated column, `[batch, vocab]`; rows that have not reached it are ignored."""
        text = self._state.prefix(self._state.prompt_length + step)
        with checked(self._own, text, self._do_sample) if self._own else nullcontext():
            return cast(torch.Tensor, self._processors(text, logits))
