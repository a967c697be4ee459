"""Context managers around a call: what is broken, switched or limited as long as it runs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.fuzz.callbacks import Fault, Interrupt
from tests.fuzz.cases import Case
from tests.fuzz.checks import Hang
from tests.fuzz.internals import raise_in_drafter

SECONDS_PER_CALL = 60
"""No call of a case takes a second on an idle machine."""


@contextlib.contextmanager
def fault_in(case: Case, fault: Fault | Interrupt, model: Any, candidates: Any) -> Iterator[None]:
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


@contextlib.contextmanager
def broken_logits(model: Any, kind: str) -> Iterator[None]:
    """Now and then the model's logits are not finite: a function of the logits alone, so that it is reproducible."""
    if not kind:
        yield
        return
    value = {"nan": float("nan"), "inf": float("inf"), "minus_inf": float("-inf")}[kind]

    def spoil(module: Any, args: Any, output: Any) -> None:
        logits = output.logits
        spoiled = logits[..., :1] > logits[..., 1:].mean(dim=-1, keepdim=True)
        places = slice(None) if kind == "minus_inf" else slice(7, 8)
        logits[..., places] = torch.where(spoiled, torch.full_like(logits[..., places], value), logits[..., places])

    handle = model.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
