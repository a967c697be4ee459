"""One `generate` call: its tokens (`GenerationState`), its settings (`Call`), what later calls use again (`Memory`).

Every plug-in receives the call. What it learns about a target, latencies and acceptance by strategy, is in `memory`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_specgen.compat import CACHE
from hf_specgen.random_state import NoiseSeeds

T = TypeVar("T")


def as_count(value: object, low: int) -> int | None:
    """An integer of any type, as of NumPy, as a plain one; None for what is none, for a bool, and below `low`."""
    try:
        number = low - 1 if isinstance(value, bool) else index(cast(Any, value))
    except TypeError:
        return None
    return number if number >= low else None


def checked_count(name: str, value: object, low: int, unit: str, otherwise: str = "") -> int:
    """A setting that is a number of `unit`, as a plain integer.

    Raises:
        ValueError: if it is no integer, or below `low`; `otherwise` are other values that the setting takes.

    Example:
        >>> checked_count("k", np.int64(3), 1, "tokens")
        3
    """
    if (number := as_count(value, low)) is None:
        raise ValueError(f"{name} must be a number of {unit}, at least {low}{otherwise}, got {value!r:.80}")
    return number


class UnrepeatableError(ValueError):
    """A user's function does what cannot be repeated exactly, so that the call has to run plainly."""


class UnsupportedModelError(ValueError):
    """A model computes in a way in which draft tokens cannot be verified; the message is the whole reason."""


class GenerationState:
    """Prompts and generated tokens of a batch. The decoding loop writes it, everything else reads it.

    Args:
        input_ids: `[batch, prompt]`, left-padded as `generate` received them.
        attention_mask: `[batch, at least prompt]`, 0 for padding; None if there is none.
        stop_ids: a row ends after any of these tokens (EOS).
        max_length: a row ends at that many positions, those of the prompt and its padding included.
        pad_id: what plain `generate` writes after the end of a row; None if rows never end before the batch does.
    """

    other_rows = 0  # rows of other calls that share the forward passes of the target, see `generate_many`
    drafts_together = False  # whether they share the passes of the drafter too

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        stop_ids: Collection[int] = (),
        max_length: float = float("inf"),
        pad_id: int | None = None,
    ):
        self.batch, self.prompt_length = input_ids.shape
        is_text = torch.ones_like(input_ids)
        if attention_mask is not None:
            is_text = attention_mask[:, attention_mask.shape[1] - self.prompt_length :]
        rows = zip(input_ids.cpu(), is_text.bool().cpu(), strict=True)
        self.prompts = [ids[mask].tolist() for ids, mask in rows]  # without padding
        self.generated: list[list[int]] = [[] for _ in range(self.batch)]  # tokens so far, by row
        self.stop_ids = frozenset(stop_ids)
        self.max_length = max_length
        self.pad_id = pad_id
        self.device = input_ids.device
        self.default_device = torch.get_default_device()  # where the user's functions make tensors
        self.stopped = [False] * self.batch  # whether plain `generate` stops a row at its last emitted position
        # `[batch, capacity]` tokens of prompts and texts, padded on the right.
        self._tokens = input_ids.cpu().numpy().astype(np.int64)

    @classmethod
    def of_call(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        criteria: StoppingCriteriaList,
        pad_id: int | None,
    ) -> GenerationState:
        """The state at the start of a call, from what `generate` prepared; rows are padded if a criterion has EOS."""
        ends = [criterion.eos_token_id.flatten() for criterion in criteria if type(criterion) is EosTokenCriteria]
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        stop_ids = {token for tokens in ends for token in tokens.tolist()}
        max_length = min(lengths, default=float("inf"))
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        if pads and pad_id is None:
            raise ValueError("a stopping criterion with end tokens needs a token for ended rows; give pad_token_id=")
        return cls(input_ids, attention_mask, stop_ids, max_length, pad_id if pads else None)

    def pending(self) -> list[int]:
        """The last token of each row, which is not in the target's cache yet."""
        return [self.last_token(row) for row in range(self.batch)]

    def last_token(self, row: int) -> int:
        """The last token of a row's text; the padding token for a prompt that is nothing but padding, or has no ids."""
        text = self.generated[row] or self.prompts[row]
        if text or not self.prompt_length:
            return text[-1] if text else self._padding
        return int(self._tokens[row, self.prompt_length - 1])

    def has_ended(self, row: int) -> bool:
        """Whether the row takes no further tokens: EOS, maximum length, or a stopping criterion.

        Without an EOS token rows are not padded: a row that a criterion stopped continues until all rows have stopped.
        """
        tokens = self.generated[row]
        is_at_end = bool(tokens) and (tokens[-1] in self.stop_ids or self.remaining(row) <= 0)
        return (self.stopped[row] and self.pad_id is not None) or is_at_end

    @property
    def all_stopped(self) -> bool:
        """Whether plain `generate` would return now."""
        return all(self.stopped)

    @property
    def max_new_tokens(self) -> float:
        """How many tokens a row may generate; may be infinite."""
        return self.max_length - self.prompt_length

    @property
    def context_length(self) -> int:
        """Tokens in the longest row so far, prompt included."""
        rows = zip(self.prompts, self.generated, strict=True)
        return max(len(prompt) + len(text) for prompt, text in rows)

    def remaining(self, row: int) -> float:
        """How many more tokens the row may generate."""
        return self.max_length - self.prompt_length - len(self.generated[row])

    def append(self, row: int, tokens: Sequence[int]) -> int:
        """Append tokens up to and including the first at which the row ends; returns how many were appended."""
        count = self.count_until_end(row, tokens)
        first = self.prompt_length + len(self.generated[row])
        self.generated[row].extend(tokens[:count])
        capacity = self._tokens.shape[1]
        if first + count > capacity:  # doubled, so that a token is copied a constant number of times on average
            self._tokens = np.pad(self._tokens, ((0, 0), (0, capacity + count)), constant_values=self._padding)
        self._tokens[row, first : first + count] = tokens[:count]
        return count

    def count_until_end(self, row: int, tokens: Sequence[int]) -> int:
        """How many of these tokens `append` would append."""
        remaining = self.remaining(row)
        for count, token in enumerate(tokens, start=1):
            if token in self.stop_ids or count >= remaining:
                return count
        return len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Cut the row to `length` generated tokens."""
        del self.generated[row][length:]
        self._tokens[row, self.prompt_length + length :] = self._padding

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Undo on exit every `append` made inside, so that verification can look ahead along the draft."""
        lengths = [len(tokens) for tokens in self.generated]
        try:
            yield
        finally:
            for row, length in enumerate(lengths):
                if len(self.generated[row]) > length:
                    self.truncate(row, length)

    def prefix(self, length: int) -> torch.Tensor:
        """The first `length` positions, as plain `generate` would pass them to processors and stopping criteria.

        `[batch, length]` a copy, on the device of the prompt. A row that has ended, or that has fewer tokens than the
        longest one, is padded on the right.
        """
        return torch.from_numpy(self._tokens[:, :length].copy()).to(self.device)

    @property
    def _padding(self) -> int:
        return 0 if self.pad_id is None else self.pad_id


