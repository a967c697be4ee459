"""Comparisons between a speculative call and plain `generate`, and of a model before and after a call."""

import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, StaticCache

import hf_specgen
from hf_specgen.verification.base import INVALID_SCORES
from tests.fuzz.cases import Case
from tests.fuzz.models import device, random_state

PACKAGE = str(Path(hf_specgen.__file__).parent)
HALF_MARGIN = 0.3
"""Standard deviations of the scores within which two tokens are nearly tied in bfloat16."""
KERNEL_MARGIN = 1e-4
"""The same in kernels of recurrent layers, which compute in float32 whatever the dtype of the model is."""
REFUSALS = (ValueError, TypeError, NotImplementedError)
TOLERANCE: dict[str, float] = {"rtol": 1e-3, "atol": 1e-3}
"""Float32 sums in another order differ by about 1e-5 here; a wrong position, slot or token by more than 1e-2."""


class Hang(Exception):
    """A call took longer than its time limit."""


class Difference(NamedTuple):
    """Where a speculative call is not what plain `generate` is."""

    kind: str
    detail: str


@dataclass
class Run:
    """What came of one `generate` call."""

    error: BaseException | None
    ids: torch.Tensor | None
    output: Any
    """A `ModelOutput`, if the case asks for one."""
    cache: Any
    """The one that the caller gave, or else the returned one."""
    streamed: list[Any]
    stream_ended: int
    random_state: torch.Tensor
    processed: list[int]
    """Columns in the last call of each processor that keeps a state."""

    @property
    def is_refusal(self) -> bool:
        """Whether the package itself said that it cannot do this."""
        return is_refusal(self.error)


def is_refusal(error: BaseException | None) -> bool:
    """Whether the package itself raised an error of a type of `REFUSALS`, by a statement `raise`."""
    if not isinstance(error, REFUSALS):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.startswith(PACKAGE) and (frame.line or "").startswith("raise ")


