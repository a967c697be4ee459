"""`hf-specgen lm-eval`: lm-evaluation-harness with a model `hf-specgen`, the model `hf` with a strategy attached."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from hf_specgen.attachment import attach, statistics
from hf_specgen.evaluation.workloads import chosen_strategy

NAME = "hf-specgen"
OTHER_COMMANDS = ("ls", "validate")
"""Commands of the harness that evaluate nothing."""


def register() -> type:
    """Add the model to the registry of the harness, if it is not there; returns its class.

    It takes the arguments of `hf`, `draft`: an id or folder of what drafts, several joined by "+", and
    `history`: a file of earlier answers.
    """
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.huggingface import HFLM

    if NAME in model_registry:
        return cast(type, model_registry.get(NAME))

    class SpeculatingLM(HFLM):
        """A model of Transformers with a strategy attached: with the same answers, in less time."""

        running: Any = None

        def __init__(self, *args: Any, draft: str = "", history: str = "", **kwargs: Any):
            super().__init__(*args, **kwargs)
            drafts = draft.split("+") if draft else []
            trusted = bool(kwargs.get("trust_remote_code"))
            options = {"tokenizer": self.tokenizer, "trust_remote_code": trusted}
            strategy = chosen_strategy(drafts, with_history=bool(history), **options)
            SpeculatingLM.running = attach(self.model, strategy, history=history or None)

    register_model(NAME)(SpeculatingLM)
    return SpeculatingLM


def run(speculating: Any, arguments: Sequence[str]) -> None:
    """Run the harness with arguments of its own command line, by default for the model `hf-specgen`.

    Args:
        speculating: what `register` returned.
    """
    from lm_eval.__main__ import cli_evaluate

    names_model = any(word.split("=")[0] in ("--model", "-M") for word in arguments)
    default = [] if names_model or arguments[:1] in [[name] for name in OTHER_COMMANDS] else ["--model", NAME]
    sys.argv = ["lm-eval", *arguments, *default]
    cli_evaluate()
    if speculating.running is not None:
        typer.echo(statistics(speculating.running).summary())
