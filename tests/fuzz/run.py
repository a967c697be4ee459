"""Runs one case: plain `generate` and speculation under the same seed, turn by turn, and what a fault leaves behind."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from hf_specgen import speculate
from tests.fuzz import checks, settings, strategies
from tests.fuzz.cases import Case
from tests.fuzz.checks import Difference, Hang, Run
from tests.fuzz.internals import raise_in_drafter
from tests.fuzz.models import tiny_model
from tests.fuzz.settings import Ends, Fault, Interrupt

SECONDS_PER_CALL = 60
BY_ROUNDING = {"tokens", "random state", "stream", "scores", "logits", "cache", "statistics"}
"""Differences that a near-tie of two tokens can make."""


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    differences: list[Difference] = field(default_factory=list)
    status: str = "same"
    """ "same", "raised" (both sides, the same error), "refused", "rounding" (gone in float64) or "different"."""
    reason: str = ""
    """Of a refusal."""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    fault_raised: bool = False
    seconds: float = 0.0

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def run(case: Case) -> Outcome:
    """Compare speculation with plain `generate` in one case."""
    started = time.perf_counter()
    if case.threads > 1:
        outcome = _compare_threads(case)
    else:
        comparison = _Comparison(case, torch.float32)
        outcome = comparison.run()
        if outcome.differences and _is_rounding(comparison):
            outcome.status = "rounding"
    if outcome.differences and outcome.status != "rounding":
        outcome.status = "different"
    outcome.seconds = time.perf_counter() - started
    return outcome


def _is_rounding(comparison: _Comparison) -> bool:
    """Whether the differences come from sums in another order: float64 has none, and writes the text of either side."""
    if not all(difference.kind in BY_ROUNDING for difference in comparison.outcome.differences):
        return False
    exact = _Comparison(comparison.case, torch.float64)
    if exact.run().status != "same" or exact.outcome.differences:
        return False
    turns = zip(comparison.texts, exact.texts, strict=False)  # after a difference there are no more turns
    return all(any(torch.equal(exactly, text) for text in sides) for sides, (exactly, _) in turns)


class _Comparison:
    """Both sides of a case."""

    def __init__(self, case: Case, dtype: torch.dtype):
        self.case, self.outcome = case, Outcome(case)
        positions = max(case.lengths) + case.max_new_tokens if case.tight_positions and case.turns == 1 else 256
        self.model = tiny_model(case.architecture, case.layers, case.attention, case.window, positions, dtype)
        self.draft = strategies.draft_model(case, self.model)
        self.answers = strategies.Answers()
        self.candidates: Any = None
        self.texts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What plain `generate` and what speculation wrote, turn by turn."""

    def run(self) -> Outcome:
        with _modes(self.case, self.model, self.draft), settings.broken_logits(self.model, self.case.broken_logits):
            self._turns()
        return self.outcome

    def _turns(self) -> None:
        case = self.case
        inputs = settings.prompts(case)
        ends = self._ends(inputs)
        caches = (self._new_cache(), self._new_cache())
        for turn in range(case.turns):
            # What the last turn gives is tried with a fault first: the cache must serve afterwards.
            last = turn == case.turns - 1
            plain, ours = self._turn(inputs, ends, caches, case.fault if last else "")
            if ours is None or plain.ids is None or ours.ids is None:
                return
            self.texts.append((plain.ids, ours.ids))
            if self.outcome.differences or not torch.equal(plain.ids, ours.ids):
                return  # the texts of a lossy mode part, and their caches with them
            inputs = settings.next_prompts(inputs, plain.ids, case.seed + turn)
            caches = (ours.cache, plain.cache) if case.swap_caches else (plain.cache, ours.cache)

    def _turn(
        self, inputs: dict[str, torch.Tensor], ends: Ends, caches: tuple[Any, Any], fault: str
    ) -> tuple[Run, Run | None]:
        again = copy.deepcopy(caches[0]) if fault else None
        plain = self._generate(inputs, ends, caches[0])
        if not self._prepare(plain, inputs):
            return plain, None
        ours = None
        if fault and plain.error is None:
            ours = self._fault(plain, inputs, ends, caches[1])
            if not _equal(self._generate(inputs, ends, again), plain):
                self._differ([Difference("plain generate after a fault", "is not what it was before")])
        if ours is None:
            ours = self._speculate(inputs, ends, caches[1])
        if plain.error is not None or ours.error is not None:
            self._differ(checks.compare_errors(plain, ours))
            if not self.outcome.differences:
                self.outcome.status = "refused" if ours.is_refusal else "raised"
                self.outcome.reason = str(ours.error)
        else:
            self._differ(checks.compare(self.case, plain, ours, inputs["input_ids"]))
        self._count(ours)
        return plain, ours

    def _ends(self, inputs: dict[str, torch.Tensor]) -> Ends:
        """End tokens and stop strings are taken from a text that is written without them."""
        case = self.case
        if not case.eos_columns and case.stop_string_column is None:
            return Ends(case.eos_ids, None)
        run = self._generate(inputs, Ends((), None), self._new_cache())
        if run.ids is None:
            return Ends(case.eos_ids, None)
        return settings.find_ends(case, run.ids[:, inputs["input_ids"].shape[1] :].tolist())

    def _prepare(self, plain: Run, inputs: dict[str, torch.Tensor]) -> bool:
        """Make the strategy, and tell oracles what they propose."""
        ids = inputs["input_ids"] if plain.ids is None else plain.ids
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        mask = mask.repeat_interleave(len(ids) // len(mask), dim=0)
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
        known = strategies.Known(ids, mask, inputs["input_ids"].shape[1])
        self.answers.by_row = known.answers()
        if self.candidates is None:
            with torch.random.fork_rng():
                try:
                    self.candidates = strategies.build(self.case, self.model, self.draft, known, self.answers)
                except checks.REFUSALS as error:
                    self.outcome.status, self.outcome.reason = "refused", str(error)
        return self.candidates is not None

    def _new_cache(self) -> Any:
        return DynamicCache(config=self.model.config) if self.case.cache == "dynamic" else None

    def _generate(
        self,
        inputs: dict[str, torch.Tensor],
        ends: Ends,
        cache: Any,
        fault: Fault | Interrupt | None = None,
        speculation: bool = False,
    ) -> Run:
        case = self.case
        arguments = settings.arguments(case, ends, inputs["input_ids"].shape[1], fault)
        streamer = arguments.get("streamer")
        if speculation:
            arguments |= _speculation(case, self.candidates, arguments)
        if case.entry == "custom_streamer" and speculation:
            arguments.pop("streamer", None)
        if cache is not None:
            arguments["past_key_values"] = cache
        torch.manual_seed(case.seed)
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        error, output = None, None
        mode = torch.inference_mode() if case.inference_mode else contextlib.nullcontext()
        try:
            with time_limit(SECONDS_PER_CALL), mode:
                output = self.model.generate(**given, **arguments)
        except (Exception, Interrupt) as raised:
            error = raised
        if any(not torch.equal(tensor, inputs[name]) for name, tensor in given.items()):
            self._differ([Difference("inputs changed", "the caller's tensors are not what they were")])
        is_dict = not isinstance(output, torch.Tensor)
        return Run(
            error=error,
            ids=getattr(output, "sequences", None) if is_dict else output,
            output=output if is_dict else None,
            cache=cache if cache is not None else getattr(output, "past_key_values", None),
            streamed=streamer.chunks if streamer else [],
            stream_ended=streamer.ended if streamer else 0,
            random_state=torch.get_rng_state(),
        )

    def _speculate(
        self, inputs: dict[str, torch.Tensor], ends: Ends, cache: Any, fault: Fault | Interrupt | None = None
    ) -> Run:
        """A speculative call, after which both models must be what they were."""
        models = {"model": self.model, "draft": self.draft}
        before = {name: checks.fingerprint(model) for name, model in models.items()}
        random_states = checks.other_random_states()
        ours = self._generate(inputs, ends, cache, fault, speculation=True)
        if checks.other_random_states() != random_states:
            self._differ([Difference("random state", "the random numbers of Python or NumPy are not where they were")])
        for name, model in models.items():
            self._differ(checks.changes(before[name], checks.fingerprint(model), name))
        return ours

    def _fault(self, plain: Run, inputs: dict[str, torch.Tensor], ends: Ends, cache: Any) -> Run | None:
        """Raise an exception inside a call and look at what it leaves behind.

        Returns:
            The call, if it came to its end before the exception could be raised.
        """
        case = self.case
        fault = (Interrupt if case.interrupt else Fault)("on purpose")
        with _fault_in(case, fault, self.model, self.candidates):
            length = None if cache is None else cache.get_seq_length()
            ours = self._speculate(inputs, ends, cache, fault)
        if ours.error is not fault:
            if ours.error is not None and not ours.is_refusal:
                detail = f"{checks.describe(ours.error)} where {type(fault).__name__} was raised"
                self._differ([Difference("other error", detail)])
            return ours if ours.error is None else None
        self.outcome.fault_raised = True
        if cache is not None and cache.get_seq_length() != length:
            detail = f"the caller's cache holds {cache.get_seq_length()} slots, {length} before"
            self._differ([Difference("cache after a fault", detail)])
        if case.verification != "exact":
            return None
        if plain.streamed[: len(ours.streamed)] != ours.streamed:
            self._differ([Difference("stream", f"{ours.streamed} before a fault, plain: {plain.streamed}")])
        if plain.ids is not None:
            states = checks.states_between_columns(case, len(plain.ids))
            if not any(torch.equal(ours.random_state, state) for state in states):
                self._differ([Difference("random state after a fault", "is none that plain generate passes")])
        return None

    def _count(self, ours: Run) -> None:
        statistics = getattr(ours.output, "speculation", None) or getattr(self.candidates, "speculation", None)
        if ours.error is None and statistics is not None:
            self.outcome.drafted += statistics.drafted
            self.outcome.accepted += statistics.accepted
            self.outcome.emitted += statistics.emitted

    def _differ(self, differences: Iterator[Difference] | list[Difference]) -> None:
        self.outcome.differences += differences


def _speculation(case: Case, candidates: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ask for speculation."""
    call: dict[str, Any] = {} if case.verification == "exact" else {"verification": case.verification}
    policy = strategies.call_policy(case)
    if policy is not None:
        call["policy"] = policy
    if case.entry == "keyword":
        return {"candidate_generator": candidates, **call}
    if case.entry == "custom_streamer":
        call["streamer"] = arguments.get("streamer")
    return {"custom_generate": speculate(candidates, **call)}


def _equal(one: Run, other: Run) -> bool:
    if one.ids is None or other.ids is None:
        return type(one.error) is type(other.error)
    return torch.equal(one.ids, other.ids)


@contextlib.contextmanager
def _fault_in(case: Case, fault: Fault | Interrupt, model: Any, candidates: Any) -> Iterator[None]:
    """Faults that are not raised by an argument of `generate`."""
    if case.fault == "drafter" and case.strategy != "native":
        with raise_in_drafter(candidates, case.fault_call, fault):
            yield
        return
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == case.fault_call:
            raise fault

    # Where the logits are made: the cache has been written to by then.
    module = model.get_output_embeddings() or model
    handle = module.register_forward_pre_hook(count) if case.fault == "model" else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def _modes(case: Case, model: Any, draft: Any) -> Iterator[None]:
    """Training mode and dropout, as long as a case runs: models are shared between cases."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    model.train(case.training in ("target", "dropout"))
    for module in dropouts:
        module.p = 0.2 if case.training == "dropout" else 0.0
    if draft is not None:
        draft.train(case.training == "draft")
    try:
        yield
    finally:
        for changed in (model, draft):
            if changed is not None:
                changed.eval()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds; in the main thread only, since others get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Threads


def _compare_threads(case: Case) -> Outcome:
    """Several threads generate with one model and one strategy object, each from prompts of its own.

    Only tokens are compared: the random generator is one for all threads, so that nothing can be sampled by seed.
    """
    outcome = Outcome(case)
    singles = [replace(case, seed=case.seed + thread, threads=1, do_sample=False) for thread in range(case.threads)]
    sides = [_Comparison(single, torch.float32) for single in singles]
    inputs = [settings.prompts(single) for single in singles]
    plain = [side._generate(given, Ends(case.eos_ids, None), None) for side, given in zip(sides, inputs, strict=True)]
    if any(run.error is not None for run in plain) or not sides[0]._prepare(plain[0], inputs[0]):
        outcome.status = "raised"
        return outcome
    for side, run, given in zip(sides, plain, inputs, strict=True):
        assert run.ids is not None
        side.candidates = sides[0].candidates
        sides[0].answers.add(given, run.ids)
    ours: list[Run | None] = [None] * case.threads

    def work(thread: int) -> None:
        ours[thread] = sides[thread]._generate(inputs[thread], Ends(case.eos_ids, None), None, speculation=True)

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(case.threads)]
    for started in threads:
        started.start()
    for started in threads:
        started.join(SECONDS_PER_CALL)
    for thread, (expected, got) in enumerate(zip(plain, ours, strict=True)):
        if got is None:
            outcome.differences.append(Difference("hang", f"thread {thread}: no end after {SECONDS_PER_CALL} s"))
        elif got.error is not None:
            outcome.differences += checks.compare_errors(expected, got)
            outcome.status, outcome.reason = "refused", str(got.error)
        elif case.verification == "exact" and not _equal(expected, got):
            assert expected.ids is not None and got.ids is not None
            detail = f"thread {thread}: {got.ids.tolist()} instead of {expected.ids.tolist()}"
            outcome.differences.append(Difference("tokens", detail))
        else:
            sides[0]._count(got)
    sides[0].outcome.differences, sides[0].outcome.status = outcome.differences, outcome.status
    sides[0].outcome.case, sides[0].outcome.reason = case, outcome.reason
    return sides[0].outcome
