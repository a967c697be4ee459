"""Commands whose options are the fields of a dataclass, so that name, type, default and help stand in one place."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

NOISY_LOGGERS = ("torch.utils._pytree", "torchao", "transformers")
"""They report optional packages of other libraries on import, and progress of loading weights."""


def command(app: typer.Typer, settings: type, name: str | None = None) -> Callable[[Callable[[Any], None]], Any]:
    """Register a function of one settings object as a command with the options of that class.

    Args:
        app: gets the command.
        settings: a dataclass whose fields are made by `hf_specgen.evaluation.settings.setting`.
        name: of the command; that of the function if left out.
    """

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(function)
        def run(**options: Any) -> None:
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
            with errors():
                function(settings(**values))

        hints = get_type_hints(settings)
        parameters = [_parameter(item, hints[item.name]) for item in fields(settings)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name or function.__name__)(run)
        return function

    return register


def _parameter(item: Field[Any], kind: Any) -> inspect.Parameter:
    about = dict(item.metadata)
    if get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    if "choices" in about:
        kind = Literal[tuple(about["choices"])]
    default = inspect.Parameter.empty if item.default is MISSING else item.default
    limits = {"min": about["min"]} if "min" in about else {}
    if about.get("argument"):
        info = typer.Argument(help=about["help"], **limits)
    else:
        names = (about["flag"],) if "flag" in about else about.get("flags", ())
        info = typer.Option(*names, help=about["help"], **limits)
    if isinstance(default, tuple):
        default = list(default)
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


@contextmanager
def errors() -> Iterator[None]:
    """Prints an expected error as one sentence and exits with code 2; without messages of other libraries meanwhile."""
    _silence_libraries()
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def _silence_libraries() -> None:
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
