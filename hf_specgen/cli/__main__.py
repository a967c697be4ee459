"""The commands of `hf-specgen`. PyTorch and Transformers are imported inside commands, so that `--help` is fast."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specgen import __version__
from hf_specgen.cli import settings as options
from hf_specgen.cli.settings import errors

COMMANDS: dict[Any, tuple[str, str]] = {
    options.DemoSettings: ("demo", "demo.show"),
    options.ChatSettings: ("chat", "chat.show"),
    options.GenerateSettings: ("generate", "generate.show"),
    options.DoctorSettings: ("doctor", "doctor.show"),
    options.TuneSettings: ("tune", "doctor.tune"),
    options.FindSettings: ("find", "checkpoints.find"),
    options.TrainSettings: ("train", "train.show"),
}
"""By the options of a command its name, and the function that takes them."""


def run(settings: Any, **_: Any) -> None:
    """Run a command with its options; the exit code is 1 where its function returns False."""
    if settings is not None:
        module, function = COMMANDS[type(settings)][1].split(".")
        with errors():
            succeeded = getattr(import_module(f"hf_specgen.cli.{module}"), function)(settings)
        if succeeded is False:
            raise typer.Exit(1)


app = typer.Typer(no_args_is_help=True, add_completion=False, result_callback=run)
for settings, (name, _) in COMMANDS.items():
    app.command(name, help=inspect.getdoc(settings))(settings)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Speculative decoding for Transformers, with the tokens of plain generate."""
    if version:
        typer.echo(f"hf-specgen {__version__}")
        raise typer.Exit


@app.command()
def export(
    heads: Annotated[str, typer.Argument(help="Hub id or folder of Medusa, EAGLE, P-EAGLE or block heads.")],
    to: Annotated[
        str, typer.Option(help="The program: medusa, tgi or vllm for Medusa heads; eagle, sglang or vllm for others.")
    ],
    output: Annotated[Path, typer.Option(help="Folder to write to.")],
    target: Annotated[str, typer.Option(help="Hub id or folder of the target, for its output matrix (Medusa).")] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of the heads.")] = "",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write heads in the layout that another program reads."""
    with errors():
        from hf_specgen.evaluation.workloads import checkpoint, load
        from hf_specgen.heads import export_head, load_head

        source = checkpoint(heads, revision)
        head = load_head(source.path_or_id, revision=source.revision)
        model = load(checkpoint(target, "", trust_remote_code), "auto")[0] if target else None
        for file in export_head(head, output, to, model):
            typer.echo(file)


PASSED_ON: Any = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""A command whose options are those of another program."""


@app.command(**PASSED_ON)
def serve(context: typer.Context) -> None:
    """Start `transformers serve` for a model that speculates."""
    with errors():
        from hf_specgen.cli.serve import command
    command()(context.args, prog_name="hf-specgen serve")


@app.command("lm-eval", **PASSED_ON)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with a model that speculates; the options are those of the harness."""
    with errors():
        try:
            from hf_specgen.cli import harness

            model = harness.register()
        except ImportError as error:
            if not str(error.name).startswith("lm_eval"):
                raise
            raise ImportError("this needs lm-evaluation-harness: pip install 'lm-eval[hf]'") from None
    harness.run(model, context.args)


if __name__ == "__main__":
    from hf_specgen.cli import main as checked

    checked()
