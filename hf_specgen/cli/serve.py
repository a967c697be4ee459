"""`hf-specgen serve`: the OpenAI-compatible server of Transformers with speculation.

Requests are `generate` calls, one after another, so that each has its own sampling settings, stop strings and seed.
With `--continuous-batching` they share passes, and what Transformers does not obey there is refused.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import cache, partial
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig
from transformers.cli.serve import Serve
from transformers.cli.serving import server, utils
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerateManager

from hf_specgen.attachment import Attachment, attached_to_every_model
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates import Candidates, NgramHistory
from hf_specgen.cli.settings import Drafts, History, Revision, errors
from hf_specgen.evaluation.workloads import checkpoint, chosen_strategy, from_pretrained
from hf_specgen.heads.source import first_line, source_errors
from hf_specgen.monitor import count_in_prometheus, prometheus_counters
from hf_specgen.settings import Settings

NEVER_BATCHED = ("seed", "stop", "frequency_penalty", "logit_bias")
"""Fields of requests that continuous batching does not obey."""
BATCHED = ("max_new_tokens", "eos_token_id")
"""Settings in which requests of continuous batching may differ."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
"""Limits of `stop`: Transformers compares every string with every token of the vocabulary before the first token."""
NOT_BATCHED = "leave it out, or start the server without --continuous-batching"
NEUTRAL_AT_ONE = ("temperature", "top_p", "repetition_penalty")
"""Settings of which 1 does the same as no value."""
_body: ContextVar[Mapping[str, Any]] = ContextVar("hf_specgen_request_body", default=MappingProxyType({}))
"""The request that is handled."""
log = partial(typer.echo, err=True)


