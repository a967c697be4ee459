"""What a case gives to `generate`: prompts, settings, processors, stopping criteria, streamer."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from random import Random
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.fuzz.cases import Case
from tests.fuzz.models import VOCAB, device, word_level
from tests.helpers import PrefixReader, RecordingStreamer, RowWisePrefixReader, StatefulReader

# Processors, stopping criteria, a streamer, and the faults that they raise

PROCESSORS = {"prefix": PrefixReader, "row_wise": RowWisePrefixReader, "stateful": StatefulReader}


class Fault(RuntimeError):
    """Raised on purpose."""


class Interrupt(KeyboardInterrupt):
    """Raised on purpose, and no `Exception`."""


class Recorder(RecordingStreamer):
    """Keeps what is streamed."""

    fault: Fault | Interrupt | None = None
    fault_call = 0

    def put(self, value: torch.Tensor) -> None:
        if self.fault is not None and len(self.chunks) == self.fault_call:
            raise self.fault
        super().put(value)


class Raising:
    """A processor that changes nothing or a criterion that never stops, which raises in its n-th call."""

    def __init__(self, call: int, fault: Fault | Interrupt, stops: bool):
        self._left, self._fault, self._stops = call, fault, stops

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            raise self._fault
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device) if self._stops else scores


class ValidPadding(LogitsProcessor):
    """Zero scores for rows that have ended at these columns: plain `generate` samples their padding, and ignores it."""

    def __init__(self, ends: Sequence[int]):
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        has_ended = torch.tensor([input_ids.shape[1] >= end for end in self._ends], device=scores.device)
        return scores.masked_fill(has_ended[:, None], 0.0)


class ForcedText(LogitsProcessor):
    """Makes plain `generate` write a given text, and records the tokens of it that were not possible.

    Args:
        text: `[rows, columns]`, of which a call writes those behind its prompt.
        ends: the column behind each row's last token.
    """

    def __init__(self, text: torch.Tensor, ends: Sequence[int]):
        self._text, self._ends = text, ends
        self.impossible: list[tuple[int, int]] = []
        """Row and column of each token whose score is -inf, or beside NaN, before temperature, top-k and the like."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        column = input_ids.shape[1]
        if column >= self._text.shape[1]:  # a criterion that reads scores has not stopped
            return torch.zeros_like(scores)
        tokens = self._text[:, column, None]
        is_possible = scores.gather(1, tokens)[:, 0].isfinite() & (scores < float("inf")).all(dim=1)
        for row, end in enumerate(self._ends):
            if column < end and not is_possible[row]:
                self.impossible.append((row, column))
        return torch.full_like(scores, float("-inf")).scatter(1, tokens, 0.0)


class _Criterion(StoppingCriteria):
    """Stops the rows for which a function of the new tokens and of the last scores, where these are kept, is true."""

    def __init__(self, stops: Callable[[torch.Tensor, Any], torch.Tensor], prompt_length: int):
        self._stops, self._prompt_length = stops, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._stops(input_ids[:, self._prompt_length :], scores[-1] if scores else None)


def _after(new: torch.Tensor, last: Any) -> torch.Tensor:
    """Row b after `2 + 3 * b` new tokens."""
    return torch.tensor([new.shape[1] >= 2 + 3 * row for row in range(len(new))], device=new.device)


def _any_row(new: torch.Tensor, last: Any) -> torch.Tensor:
    """All rows as soon as one has two tokens above 50 in a row."""
    return ((new[:, 1:] > 50) & (new[:, :-1] > 50)).any().repeat(len(new))


def _on_scores(new: torch.Tensor, last: Any) -> torch.Tensor:
    return torch.zeros_like(new[:, 0], dtype=torch.bool) if last is None else last.argmax(dim=-1) % 7 == 0


def _all_scores(new: torch.Tensor, last: Any) -> torch.Tensor:
    """Reads the scores of all rows, those that have ended included, and stops all."""
    flattest = float("inf") if last is None else float(last.amax(dim=-1).min())
    return torch.full((len(new),), flattest < 0.25, device=new.device)


CRITERIA = {"after": _after, "any_row": _any_row, "scores": _on_scores, "all_scores": _all_scores}


# Prompts

WIDTH_OF_PADDING = 4
"""Columns of a batch in which no row has a prompt."""
LARGEST_VOCAB = 128
"""Of the targets in `tests.fuzz.models.FIXTURES`."""


class Ends(NamedTuple):
    """What depends on the text that plain `generate` writes."""

    eos_ids: tuple[int, ...]
    stop_string: str | None


