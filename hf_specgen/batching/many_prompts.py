"""`generate_many`: answers any number of prompts, several at a time; a row that ends is replaced by the next prompt.

Every prompt is a `generate` call of its own, with its own state, verification and criteria; so its tokens do not depend
on the others. The forward passes are shared. With `max_rows=3`:

    prompts 0, 1 and 2     each runs its prefill alone
    steps 1 and 2          rows of the pass: 0, 1, 2      1 ends
    prompt 3               runs its prefill alone
    steps 3, 4, 5          rows of the pass: 0, 2, 3      0 ends, and so on

A step processes the pending token and the draft of every row in one pass of a common target; drafters with a forward
pass draft for all rows together. Prompts that the common target cannot process are answered one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from numbers import Integral
from time import perf_counter
from traceback import format_exception
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.batching.prompt_call import PromptCall, errors_with_index, prefilled_calls
from hf_specgen.batching.shared_steps import SharedSteps, cut_to_fastest_size
from hf_specgen.call import checked_count
from hf_specgen.call_statistics import Statistics, StepRecord
from hf_specgen.decoding import DecodingLoop
from hf_specgen.generate import setting_of, store_statistics
from hf_specgen.settings import Settings, settings_in
from hf_specgen.targets.row_target import RowTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import ExactVerifier
from hf_specgen.verification.base import are_nan

MADE_ARGUMENTS = ("inputs", "input_ids", "attention_mask", "custom_generate")
"""Arguments of `generate` that `generate_many` makes itself, from each prompt."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt of `generate_many`.

    Args:
        index: of the prompt.
        tokens: the generated tokens.
        output: what `generate` returns for this prompt alone: ids `[1, prompt + generated]`, or an output object.
        statistics: of this prompt; `seconds` has the whole time of the passes that it shared.
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

    The tokens are those of plain `generate` for each prompt alone. Rows that cannot share passes (encoder-decoders,
    recurrent states, offloaded caches, images beside the text, FlashAttention, layer skip, Uno, Gemma 4 assistants) are
    answered one after the other.

    Args:
        model: the target.
        prompts: token ids of each prompt, as lists or tensors `[length]` or `[1, length]`, or the output of a tokenizer
            or processor for a text, of which the model gets what it takes; read as rows become free.
        candidate_generator: proposes draft tokens.
        max_rows: prompts that are processed at a time.
        ordered: yield in the order of the prompts; otherwise in the order of completion.
        seed: when sampling, prompt ``i`` gets the tokens of `torch.manual_seed(seed + i)` and `generate`; or of a list
            those of `seed[i]`. Drawn from torch's generator if left out.
        streamer: makes the streamer of a prompt from its index.
        progress_bar: show one.
        arguments: further arguments of `generate`, and the settings `policy`, `memory`, `prediction`, `history` and
            `grammar_drafts`.

    Yields:
        a `Completion` for each prompt.

    Raises:
        ValueError, TypeError: at once for `max_rows` below 1, a seed that is no integer, a streamer that is no
            function, an argument that is made from the prompts, a verification mode other than "exact", and settings
            that are not valid. After the prompts before it were answered, for a prompt without a
            seed, several sequences per prompt, and what `generate(candidate_generator=…)` refuses; the message begins
            with the index of the prompt, as that of any error in its own part of a step. Where an exception does not
            show its argument as the message, as `OSError`, a note has the index. An error in a shared pass ends all;
            the message begins with the indices of the prompts in it. Where several prompts have failed, notes of the
            error that is raised have the others, with their tracebacks.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_specgen import NgramCandidates, generate_many
        >>> model = AutoModelForCausalLM.from_pretrained("benchmarks/assets/reference-lm")
        >>> prompts = [[1, 5, 6], [1, 7, 8, 9], [1, 4]]
        >>> answers = generate_many(model, prompts, NgramCandidates(), max_rows=2, max_new_tokens=4, do_sample=False)
        >>> sorted(answer.index for answer in answers)
        [0, 1, 2]
    """
    max_rows = checked_count("max_rows", max_rows, 1, "prompts")
    _check_seed(seed, prompts)
    _check_arguments(prompts, streamer, arguments)
    settings = _checked_settings(candidate_generator, arguments)
    if seed is None:
        # Greedy calls leave the global generator as it is, like plain `generate`.
        seed = int(torch.randint(2**31, (), device="cpu")) if setting_of(model, arguments, "do_sample") else 0
    batch = _Batch(model, settings)
    calls = prefilled_calls(model, prompts, batch.shared, seed, streamer, arguments)
    completions = batch.run(calls, max_rows)
    if ordered:
        completions = _in_order(completions)
    total = len(prompts) if isinstance(prompts, Sized) else None
    return iter(tqdm(completions, total=total, unit="prompt")) if progress_bar else completions


def _check_seed(seed: int | Sequence[int] | None, prompts: Iterable[Any]) -> None:
    """Raise `ValueError` unless a seed is an integer from -2**63 to 2**63 - 1, or one for each prompt."""
    if isinstance(seed, Sequence) and isinstance(prompts, Sized) and len(seed) < len(prompts):
        raise ValueError(f"seed has {len(seed)} entries for {len(prompts)} prompts; give one for each, or one number")
    for value in seed if isinstance(seed, Sequence) else [0 if seed is None else seed]:
        if not isinstance(value, Integral) or not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must be an integer below 2**63, or one for each prompt, got {value!r}")


def _check_arguments(prompts: Any, streamer: Any, arguments: dict[str, Any]) -> None:
    """Raise an error for prompts and a streamer of another type, and for arguments that are made from the prompts."""
    if not hasattr(prompts, "__iter__") and not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a list of token ids for each prompt, or an iterator of such, got {prompts!r}")
    if streamer is not None and not callable(streamer):
        raise TypeError(
            "streamer must be a function that makes the streamer of a prompt from its index, such as "
            f"lambda index: TextStreamer(tokenizer), got {streamer!r:.60}"
        )
    if name := next((name for name in MADE_ARGUMENTS if name in arguments), None):
        raise ValueError(
            f"generate_many makes {name}= from each prompt; leave it out, and give a prompt that has an attention "
            "mask as the output of its tokenizer"
        )


def _checked_settings(candidate_generator: Any, arguments: dict[str, Any]) -> Settings:
    """The settings among the arguments, which are removed; `ValueError` for those that shared passes cannot have."""
    settings = Settings.parse(candidate_generator, **{"compile": False, **settings_in(arguments)})
    unsupported = {
        "verification=": not isinstance(settings.verifier, ExactVerifier),
        "monitor=": settings.monitor is not None,
        "compile=": bool(settings.compile),
    }
    if names := [name for name, is_given in unsupported.items() if is_given]:
        raise ValueError(f"generate_many verifies exactly, without monitor and graphs; leave {' and '.join(names)} out")
    return settings


def _in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """The completions in the order of the prompts; all that are complete are yielded before an error is raised."""
    waiting: dict[int, Completion] = {}
    next_index = 0
    try:
        for completion in completions:
            waiting[completion.index] = completion
            while next_index in waiting:
                yield waiting.pop(next_index)
                next_index += 1
    except Exception:
        yield from (waiting[index] for index in sorted(waiting))
        raise


class _Batch:
    """The calls that are in progress, with the settings of `shared`, and the common target that runs their passes."""

    def __init__(self, model: Any, settings: Settings):
        self._model = compat.unwrapped(model)
        self._candidates = settings.candidates
        self.shared = SharedSteps(settings.for_model(self._model))
        self.statistics = Statistics([])
        self._calls: list[PromptCall] = []  # that have not ended, the latest one last
        self._rows: list[PromptCall] = []  # by row of the common target, calls that ended in the last step included
        self._target: RowTarget
        # By prompt index; `inf` for an error while the next prompt was read or prefilled. The error with the lowest
        # index is raised once all calls in progress are complete.
        self._failures: dict[float, Exception] = {}

    def run(self, calls: Iterator[PromptCall], max_rows: int) -> Iterator[Completion]:
        """Complete all calls, of which `max_rows` are processed at a time."""
        try:
            yield from self._admit(calls, max_rows)
            while self._calls:
                with self._forward_context():
                    self._step()
                for row, call in enumerate(self._rows):
                    if call in self._calls and call.loop.state.all_stopped:
                        yield from self._completed(call, row)
                yield from self._admit(calls, max_rows)
            if self._failures:
                raise self._failures[min(self._failures)]
        except Exception as error:
            for _, failure in sorted(self._failures.items()):
                if failure is not error:
                    error.add_note("Another prompt has failed:\n" + "".join(format_exception(failure)).rstrip())
            raise
        finally:
            for call in self._calls:
                call.stack.close()
            self.shared.close()
            store_statistics(self._candidates, self.statistics)

    def _admit(self, calls: Iterator[PromptCall], max_rows: int) -> Iterator[Completion]:
        """Prefill waiting prompts until `max_rows` calls run; stops once a prompt has failed.

        Yields calls that completed meanwhile: those that share no passes, and those that ended with their first token.
        """
        while not self._failures and len(self._calls) < max_rows:
            try:
                call = next(calls, None)
            except Exception as error:
                self._failures[inf] = error
                break
            if call is None:
                break
            self._calls.append(call)
            if not call.shares_passes:  # it runs alone, to its end
                with self._isolating_errors(call), self._forward_context():
                    call.loop.decode()
            if call in self._calls and call.loop.state.all_stopped:
                yield from self._completed(call)

    def _exchange_rows(self) -> None:
        """Drop the rows of ended calls from the common target, and append those of new calls."""
        if self._calls == self._rows:
            return
        # `_calls` has the calls with a row first, in the order of the rows, then the new ones.
        kept = [row for row, call in enumerate(self._rows) if call in self._calls]
        new = [call.target for call in self._calls[len(kept) :]]
        if not kept:
            # The common target begins with the first new call as its only row.
            self._target = new.pop(0).as_common_target()
            kept = [0]
        self._target.keep_rows(kept)
        self._target.append_rows(*new)
        self._rows = list(self._calls)

    def _step(self) -> None:
        """One step of all rows: draft, one pass of the common target, verification by each call.

        A call that fails is removed: before the pass in drafting, its row before the next step in verification.
        """
        drafts = self._drafts()
        if not self._calls:
            return
        self._exchange_rows()
        loops = [call.loop for call in self._calls]
        trees = cut_to_fastest_size(drafts, self.shared.latency)
        begin = perf_counter()
        with errors_with_index(*(call.index for call in self._rows)):
            trees, logits = self._forward(loops, trees)
        seconds = perf_counter() - begin
        for row, (loop, tree) in enumerate(zip(loops, trees, strict=True)):
            loop.timer.add("forward", seconds)  # each call waits for the whole pass
            self._rows[row].target.take_states(self._target, row, 1 + tree.nodes)
            with self._isolating_errors(self._rows[row]):
                loop.end_step(tree, logits[row : row + 1, : 1 + tree.nodes])
        # The paths that the rows have accepted are known: keep them in the common cache.
        for call in self._rows:
            if call not in self._calls:  # it has failed
                call.target.path = ()
        self._target.commit_rows([call.target for call in self._rows])
        if self._calls:
            self._record_step([call.loop for call in self._calls], logits.shape[1])

    def _drafts(self) -> list[DraftTree]:
        """The draft of each call; a call that fails is removed."""
        loops = [call.loop for call in self._calls]
        self.shared.begin(loops, len(loops))
        for call in list(self._calls):
            with self._isolating_errors(call):
                self.shared.plan(call.loop)
        with errors_with_index(*(call.index for call in self._calls)):
            self.shared.draft([call.loop for call in self._calls])
        drafts = []
        for call in list(self._calls):
            with self._isolating_errors(call):
                drafts.append(call.loop.draft_step())
        return drafts

    @contextmanager
    def _isolating_errors(self, call: PromptCall) -> Iterator[None]:
        """A context whose error is kept, with the index of the prompt; the call is removed, and its sessions end."""
        try:
            with errors_with_index(call.index):
                yield
        except Exception as error:
            self._failures[call.index] = error
            self._calls.remove(call)
            with suppress(Exception):  # the first error is the one to raise
                call.stack.close()

    def _forward(self, loops: list[DecodingLoop], trees: list[DraftTree]) -> tuple[list[DraftTree], torch.Tensor]:
        """Drafts and their logits `[rows, 1 + nodes, vocab]`, by one pass of all rows.

        If a logit is NaN, the pass is repeated without any drafts, and the trees that are returned are empty.
        """
        pending = [loop.state.last_token(0) for loop in loops]
        width = max(tree.nodes for tree in trees)
        # One tree with a row for each call, from its nodes without padding, which has no parents; padded to the widest.
        nodes = [(tree.token_lists()[0][: len(tree.parents[0])], tree.parents[0]) for tree in trees]
        logits = self._target.forward(DraftTree.from_nodes(nodes).padded(width), pending)
        if width and bool(are_nan(logits).any()):
            return [DraftTree.empty(1)] * len(loops), self._target.forward_again(pending)
        return trees, logits

    def _record_step(self, loops: list[DecodingLoop], tokens_per_row: int) -> None:
        """Record the step in the statistics of all prompts, and count its time loss if latencies are known."""
        records = [loop.statistics.batch_steps[-1] for loop in loops]
        passes = self.shared.passes_of(loops)
        rows = len(self._rows)  # of the pass, those of calls that have failed in this step included
        context = max(record.context for record in records)
        requested = [record.requested[0] for record in records]
        outcomes = [record.rows[0] for record in records]
        self.statistics.batch_steps.append(StepRecord(requested, outcomes, tokens_per_row, {}, passes, context, rows))
        if (latency := self.shared.latency) is not None:
            emitted = sum(outcome.emitted for outcome in outcomes if outcome is not None)
            self.shared.count_loss(latency.target.seconds_of(rows * tokens_per_row), emitted, passes)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """The context in which `generate` runs forward passes, for passes that run after it has returned."""
        optimized = compat.optimized_for_decoding(self._model)
        with torch.no_grad(), compat.without_compilation(self._model), optimized, compat.default_device():
            yield

    def _completed(self, call: PromptCall, row: int | None = None) -> Iterator[Completion]:
        """Yield the completion of a call that has stopped, or nothing if its output cannot be made.

        The call is removed, and its sessions end. `row` is its row of the common target, if it has one.
        """
        with self._isolating_errors(call), call.stack, torch.no_grad():
            if row is not None and call.loop.outputs.returns_padding_outputs:
                call.target.take_cache(self._target, row)  # the output may have a cache, of this row alone
            output = call.loop.outputs.returned(call.loop.finished_statistics())
        if call not in self._calls:
            return
        self._calls.remove(call)
        statistics = call.loop.statistics
        self.statistics.rows += statistics.rows
        self.statistics.lengths += statistics.lengths
        yield Completion(call.index, list(call.loop.state.generated[0]), output, statistics)