def describe(error: BaseException) -> str:
    """Type, message and the last line of the package that was running."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message[:160]}{place}"


# Two calls


def compare(case: Case, plain: Run, ours: Run, inputs: dict[str, torch.Tensor], vocab: int) -> Iterator[Difference]:
    """Everything that a caller can see; the errors of both are compared elsewhere."""
    prompt = inputs["input_ids"]
    if has_same_text(case):
        yield from _same_text(case, plain, ours, prompt.shape[1])
        if torch.equal(plain.ids, ours.ids):
            yield from _same_outputs(plain, ours)
            yield from _same_caches(plain.cache, ours.cache, _visible(case, plain.ids, inputs))
    else:
        yield from _possible_text(case, ours, prompt, vocab)
    yield from _statistics(ours, prompt.shape[1])


def has_same_text(case: Case) -> bool:
    """Whether the tokens are those of plain `generate`, not another sample or other acceptable ones."""
    if not case.repeats_text:
        return False
    return case.verification == "exact" or (case.verification == "rejection" and not case.do_sample)


def compare_errors(case: Case, plain: Run, ours: Run) -> Iterator[Difference]:
    """At least one of the calls has raised; a refusal is no difference, nor are invalid scores after another text."""
    if ours.is_refusal or (case.broken_logits and not has_same_text(case) and None in (plain.error, ours.error)):
        return
    if plain.error is None and not has_same_text(case) and _has_no_token(case, ours.error):
        return
    if ours.error is None:
        yield Difference("no error", f"plain generate raises {describe(plain.error or Hang())}")
    elif plain.error is None:
        kind = "hang" if isinstance(ours.error, Hang) else f"crash {type(ours.error).__name__}"
        yield Difference(kind, describe(ours.error))
    elif type(plain.error) is not type(ours.error):
        yield Difference("other error", f"{describe(ours.error)}; plain generate raises {describe(plain.error)}")


def _has_no_token(case: Case, error: BaseException | None) -> bool:
    """Whether an error says that no token was possible after a text, as those that are allowed may be suppressed."""
    return "allowed_tokens" in case.options and isinstance(error, RuntimeError) and INVALID_SCORES in str(error)


def equal(one: Run, other: Run) -> bool:
    """Whether two calls wrote the same tokens, or raised alike."""
    if one.ids is None or other.ids is None:
        return type(one.error) is type(other.error)
    return torch.equal(one.ids, other.ids)


def compare_near_ties(plain: Run, ours: Run, prompt_length: int, margin: float = HALF_MARGIN) -> Iterator[Difference]:
    """In a low precision: where a row first differs, the scores of both tokens are nearly tied."""
    width = min(plain.ids.shape[1], ours.ids.shape[1])
    differ = plain.ids[:, :width] != ours.ids[:, :width]
    if not bool(differ.any()):
        if plain.ids.shape != ours.ids.shape:
            yield Difference("length", f"{ours.ids.shape[1]} columns instead of {plain.ids.shape[1]}")
        return
    column = int(differ.any(dim=0).nonzero()[0])
    for row in differ[:, column].nonzero().flatten().tolist():
        scores = plain.output.scores[column - prompt_length][row].float()
        apart = (scores[plain.ids[row, column]] - scores[ours.ids[row, column]]) / scores[scores.isfinite()].std()
        if not apart <= margin:
            yield Difference("tokens in low precision", f"row {row}, column {column}: {apart:.2g} deviations apart")


def refusal_form(ours: Run) -> Iterator[Difference]:
    """What is wrong with a refusal: its type, its text, or that tokens were streamed before."""
    message = str(ours.error)
    if not isinstance(ours.error, ValueError):
        yield Difference("refusal", f"no ValueError: {describe(ours.error or Hang())}")
    if not (";" in message or "candidate_generator" in message):
        yield Difference("refusal", f"names no remedy: {message}")
    if len(ours.streamed) > 1:
        yield Difference("refusal", f"after {len(ours.streamed) - 1} columns: {message}")


def names_strategy(candidates: Any, ours: Run) -> Iterator[Difference]:
    """The error for a faulty drafter names the strategy, unless the drafter could not make the tree."""
    message, frames = str(ours.error), traceback.extract_tb((ours.error or Hang()).__traceback__)
    in_drafter = any(Path(frame.filename).name == "scripted.py" for frame in frames)
    classes = type(candidates).__mro__[:3]
    if not isinstance(ours.error, ValueError):
        yield Difference(f"crash {type(ours.error).__name__}", describe(ours.error or Hang()))
    elif not in_drafter and not any(one.__name__ in message for one in classes):
        yield Difference("refusal", f"does not name the strategy: {message}")


def _same_text(case: Case, plain: Run, ours: Run, prompt_length: int) -> Iterator[Difference]:
    if not torch.equal(plain.ids, ours.ids):
        rows = zip(plain.ids[:, prompt_length:].tolist(), ours.ids[:, prompt_length:].tolist(), strict=False)
        row, (expected, got) = next((row, pair) for row, pair in enumerate(rows) if pair[0] != pair[1])
        yield Difference("tokens", f"row {row}: {got} instead of {expected}")
    elif plain.ids.dtype != ours.ids.dtype:
        yield Difference("dtype", f"{ours.ids.dtype} instead of {plain.ids.dtype}")
    may_move = case.threads > 1 or case.other_thread or case.drafter_fault == "draws"
    if not may_move and not torch.equal(plain.random_state, ours.random_state):
        yield Difference("random state", "the random generator does not stand where plain generate leaves it")
    if plain.processed != ours.processed:
        yield Difference("processor state", f"{ours.processed} columns instead of {plain.processed}")
    if (plain.streamed, plain.stream_ended) != (ours.streamed, ours.stream_ended):
        yield Difference("stream", f"{_flat(ours.streamed)}, plain generate streams {_flat(plain.streamed)}")


def _flat(chunks: Sequence[Any]) -> str:
    return str(chunks)[:200]


def _same_outputs(plain: Run, ours: Run) -> Iterator[Difference]:
    for name in ("scores", "logits"):
        expected, got = getattr(plain.output, name, None), getattr(ours.output, name, None)
        if (expected is None) != (got is None) or (expected is not None and len(expected) != len(got)):
            yield Difference(name, f"{len(got or ())} columns instead of {len(expected or ())}")
            continue
        for column, (one, other) in enumerate(zip(expected or (), got or (), strict=True)):
            if one.shape != other.shape:
                yield Difference(name, f"column {column} has shape {tuple(other.shape)}, not {tuple(one.shape)}")
                break
            close = torch.isclose(other.float(), one.float(), **TOLERANCE, equal_nan=True)
            if not bool(close.all()):
                row, token = (~close).nonzero()[0].tolist()
                values = f"{other[row, token]:.4f} instead of {one[row, token]:.4f}"
                yield Difference(name, f"column {column}, row {row}, token {token}: {values}")
                break


def _visible(case: Case, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[rows, columns]` False for padding of the prompt, whose keys nobody reads."""
    mask = inputs.get("attention_mask", inputs["input_ids"] != case.pad_id).bool()
    mask = mask.repeat_interleave(len(ids) // len(mask), dim=0)
    return torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)


def slots(cache: Any) -> int | None:
    """How many tokens a cache holds; None if there is none, or if it has linear attention alone."""
    try:
        return None if cache is None else int(cache.get_seq_length())
    except (AttributeError, ValueError):
        return None


def _same_caches(plain: Any, ours: Any, visible: torch.Tensor) -> Iterator[Difference]:
    length, expected_length = slots(ours), slots(plain)
    if length is None or expected_length is None:
        return
    if length != expected_length:
        yield Difference("cache", f"holds {length} slots, that of plain generate {expected_length}")
    elif type(ours) is not type(plain):
        yield Difference("cache", f"is a {type(ours).__name__}, that of plain generate a {type(plain).__name__}")
    elif type(plain) in (DynamicCache, StaticCache):
        for index, (mine, expected) in enumerate(zip(ours.layers, plain.layers, strict=False)):
            for name in ("keys", "values"):
                got, wanted = getattr(mine, name, None), getattr(expected, name, None)
                if wanted is None or wanted.dim() != 4 or len(wanted) != len(visible):  # a row for each beam
                    continue
                held = min(length, wanted.shape[2])  # a window holds the last columns only
                if got is None or got.shape != wanted.shape:
                    shape = None if got is None else tuple(got.shape)
                    yield Difference("cache", f"{name} of layer {index}: shape {shape}, not {tuple(wanted.shape)}")
                    return
                seen = visible[:, length - held : length]
                if length > visible.shape[1]:  # without use_cache= plain generate writes all columns in every step
                    seen = visible.new_ones(len(visible), held)
                states = [each[:, :, :held].transpose(1, 2)[seen] for each in (got, wanted)]
                if not torch.allclose(*states, **TOLERANCE):
                    yield Difference("cache", f"{name} of layer {index} are other ones")
                    return