def prompts(case: Case) -> dict[str, torch.Tensor]:
    """Left-padded random prompts."""
    random = Random(case.seed)
    width = max(case.lengths) or WIDTH_OF_PADDING
    rows, mask = [], []
    for length in case.lengths:
        pattern = [random.randrange(1, VOCAB) for _ in range(3 if case.repetitive else length)]  # none: padding alone
        row = [pattern[place % len(pattern)] for place in range(length)]
        if case.pad_in_prompt and row:
            row[length // 2] = case.pad_id
        rows.append([case.pad_id] * (width - length) + row)
        mask.append([0] * (width - length) + [1] * length)
    inputs = {"input_ids": torch.tensor(rows, device=device())}
    if case.give_mask:
        inputs["attention_mask"] = torch.tensor(mask, device=device())
    return inputs


def given_prompts(case: Case, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a call gets of the prompts: copies, or embeddings near those of the ids."""
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    if case.embeddings:
        generator = torch.Generator().manual_seed(case.seed)
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(inputs["input_ids"])
        noise = torch.randn(embeddings.shape, generator=generator).to(embeddings)
        given["inputs_embeds"] = embeddings + 0.3 * embeddings.std() * noise
    if case.embeddings == "alone":
        given.pop("input_ids")
    return given


def prompt_columns(case: Case, inputs: dict[str, torch.Tensor]) -> int:
    """The columns of the prompt in what `generate` returns."""
    return 0 if case.embeddings == "alone" else inputs["input_ids"].shape[1]


def next_prompts(inputs: dict[str, torch.Tensor], text: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """The prompts of the next turn: the whole text, and two tokens more."""
    random = Random(seed)
    question = torch.tensor([[random.randrange(1, VOCAB) for _ in range(2)] for _ in range(len(text))], device=device())
    following = {"input_ids": torch.cat([text, question], dim=1)}
    mask = inputs.get("attention_mask")
    if mask is not None:
        new = following["input_ids"].shape[1] - mask.shape[1]
        following["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), new)], dim=1)
    return following


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """A letter or a syllable for each token id."""
    syllables = map("".join, product("bcdfghjklmnpqrstvwxyz", "aeiou"))
    words = {text: token for token, text in zip(range(LARGEST_VOCAB), [*ascii_lowercase, *syllables], strict=False)}
    return PreTrainedTokenizerFast(tokenizer_object=word_level(words, "a"), unk_token="a")


# Settings


def arguments(case: Case, ends: Ends, prompt_length: int, fault: Fault | Interrupt | None = None) -> dict[str, Any]:
    """Fresh arguments for one `generate` call, except prompts, cache and speculation."""
    settings = _settings(case, ends)
    processors: list[Any] = [PROCESSORS[name]() for name in case.processors]
    criteria: list[Any] = [_Criterion(CRITERIA[name], prompt_length) for name in case.criteria if name in CRITERIA]
    streamer = Recorder() if case.streamer else None
    if fault is not None and case.fault in ("processor", "criterion"):
        stops = case.fault == "criterion"
        (criteria if stops else processors).append(Raising(case.fault_call, fault, stops))
    if fault is not None and case.fault == "streamer" and streamer is not None:
        streamer.fault, streamer.fault_call = fault, case.fault_call
    objects: dict[str, Any] = {
        "logits_processor": LogitsProcessorList(processors),
        "stopping_criteria": StoppingCriteriaList(criteria),
        "streamer": streamer,
    }
    if "stop_strings" in settings:
        objects["tokenizer"] = tokenizer()
    if "allowed_tokens" in case.options:
        objects["prefix_allowed_tokens_fn"] = lambda row, ids: [(int(ids[-1]) + n + row) % VOCAB for n in (1, 2, 5, 7)]
    given = {name: value for name, value in objects.items() if value}
    if case.saved_settings:
        return given
    if case.config_object:
        return {**given, "generation_config": GenerationConfig(**settings)}
    return {**given, **settings}


def saved_config(case: Case, ends: Ends, config: GenerationConfig) -> GenerationConfig:
    """The generation config of a model with the settings of a case, as a checkpoint may hold them."""
    return GenerationConfig.from_dict({**config.to_dict(), **_settings(case, ends)})


def _settings(case: Case, ends: Ends) -> dict[str, Any]:
    """The part that fits into a `GenerationConfig`; what has its default is left out."""
    given = Case()
    names = ["min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "num_return_sequences"]
    names += ["output_scores", "output_logits", "prefill_chunk_size"]
    settings: dict[str, Any] = {n: getattr(case, n) for n in names if getattr(case, n) != getattr(given, n)}
    settings |= {"max_new_tokens": case.max_new_tokens, "pad_token_id": case.pad_id, "do_sample": case.do_sample}
    settings["return_dict_in_generate"] = case.return_dict
    if case.cache == "static_setting":
        settings["cache_implementation"] = "static"
    if case.do_sample:
        settings |= {"temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p}
        settings |= {"min_p": case.min_p} if case.min_p else {}
        settings |= {"typical_p": case.typical_p} if case.typical_p < 1 else {}
    if ends.eos_ids:
        settings["eos_token_id"] = list(ends.eos_ids)
    if ends.stop_string is not None:
        settings["stop_strings"] = [ends.stop_string]
    if case.bad_words:
        settings["bad_words_ids"] = [list(words) for words in case.bad_words]
    if "max_time" in case.criteria:
        settings["max_time"] = 0.0
    for name in case.options:
        if name != "decay" or ends.eos_ids:  # `generate` raises without an end token
            settings |= _OPTIONS.get(name, {})
    return settings


_OPTIONS: dict[str, dict[str, Any]] = {
    "begin_suppress": {"begin_suppress_tokens": list(range(1, 60))},
    "cutoffs": {"epsilon_cutoff": 0.005, "eta_cutoff": 0.005, "top_h": 0.6},
    "decay": {"exponential_decay_length_penalty": (2, 1.6)},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.3},
    "forced_eos": {"forced_eos_token_id": 11},
    "guidance": {"guidance_scale": 1.5},
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True},
    "sequence_bias": {"sequence_bias": [[[5], 1.5], *([[token, 7 * token % VOCAB], 4.0] for token in range(1, VOCAB))]},
    "suppress": {"suppress_tokens": list(range(60, 99))},
}


def find_ends(case: Case, text: list[list[int]]) -> Ends:
    """End tokens and stop string of a case."""
    columns = len(text[0])
    found = {text[column % len(text)][column] for column in case.eos_columns if column < columns}
    stop_string = None
    column = case.stop_string_column
    if column is not None and column < columns:
        here, following = text[0][column], text[0][min(column + 1, columns - 1)]
        decoded = tokenizer().decode([here, following])
        stop_string = decoded[1:3] if column + 1 < columns else decoded[:2]
    return Ends(tuple(sorted(found | set(case.eos_ids))), stop_string)
