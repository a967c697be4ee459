"""`generate_many`: answers any number of prompts, several at a time; a row that ends is replaced by the next prompt.

Every prompt is a `generate` call of its own, with its own state, verification and criteria; so its tokens do not depend
on the others. The forward passes are common: each step processes the pending token and the draft of every row at once,
in one target whose rows are replaced, and drafters with a forward pass draft for all rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Integral
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.batching.shared_steps import SharedSteps
from hf_specgen.call_statistics import Statistics, StepRecord
from hf_specgen.decoding import DecodingLoop
from hf_specgen.depth.latency import StepLatency, fastest_count
from hf_specgen.generate import Speculation
from hf_specgen.settings import Settings, settings_in
from hf_specgen.targets.row_target import RowTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import CoupledVerifier
from hf_specgen.verification.base import are_nan


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt of `generate_many`.

    Args:
        index: of the prompt.
        tokens: the generated tokens.
        output: what `generate` returns for this prompt alone: ids `[1, prompt + generated]`, or an output object.
        statistics: of this prompt; its `passes` and `seconds` are those of its own passes, such as the prefill.
    """

    index: int
    tokens: list[int]
    output: Any
    statistics: Statistics


def generate_many(
    model: Any,
    prompts: Iterable[Any],
    candidate_generator: Any = "auto",
    *,
    max_rows: int = 8,
    ordered: bool = False,
    seed: int | Sequence[int] | None = None,
    streamer: Callable[[int], BaseStreamer] | None = None,
    progress_bar: bool = False,
    **arguments: Any,
) -> Iterator[Completion]:
    """Generate for any number of prompts, `max_rows` at a time; a row that ends is replaced by the next prompt.

    The tokens are those of plain `generate` for each prompt alone. Rows that cannot be joined (recurrent states, images
    beside the text, FlashAttention, layer skip, Gemma 4 assistants) are answered one after the other.

    Args:
        model: the target.
        prompts: token ids of each prompt, as lists or tensors `[length]` or `[1, length]`, or the output of a tokenizer
            for a text; read as rows become free.
        candidate_generator: proposes draft tokens.
        max_rows: prompts that are processed at a time.
        ordered: yield in the order of the prompts; otherwise in the order of completion.
        seed: when sampling, prompt ``i`` gets the tokens of `torch.manual_seed(seed + i)` and `generate`; or of a list
            those of `seed[i]`. Drawn from torch's generator if left out.
        streamer: makes the streamer of a prompt from its index.
        progress_bar: show one.
        arguments: further arguments of `generate`, and the settings `policy` and `memory`.

    Yields:
        a `Completion` for each prompt.

    Raises:
        ValueError, TypeError: for `max_rows` below 1, several sequences per prompt, a verification mode other than
            "exact", and what `generate(candidate_generator=…)` refuses. What concerns a prompt names its index, and is
            raised after the prompts before it were answered.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_specgen import NgramCandidates, generate_many
        >>> model = AutoModelForCausalLM.from_pretrained("benchmarks/assets/reference-lm")
        >>> prompts = [[1, 5, 6], [1, 7, 8, 9], [1, 4]]
        >>> answers = generate_many(model, prompts, NgramCandidates(), max_rows=2, max_new_tokens=4, do_sample=False)
        >>> sorted(answer.index for answer in answers)
        [0, 1, 2]
    """
    if not isinstance(max_rows, int) or max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows!r}")
    if isinstance(seed, Sequence) and isinstance(prompts, Sized) and len(seed) < len(prompts):
        raise ValueError(f"seed has {len(seed)} entries for {len(prompts)} prompts; give one for each, or one number")
    for value in seed if isinstance(seed, Sequence) else [0 if seed is None else seed]:
        if not isinstance(value, Integral) or not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must be an integer below 2**63, or one for each prompt, got {value!r}")
    keywords = settings_in(arguments)
    settings = Settings.parse(candidate_generator, **{"compile": False, **keywords})
    if not isinstance(settings.verifier, CoupledVerifier) or settings.monitor is not None or settings.compile:
        raise ValueError("generate_many verifies exactly, without monitor and graphs; leave these settings out")
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    batch = _Batch(model, settings)
    completions = batch.run(_prefilled(model, prompts, batch.steps.settings, seed, streamer, arguments), max_rows)
    if ordered:
        completions = _in_order(completions)
    total = len(prompts) if isinstance(prompts, Sized) else None
    return iter(tqdm(completions, total=total, unit="prompt")) if progress_bar else completions


