"""Calls in processes of their own, forked from a server that has imported everything and has run nothing."""

import gc
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

SECONDS_PER_CALL = 300
"""Time limit of a call, for a busy machine."""
CONTEXT = get_context("forkserver")
"""A fork of the test's own process inherits locks that threads of earlier tests hold, and can wait for ever."""
CONTEXT.set_forkserver_preload(["tests.helpers.fixtures", "whole_training", "training"])


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
    processes, receivers = [], []
    for rank, given in enumerate(arguments):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        receiver, sender = CONTEXT.Pipe(duplex=False)
        processes.append(started(_send_result, sender, function, given, environment=environment))
        receivers.append(receiver)
        sender.close()
    try:
        return _results(receivers)
    finally:
        # A rank that waits for another one in native code does not react to SIGTERM.
        for process in processes:
            process.kill()


def run_by_torchrun(function: Callable[..., Any], arguments: Sequence[Any], ranks: int) -> None:
    """Call a function in ranks of `torchrun --standalone`, with its agent, rendezvous and environment.

    The ranks are forks as in `run_in_ranks`, where torchrun starts new interpreters.
    """
    standalone = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--nproc_per_node", str(ranks)]
    config, _, _ = config_from_args(parse_args([*standalone, "script.py"]))
    config.start_method = "forkserver"
    with ThreadPoolExecutor(1) as pool:  # in the main thread it would replace the handlers of signals
        pool.submit(elastic_launch(config, function), *arguments).result()


def started(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A process in which a call is running, in this process's environment or a given one; `multiprocessing.Process`."""
    environment = os.environ.copy() if environment is None else environment
    process = CONTEXT.Process(target=_call, args=(dict(environment), function, arguments), daemon=True)
    process.start()
    return process


def _results(receivers: Sequence[Connection]) -> list[Any]:
    """The result of every rank; raises at the first rank that fails, or after `SECONDS_PER_CALL`."""
    results: dict[Connection, Any] = {}
    deadline = monotonic() + SECONDS_PER_CALL
    while waiting := [receiver for receiver in receivers if receiver not in results]:
        ready = wait(waiting, max(0, deadline - monotonic()))
        if not ready:
            raise TimeoutError(f"{len(waiting)} of {len(receivers)} ranks did not end in {SECONDS_PER_CALL} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                results[receiver], error = receiver.recv()
            except EOFError:
                error = "it ended without a result"
            if error is not None:
                raise RuntimeError(f"rank {receivers.index(receiver)}: {error}")
    return [results[receiver] for receiver in receivers]


def _call(environment: Mapping[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call the function with one thread, in the environment of the process that asked for it."""
    gc.freeze()  # what the server has imported: Accelerate collects garbage in every training
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _send_result(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Send the result of a call and None, or None and the traceback of its exception."""
    try:
        sender.send((function(*arguments), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        raise
