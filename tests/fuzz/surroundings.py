"""How a case asks for speculation, and what is broken, switched or limited as long as a call runs."""

import contextlib
import copy
import io
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from transformers import DynamicCache

from hf_specgen import Call, Candidates, DraftSession, DraftTree, SpeculationMonitor, attached, speculate
from tests.fuzz import strategies
from tests.fuzz.cases import Case
from tests.fuzz.checks import Hang
from tests.fuzz.settings import Fault, Interrupt

T = TypeVar("T")
SECONDS_PER_CALL = 60
"""No call of a case takes a second on an idle machine."""
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "no_memory": lambda: {"memory": False},
    "monitor": lambda: {"monitor": SpeculationMonitor(prometheus=False)},
    "not_compiled": lambda: {"compile": False},
}


def call_settings(case: Case) -> dict[str, Any]:
    """Verification, policy and further settings of a call, where they are not the defaults."""
    call: dict[str, Any] = {} if case.verification == "exact" else {"verification": case.verification}
    call |= {name: value for setting in case.settings for name, value in SETTINGS[setting]().items()}
    policy = strategies.call_policy(case)
    if policy is not None:
        call["policy"] = policy
    return call


@contextlib.contextmanager
def attached_to(case: Case, model: Any, candidates: Any) -> Iterator[None]:
    """Attached; in every second case without a fault, calls that cannot speculate are plain."""
    strict = case.seed % 2 == 0 or case.fault != ""
    with attached(model, candidates, strict=strict, **call_settings(case)):
        yield


def speculation_arguments(case: Case, candidates: Any, streamer: Any) -> dict[str, Any]:
    """The arguments that ask for speculation."""
    call = call_settings(case)
    if case.entry == "keyword":
        return {"candidate_generator": candidates, **call}
    if case.entry == "custom_streamer":
        call["streamer"] = streamer
    return {"custom_generate": speculate(candidates, **call)}


@contextlib.contextmanager
def raise_in_drafter(candidates: Candidates, call: int, error: BaseException) -> Iterator[None]:
    """Raise `error` in a drafter's `call`-th draft, after it has done its work."""
    start, calls = candidates.start, 0

    def start_and_count(made_call: Call) -> DraftSession:
        session = start(made_call)
        draft = session.draft

        def counted(budget: Sequence[int]) -> DraftTree:
            nonlocal calls
            calls += 1
            tree = draft(budget)
            if calls == call:
                raise error
            return tree

        vars(session).update(draft=counted)
        return session

    with mock.patch.object(candidates, "start", start_and_count):
        yield


@contextlib.contextmanager
def fault_in(
    case: Case, fault: Fault | Interrupt, model: Any, candidates: Any, check_model: Callable[[], None]
) -> Iterator[None]:
    """Faults that are not raised by an argument of `generate`."""
    if case.fault == "drafter" and case.strategy != "native":
        with raise_in_drafter(candidates, case.fault_call, fault):
            yield
        return
    if case.fault != "model":
        yield
        return
    calls = Calls(case.fault_call, fault)
    # Where the logits are made: the cache has been written to by then.
    module = model.get_output_embeddings() or model
    with module.register_forward_pre_hook(calls.count):
        check_model()  # which the hook has changed
        calls.is_armed.acquire()
        yield


class Calls:
    """Raises an exception in the n-th call after it is armed; its state is no setting of the model that it hooks.

    So it is in objects whose values the self-check does not read: a lock, which is locked when armed, and a counter.
    """

    def __init__(self, call: int, error: BaseException):
        self.is_armed, self._last, self._error = threading.Lock(), call, error
        self._calls = itertools.count(1)

    def count(self, *_: Any) -> None:
        if self.is_armed.locked() and next(self._calls) == self._last:
            raise self._error


@contextlib.contextmanager
def modes(case: Case, model: Any, draft: Any) -> Iterator[None]:
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
        for module in dropouts:
            module.p = 0.0
        for changed in (model, draft):
            if changed is not None:
                changed.eval()


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise `Hang` after `SECONDS_PER_CALL`; in other threads than the main one, `in_threads` limits the time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Hang(f"no end after {SECONDS_PER_CALL} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CALL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_threads(count: int, make_call: Callable[[], T]) -> list[T]:
    """What the same call returns in several threads that make it at the same time."""
    results: list[T] = []
    start = threading.Barrier(count)

    def work() -> None:
        start.wait()
        results.append(make_call())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS_PER_CALL
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise Hang(f"{count} threads: no end after {SECONDS_PER_CALL} s")
    return results


@contextlib.contextmanager
def drawing_thread(draws: bool) -> Iterator[None]:
    """Another thread draws from the global random generator, as a data loader does."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(0.0002):
            torch.rand(1)

    thread = threading.Thread(target=work, daemon=True)
    if draws:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if draws:
            thread.join()


def _saved_cache(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CACHE_USES: dict[str, Callable[[Any], Any]] = {
    "saved": _saved_cache,
    "copied": copy.deepcopy,
    "tensors": lambda cache: DynamicCache([(layer.keys, layer.values) for layer in cache.layers]),
    "iterated": lambda cache: DynamicCache([(layer[0], layer[1]) for layer in cache]),
}
OF_KEYS = ("tensors", "iterated")
"""Those that keep keys and values alone, without windows and states."""


@contextlib.contextmanager
def broken_logits(model: Any, kind: str) -> Iterator[None]:
    """Now and then logits are not finite, as a function of themselves; or "rounded", so that order decides ties."""
    if not kind:
        yield
        return
    value = {"nan": float("nan"), "inf": float("inf"), "minus_inf": float("-inf")}.get(kind, 0.0)

    def spoil(module: Any, args: Any, output: Any) -> None:
        logits = output.logits
        if kind == "rounded":
            logits.copy_(logits.round())
            return
        spoiled = logits[..., :1] > logits[..., 1:].mean(dim=-1, keepdim=True)
        places = slice(None) if kind == "minus_inf" else slice(7, 8)
        logits[..., places] = torch.where(spoiled, torch.full_like(logits[..., places], value), logits[..., places])

    handle = model.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
