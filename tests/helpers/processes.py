"""Calls in processes of their own, forked from a server that has imported everything."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from typing import Any

import pytest

from benchmarks.harness.memory import ALLOCATOR
from tests.helpers.paths import ROOT

SECONDS_PER_CALL = 600
"""Time limit of a call: on a busy machine starting the server alone takes long."""
PRELOADED = ["benchmarks.harness.memory", "benchmarks.harness.runner", "train_medusa", "tests.helpers.processes"]


def run_in_ranks(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function at the same time in processes of their own, each of which runs as a rank of one group.

    Importing PyTorch and Transformers takes seconds in each process that is started afresh. Here a server imports them
    once, without running anything else, and the ranks are forked from it. `accelerate launch` and `torchrun` describe
    the group by the same environment variables.

    Args:
        function: of a module that can be imported.
        arguments: of each rank's call.

    Returns:
        By rank what the call returned.

    Raises:
        Exception: what a rank raised.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    group = {"WORLD_SIZE": len(arguments), "LOCAL_WORLD_SIZE": len(arguments), "MASTER_PORT": port}
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    common |= {name: str(value) for name, value in group.items()}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(arguments))]
    calls = [(environment, function, given) for environment, given in zip(environments, arguments, strict=True)]
    with _server_environment(), _context().Pool(len(calls)) as pool:
        return pool.starmap_async(_call, calls, chunksize=1).get(SECONDS_PER_CALL)


def started(function: Callable[..., Any], *arguments: Any) -> Any:
    """A process, forked from the same server, in which a call is running; a `multiprocessing.Process`."""
    with _server_environment():
        process = _context().Process(target=function, args=arguments)
        process.start()
    return process


def printed_by(function: Callable[..., Any], *arguments: Any) -> str:
    """What a call prints to standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        function(*arguments)
    return output.getvalue()


def _context() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _call(environment: Mapping[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    return function(*arguments)


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """Give the server the module path of this process, and the allocator of `benchmarks.harness.memory`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "recipes"), *filter(None, sys.path)]))
        for name, value in {**ALLOCATOR, "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        yield