class ServedCalls(Attachment):
    """An attached strategy whose calls have the seed and the sampling of their requests, and are logged and counted."""

    def generate(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = _body.get()
        if body.get("seed") is not None:
            torch.manual_seed(body["seed"])  # in the thread that generates: no other request draws in between
        if "generation_config" in kwargs:
            _set_sampling(kwargs["generation_config"])
        try:
            return super().generate(original, model, args, kwargs)
        except Exception as error:
            escaped = json.dumps(str(error))[1:-1]  # the server puts the message of a stream in quotes as it is
            if kwargs.get("streamer") is None or escaped == str(error):
                raise
            raise RuntimeError(escaped) from error

    def add(self, statistics: Statistics) -> None:
        super().add(statistics)
        count_in_prometheus(statistics)
        counts = f"{statistics.accepted} of {statistics.drafted} draft tokens accepted"
        log(f"answered: {statistics.emitted} tokens, {statistics.tokens_per_step:.2f} tokens per step, {counts}")


class Requests(GenerateManager):
    """Requests as `generate` calls of one thread, where `_body` is that of their request."""

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().submit(copy_context().run, fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().async_submit(copy_context().run, fn, *args, **kwargs)


class BatchedRequests(CBGenerateManager):
    """Requests of continuous batching, which all have the sampling settings of the first one."""

    first: dict[str, Any] | None = None

    def init_cb(self, model: Any, gen_config: Any) -> None:
        body = _body.get()
        if never := [name for name in NEVER_BATCHED if body.get(name) or (name == "seed" and body.get(name) == 0)]:
            raise Refusal(f"continuous batching does not obey {', '.join(never)}", NOT_BATCHED)
        _set_sampling(gen_config)
        asked = {name: value for name, value in gen_config.to_dict().items() if name not in BATCHED}
        asked |= {name: None for name in NEUTRAL_AT_ONE if asked.get(name) == 1}
        asked["do_sample"] = bool(asked["do_sample"])
        if self.first is None:
            super().init_cb(model, gen_config)
            self.first = asked
        for name, value in asked.items():
            if value != self.first.get(name):
                first = f"{name}={self.first.get(name)!r} of the first request"
                raise Refusal(f"continuous batching samples all requests with {first}, not {value!r}", NOT_BATCHED)


def _set_sampling(gen_config: Any) -> None:
    """Sample for a temperature above 0, or top_p alone, which Transformers' server ignores for greedy models."""
    temperature = _body.get().get("temperature")
    top_p = _body.get().get("top_p")
    if temperature or (temperature is None and top_p is not None):
        gen_config.do_sample = True


class Refusal(ValueError):
    """A request that cannot be obeyed: an answer in the form of errors of OpenAI."""

    def __init__(self, reason: str, remedy: str, status: int = 400):
        super().__init__(f"{reason}; {remedy}")
        self.status = status

    @staticmethod
    async def answer(_: Any, error: Any) -> Any:
        from fastapi.responses import JSONResponse  # part of transformers[serving]

        body = {"error": {"message": str(error), "type": "invalid_request_error"}}
        return JSONResponse(body, status_code=error.status)


def _build_server(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The application of Transformers; with `/metrics`, and with handlers that leave the seed to `ServedCalls`."""
    for handler in (*args, *kwargs.values()):
        if isinstance(handler, BaseHandler):
            handler.handle_request = partial(_handle, handler.handle_request)  # type: ignore[attr-defined]
    app = original(*args, **kwargs)
    app.state.generation_state = kwargs["generation_state"]
    app.add_api_route("/metrics", _metrics)
    app.add_exception_handler(Refusal, Refusal.answer)
    return app


async def _handle(original: Callable[..., Any], body: dict[str, Any], *args: Any) -> Any:
    """Handle a request without its seed, which would be set while another request draws; errors become refusals."""
    from fastapi import HTTPException  # part of transformers[serving]

    seed = body.get("seed")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise Refusal(f"seed must be an integer of 64 bits, got {seed!r}", "name another seed")
    stop = body.get("stop")
    strings = stop if isinstance(stop, list) else [stop] if isinstance(stop, str) else []
    if len(strings) > MAX_STOP_STRINGS or any(isinstance(one, str) and len(one) > MAX_STOP_LENGTH for one in strings):
        reason = f"stop has {len(strings)} strings, of which there may be {MAX_STOP_STRINGS}"
        raise Refusal(f"{reason} of at most {MAX_STOP_LENGTH} characters each", "give fewer or shorter ones")
    _body.set(body)
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # half a character, NaN
        return await original({name: value for name, value in body.items() if name != "seed"}, *args)
    except (Refusal, HTTPException, utils.CBWorkerDeadError):
        raise
    except Exception as error:  # Transformers reads fields unchecked, and templates raise errors of their own
        status = 500 if isinstance(error, torch.OutOfMemoryError) else 400
        reason = f"the request cannot be answered ({type(error).__name__}: {first_line(error)})"
        raise Refusal(reason, "correct its fields", status) from error


def _metrics() -> Any:
    """The counters of this process, in the format of Prometheus."""
    from fastapi import Response

    if not prometheus_counters():
        raise Refusal("metrics need prometheus_client", "pip install 'hf-specgen[monitor]' on the server", 501)
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


class Server(Serve):
    """The server of Transformers, started by `run` in the thread that receives Ctrl-C."""

    def start_server(self) -> None:
        """Leave starting to `run`."""

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self.server.config.timeout_graceful_shutdown = 0
        self.server.handle_exit = self.stop
        self.server.run()

    def stop(self, *_: Any) -> None:
        """End the server with the requests that are running; the handler of Ctrl-C."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a traceback for every request that is cancelled
        self.server.should_exit = True


@contextmanager
def _replaced(module: Any, **replacements: Any) -> Iterator[None]:
    """Replace names of a module in a `with` block."""
    originals = {name: getattr(module, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)


@contextmanager
def speculating_server(
    model: str, strategy: Candidates, history: NgramHistory | None = None, **options: Any
) -> Iterator[tuple[Server, Attachment]]:
    """A server whose models speculate, to be started by `run`, and what counts its requests."""
    build = partial(_build_server, server.build_server)
    with (
        attached_to_every_model(ServedCalls(Settings.parse(strategy, history=history))) as attachment,
        _replaced(server, build_server=build),
        _replaced(utils, GenerateManager=Requests, CBGenerateManager=BatchedRequests),
    ):
        running = Server(model, non_blocking=True, **options)
        try:
            yield running, attachment
        finally:
            running.server.config.app.state.generation_state.shutdown()


def serve(
    model: Annotated[str, typer.Argument(help="Hub id or folder of the target.")],
    draft: Drafts = [],  # noqa: B006  (typer makes a new list)
    revision: Revision = "",
    history: History = None,
    **options: Any,
) -> None:
    """Start `transformers serve` for a model that speculates."""
    with ExitStack() as stack:
        with errors():
            trusted = options["trust_remote_code"]
            answers = NgramHistory.of_file(history) if history else None
            strategy = chosen_strategy(draft, with_history=answers is not None, trust_remote_code=trusted)
            source = checkpoint(model, revision, trusted)
            name, gguf_file = utils.split_model_id(source.path_or_id)
            with source_errors(name):
                gguf_file or from_pretrained(AutoConfig, source)
            running, attachment = stack.enter_context(speculating_server(str(source), strategy, answers, **options))
        log(f"strategy: {strategy!r}")
        running.run()
        log(attachment.totals.summary())
        if answers is not None:
            answers.sync()  # which the end below leaves out
        os._exit(0)  # the threads that generate would keep the process alive, or abort it while it ends


@cache
def command() -> typer.Typer:
    """`serve` as a program, with the options of `transformers serve`."""
    ours = [option for name, option in inspect.signature(serve, eval_str=True).parameters.items() if name != "options"]
    excluded = ("self", "force_model", "non_blocking")
    theirs = [option for name, option in inspect.signature(Serve.__init__).parameters.items() if name not in excluded]
    serve.__signature__ = inspect.Signature([*ours, *theirs])  # type: ignore[attr-defined]
    serve.__annotations__ = {option.name: option.annotation for option in (*ours, *theirs)}
    program = typer.Typer(add_completion=False)
    program.command()(serve)
    return program
