"""Calls in processes of their own, forked from the test's process, in which everything is imported already."""

import contextlib
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

SECONDS_PER_CALL = 600
"""Time limit of a call, for a busy machine."""


def run_in_ranks(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function at the same time in processes of their own, each of which runs as a rank of one group.

    A new interpreter would import PyTorch and Transformers again, which takes longer than most of the calls.
    `accelerate launch` and `torchrun` describe the group by the same environment variables.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    group = {"WORLD_SIZE": len(arguments), "LOCAL_WORLD_SIZE": len(arguments), "MASTER_PORT": port}
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    common |= {name: str(value) for name, value in group.items()}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(arguments))]
    calls = [(environment, function, given) for environment, given in zip(environments, arguments, strict=True)]
    with _forking():
        pool = get_context("fork").Pool(len(calls))
    with pool:
        return pool.starmap_async(_call, calls, chunksize=1).get(SECONDS_PER_CALL)


def started(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A process in which a call is running, in this process's environment or a given one; `multiprocessing.Process`."""
    environment = os.environ.copy() if environment is None else environment
    with _forking():
        process = get_context("fork").Process(target=_call, args=(environment, function, arguments))
        process.start()
    return process


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Without Python's warning of threads that the new process does not have; `_begin` makes it independent of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _begin() -> None:
    """One thread, as in workers of PyTorch's `DataLoader`, and nothing that Accelerate knows of the first process."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _call(environment: Mapping[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    _begin()
    os.environ.clear()
    os.environ.update(environment)
    return function(*arguments)