def _of_common_width(trees: list[DraftTree], latency: StepLatency | None) -> list[DraftTree]:
    """The trees cut to the number of tokens with the most expected tokens per second of all rows together.

    Each row pays for the largest draft. Without it n-grams have 0.94 of the projected speed.
    """
    if latency is None or not all(tree.probability for tree in trees if tree.nodes):
        return trees
    rows, probability = len(trees), [tree.probability[0] for tree in trees if tree.probability]
    gains = [sum(nodes) for nodes in zip_longest(*probability, fillvalue=0.0)]
    seconds = np.array([latency.target.seconds_of(rows * (1 + width)) for width in range(1 + len(gains))])
    width = fastest_count(gains, rows, seconds)
    return [tree.first_nodes(width) for tree in trees]


def _in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """The completions in the order of the prompts."""
    waiting: dict[int, Completion] = {}
    following = 0
    for completion in completions:
        waiting[completion.index] = completion
        while following in waiting:
            yield waiting.pop(following)
            following += 1


class _Row(Speculation):
    """A prompt: a `generate` call that is prepared as any other, and whose steps are made by a `_Batch`."""

    is_row = True
    index: int
    loop: DecodingLoop
    stack: ExitStack

    @property
    def target(self) -> RowTarget:
        """The target of a joinable row."""
        return cast(RowTarget, self.loop.target)

    @property
    def is_joinable(self) -> bool:
        """Whether the common target can process the row."""
        target = self.loop.target
        return target.is_joinable and not self.settings.candidates.target_requirements(target.model).reads_cache

    def run(self, loop: DecodingLoop, stack: ExitStack) -> torch.Tensor:
        """Run the prefill alone."""
        if loop.state.batch != 1:
            raise ValueError("generate_many returns one answer to each prompt; leave num_return_sequences= out")
        loop.prefill()
        self.loop, self.stack = loop, stack.pop_all()
        return loop.outputs.output_ids()


def _prefilled(
    model: Any,
    prompts: Iterable[Any],
    settings: Settings,
    seed: int | Sequence[int],
    streamer: Callable[[int], BaseStreamer] | None,
    arguments: dict[str, Any],
) -> Iterator[_Row]:
    """The rows of the prompts, each after its prefill."""
    for index, prompt in enumerate(prompts):
        with _named(index):
            ids = _token_ids(prompt).to(compat.input_device(model))
            row = _Row(settings, streamer and streamer(index))
            row.index = index
            row.seed = int(seed[index]) if isinstance(seed, Sequence) else int(seed) + index
            model.generate(ids, attention_mask=torch.ones_like(ids), **arguments, custom_generate=row)
        yield row