Prediction = str | Sequence[int] | Sequence[str | Sequence[int] | None] | torch.Tensor
"""The expected output: text or token ids, for all rows of a call; or one such entry for each row, None for none."""
Compile = Literal["auto", "graphs", False] | None
"""Whether forward passes are captured as CUDA graphs: on a GPU where it works, always (or an error), or never."""


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """The settings of a call that strategies and policies read; names and defaults of the keywords of `generate`."""

    compile: Compile = "auto"  # whether forward passes after the prefill are captured as CUDA graphs
    memory: bool = True  # whether acceptance observed in earlier calls may be used, and that of this call kept
    prediction: Prediction | None = None  # the expected output, see `NgramCandidates`
    grammar_drafts: bool = True  # whether drafts obey the grammars of logits processors, see `candidates.grammar`
    seeds: NoiseSeeds | None = None  # of earlier answers, whose noise rejection sampling uses again


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder of a call's target reads and returns, with one row for each row of the call."""

    values: torch.Tensor  # the main input: token ids `[batch, tokens]`, or features of audio or images
    arguments: dict[str, Any]
    outputs: Any

    @classmethod
    def of_call(cls, values: torch.Tensor | None, batch: int, model_kwargs: dict[str, Any]) -> EncoderInput | None:
        """The encoder's input in a call; None if there is no encoder, or `generate` does not pass on what it read."""
        outputs = model_kwargs.get("encoder_outputs")
        # In place of ids that were not given, `generate` fills in -100.
        if values is None or outputs is None or (not values.is_floating_point() and bool((values < 0).any())):
            return None
        others = ("encoder_outputs", CACHE, "use_cache", "logits_to_keep")
        arguments = {
            name: value
            for name, value in model_kwargs.items()
            if name not in others and not name.startswith("decoder_") and value is not None
        }
        return cls(values.repeat_interleave(batch // len(values), dim=0), arguments, outputs)


@dataclass(frozen=True)
class DraftingSettings:
    """What a policy or monitor may know of the strategy of a call."""

    k: int = 64  # maximum depth of a draft
    key: tuple[str | int | float | bool, ...] = ("any",)  # see `Candidates.profile_key`
    negligible_draft_cost: bool = False  # whether drafting takes a negligible time
    adaptive_tree: bool = False  # whether the strategy sizes each draft: a policy then only decides whether to draft
    name: str = ""  # the strategy as text, for log lines
    has_negligible_cost_drafts: bool = False  # whether some drafts do, as in a combination with n-grams
    max_slots: int = 64  # cache slots of a row that a step may use: of the last token and all draft tokens


@dataclass(frozen=True)
class Call:
    """One `generate` call: what verifier, policy and monitor receive in `start`. Read-only.

    Args:
        model: the target; None in simulations.
        state: the tokens of every row, updated by every step.
        config: the generation config, as prepared by `generate`.
        drafting: settings of the strategy in use.
        logits_processor: the logits processors of the call, as prepared by `generate`.
        draft_processors: the `ScoreProcessors` of the drafters' logits; None: those that are in `logits_processor`.
        keeps_scores, keeps_logits: whether the caller asked for the processed scores, and for the raw logits.
        encoder: what the encoder of an encoder-decoder target reads; None for other targets.
        settings: what the user set for the call: graphs, memory, expected output, grammars.
        seed: of the noise that the tokens are sampled with; None for torch's global random generator.
        tokenizer: the target's, as given to `generate`; None for that of its checkpoint.
    """

    model: PreTrainedModel | None
    state: GenerationState
    config: GenerationConfig
    drafting: DraftingSettings = DraftingSettings()
    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    draft_processors: Any = None
    keeps_scores: bool = False
    keeps_logits: bool = False
    encoder: EncoderInput | None = None
    settings: CallSettings = CallSettings()
    seed: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def architecture_key(self) -> tuple[Hashable, ...]:
        """What models of one class have in common if their passes take equally long; it takes milliseconds."""
        model = cast(Any, self.model)
        return model.config.to_json_string(), tuple(map(type, model.modules()))

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self.config.do_sample)

    @property
    def temperature(self) -> float:
        """The sampling temperature; 0.0 for greedy decoding."""
        temperature = self.config.temperature
        return float(1.0 if temperature is None else temperature) if self.do_sample else 0.0

    @property
    def max_new_tokens(self) -> float:
        """How many tokens the call may generate per row; may be infinite."""
        return self.state.max_new_tokens

    @property
    def context_length(self) -> int:
        """Tokens in the longest row so far, prompt included."""
        return self.state.context_length

    def check_prompt_ids(self, strategy: str) -> None:
        """Raise a `ValueError` if the prompt was given as `inputs_embeds` alone, to a strategy that reads its ids."""
        if not self.state.prompt_length:
            raise ValueError(
                f"{strategy} reads the token ids of the prompt, and this call has inputs_embeds alone; give input_ids "
                "beside them, or use NgramCandidates, RecyclingCandidates or LayerSkipCandidates"
            )

    def encoder_texts(self) -> list[list[int]]:
        """The token ids that the target's encoder read, by row and without padding, within the decoder's vocabulary.

        Empty without an encoder, and for audio or images.
        """
        ids = None if self.encoder is None else self.encoder.values
        if ids is None or ids.dim() != 2 or ids.is_floating_point():
            return [[] for _ in range(self.state.batch)]
        embeddings = cast(Any, self.model).get_output_embeddings()
        mask = cast(EncoderInput, self.encoder).arguments.get("attention_mask")
        is_text = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        vocabulary = len(getattr(embeddings, "weight", ()))
        is_usable = is_text.bool() & (ids >= 0) & (ids < vocabulary)
        return [row[usable].tolist() for row, usable in zip(ids, is_usable, strict=True)]


class Memory:
    """Keeps what calls have learnt as long as their target exists. May be shared by threads.

    `generate(..., memory=False)` uses and adds latencies only.
    """

    def __init__(self, max_entries: int = 64):
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: WeakKeyDictionary[Any, OrderedDict[Hashable, Any]] = WeakKeyDictionary()

    def recall(self, model: Any, key: Hashable, new: Callable[[], T]) -> T:
        """What was last stored for this target and key, for a later call, or else what `new` makes; no target: None."""
        with self._lock:
            entries = None if model is None else self._entries.get(model)
            entry = None if entries is None else entries.get(key)
            if entries is None or entry is None:
                return new()
            entries.move_to_end(key)  # the entry that was not used for the longest time is removed first
            return _for_later_call(entry)

    def store(self, model: Any, key: Hashable, learnt: Any) -> None:
        """Keep what a call has learnt, for later ones; nothing if `model` is None."""
        if model is None:
            return
        with self._lock:
            entries = self._entries.setdefault(model, OrderedDict())
            entries[key] = _for_later_call(learnt)
            entries.move_to_end(key)
            if len(entries) > self._max_entries:
                entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


def _for_later_call(learnt: T) -> T:
    """What a later call begins with: what the method of this name makes, if the value has it; else the value itself."""
    return getattr(learnt, "for_later_call", lambda: learnt)()


memory = Memory()