def _possible_text(case: Case, ours: Run, prompt: torch.Tensor, vocab: int) -> Iterator[Difference]:
    """What holds of any text: lossy modes, and those with other random numbers, have no text to compare with."""
    width = prompt.shape[1]
    text = ours.ids[:, width:]
    if not 1 <= text.shape[1] <= case.max_new_tokens:
        yield Difference("length", f"{text.shape[1]} new tokens, max_new_tokens={case.max_new_tokens}")
    if not torch.equal(ours.ids[:, :width], prompt.repeat_interleave(case.num_return_sequences, dim=0)):
        yield Difference("prompt", "the prompt is not the beginning of the output")
    if not bool(((text >= 0) & (text < vocab)).all()):
        yield Difference("tokens", f"outside of the vocabulary: {text.tolist()}")
    for row in text.tolist():
        ends = [column for column, token in enumerate(row) if token in case.eos_ids]
        if ends and any(token != case.pad_id for token in row[ends[0] + 1 :]):
            yield Difference("padding", f"tokens after an end token: {row}")
        # Where nothing but end tokens is allowed, plain `generate` samples one of them too.
        # Where the padding token is an end token, a row that a stop string ended looks as if that had come too early.
        is_padding = bool(ends) and all(token == case.pad_id for token in row[ends[0] :])
        earliest = min(case.min_new_tokens, case.max_new_tokens - ("forced_eos" in case.options))  # in the last column
        if ends and ends[0] < earliest and not is_padding and "allowed_tokens" not in case.options:
            yield Difference("length", f"an end token before min_new_tokens={case.min_new_tokens}: {row}")


def _statistics(ours: Run, prompt_length: int) -> Iterator[Difference]:
    statistics = getattr(ours.output, "speculation", None)
    if statistics is None or ours.ids is None:
        return
    columns = ours.ids.shape[1] - prompt_length
    if max(statistics.lengths) != columns or len(statistics.lengths) != len(ours.ids):
        yield Difference("statistics", f"lengths {statistics.lengths} of a text of {columns} columns")
    for steps, length in zip(statistics.rows, statistics.lengths, strict=True):
        if not 0 <= length - sum(step.emitted for step in steps) <= 1:
            yield Difference("statistics", f"{steps} for {length} tokens")
        if any(not 0 <= step.accepted <= min(step.depth, step.emitted) <= step.emitted for step in steps):
            yield Difference("statistics", f"more accepted than drafted or emitted: {steps}")


# One model before and after

Fingerprint = dict[str, Any]


def fingerprint(model: Any) -> Fingerprint:
    """What a call must leave as it was: modules, hooks, modes, weights, settings."""
    if model is None:
        return {}
    modules = list(model.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "modules": [(name, id(module)) for name, module in modules],
        "hooks": [(name, hook, len(getattr(module, hook))) for name, module in modules for hook in hooks],
        "attributes": [(name, sorted(vars(module))) for name, module in modules],
        "training mode": [(name, module.training) for name, module in modules],
        "weights": [(name, p.data_ptr(), p._version, p.requires_grad) for name, p in model.named_parameters()],
        "config": model.config.to_dict(),
        "generation config": model.generation_config.to_dict(),
        "dtype of the default": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
    }


def changes(before: Fingerprint, after: Fingerprint, name: str) -> Iterator[Difference]:
    """What a call has left behind on a model."""
    for part, value in before.items():
        if value != after[part]:
            yield Difference(f"{part} of the {name} changed", _first_change(value, after[part]))


def _first_change(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        return str({k: (v, after.get(k)) for k, v in before.items() if v != after.get(k)})[:200]
    if isinstance(before, list):
        changed = ((a, b) for a, b in zip(before, after, strict=False) if a != b)
        return str(next(changed, "another number of them"))[:200]
    return f"{before} became {after}"


def other_random_states() -> tuple[Any, ...]:
    """Of Python and of NumPy: `generate` uses neither."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), bytes(keys), position


def states_between_columns(case: Case, rows: int, vocab: int) -> list[torch.Tensor]:
    """The states that torch's generator passes in plain `generate`: one before each column, and that at the end."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        states = [random_state()]
        for _ in range(case.max_new_tokens if case.do_sample else 0):
            torch.empty(rows, vocab, device=device()).exponential_()
            states.append(random_state())
    return states