def _token_ids(prompt: Any) -> torch.Tensor:
    """The ids `[1, tokens]` of a prompt, which may be the output of a tokenizer."""
    is_encoding = isinstance(prompt, Mapping) and "input_ids" in prompt
    found = prompt["input_ids"] if is_encoding else getattr(prompt, "ids", prompt)
    try:
        ids = torch.as_tensor(found)
        is_valid = not (ids.is_floating_point() and ids.numel())
    except (TypeError, ValueError, RuntimeError):
        is_valid = False
    if not is_valid:
        raise TypeError(f"a prompt must be token ids, such as tokenizer(text)['input_ids'], got {prompt!r:.60}")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"a prompt must have the shape [length] or [1, length], got {list(ids.shape)}")
    if is_encoding and "attention_mask" in prompt:
        ids = ids[torch.as_tensor(prompt["attention_mask"]).view(1, -1) != 0][None]
    return ids.long()


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Lets an error begin with the index of the prompt that it concerns."""
    try:
        yield
    except Exception as error:
        error.args = (f"prompt {index}: {error}",)
        raise


class _Batch:
    """The rows of a `generate_many` call, and what they have in common."""

    def __init__(self, model: Any, settings: Settings):
        self._model = compat.unwrapped(model)
        self._candidates = settings.candidates
        self.steps = SharedSteps(settings.for_model(self._model))
        self.statistics = Statistics([])
        self._rows: list[_Row] = []
        self._joined: list[_Row] = []  # those of the common target
        self._target: RowTarget

    def run(self, rows: Iterator[_Row], max_rows: int) -> Iterator[Completion]:
        """Complete all rows, of which `max_rows` are processed at a time."""
        failure: Exception | None = None
        try:
            while True:
                while len(self._rows) < max_rows and failure is None:
                    try:
                        row = next(rows, None)
                    except Exception as error:  # raised once the rows in work are completed
                        failure = error
                        break
                    if row is None:
                        break
                    self._rows.append(row)
                    if not row.is_joinable:
                        with _named(row.index), self._decoding():
                            row.loop.decode()
                    if row.loop.state.all_stopped:
                        yield self._completed(row)
                if not self._rows:
                    if failure is not None:
                        raise failure
                    return
                with self._decoding():
                    self._exchange_rows()
                    self._step()
                for place, row in enumerate(self._joined):
                    if row.loop.state.all_stopped:
                        if row.loop.outputs.shows_padding:
                            row.target.leave(self._target, place)
                        yield self._completed(row)
        finally:
            for row in self._rows:
                row.stack.close()
            self.steps.close()
            self._candidates.speculation = self.statistics

    def _exchange_rows(self) -> None:
        """Let the common target process the rows that have not ended, and new ones after them."""
        if self._rows == self._joined:
            return
        kept = [place for place, row in enumerate(self._joined) if row in self._rows]
        new = [row.target for row in self._rows[len(kept) :]]
        if not kept:
            self._target = new.pop(0).common()
        self._target.keep_rows(kept or [0])
        self._target.append_rows(*new)
        self._joined = list(self._rows)

    def _step(self) -> None:
        """One step of all rows."""
        loops = [row.loop for row in self._rows]
        self.steps.begin(loops, len(loops))
        drafts = self.steps.draft(loops, [True] * len(loops))
        trees = _of_common_width(drafts, self.steps.latency)
        width, pending = max(tree.nodes for tree in trees), [loop.state.last_token(0) for loop in loops]
        parts = [(tree.token_lists()[0][: len(tree.parents[0])], tree.parents[0]) for tree in trees]
        begin = perf_counter()
        logits = self._target.forward(DraftTree.from_nodes(parts).padded(width), pending)
        if width and bool(are_nan(logits).any()):
            trees, width = [DraftTree.empty(1)] * len(loops), 0
            logits = self._target.forward_again(pending)
        seconds = perf_counter() - begin
        for place, (loop, tree) in enumerate(zip(loops, trees, strict=True)):
            loop.timer.add("forward", seconds)
            row = self._rows[place]
            row.target.take_states(self._target, place, 1 + tree.nodes)
            with _named(row.index):
                loop.end_step(tree, logits[place : place + 1, : 1 + tree.nodes])
        self._target.commit_rows([row.target for row in self._rows])
        records = [loop.statistics.passes[-1] for loop in loops]
        passes = self.steps.passes or [tokens for one in records for tokens in one.passes]
        context = max(one.context for one in records)
        requested, rows = [one.requested[0] for one in records], [one.rows[0] for one in records]
        self.statistics.passes.append(StepRecord(requested, rows, 1 + width, {}, passes, context))
        if (latency := self.steps.latency) is not None:
            emitted = sum(row.emitted for row in rows if row is not None)
            self.steps.count_loss(latency.target.seconds_of(len(rows) * (1 + width)), emitted, passes)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """The contexts in which `generate` runs forward passes."""
        with torch.no_grad(), compat.without_compilation(self._model), compat.optimized_for_decoding(self._model):
            yield

    def _completed(self, row: _Row) -> Completion:
        self._rows.remove(row)
        with row.stack, torch.no_grad():
            output = row.loop.outputs.returned(row.loop.finished_statistics())
        statistics = row.loop.statistics
        self.statistics.rows += statistics.rows
        self.statistics.lengths += statistics.lengths
        return Completion(row.index, list(row.loop.state.generated[0]), output, statistics)
