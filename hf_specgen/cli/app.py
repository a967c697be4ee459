"""The commands of `hf-specgen`. PyTorch and Transformers are imported inside commands, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specgen.cli import settings as options
from hf_specgen.cli.settings import command, errors
from hf_specgen.version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Lossless speculative decoding for Transformers.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-specgen {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding for Transformers."""


command(app, "demo", options.DemoSettings)
command(app, "chat", options.ChatSettings)
command(app, "generate", options.GenerateSettings)
command(app, "tune", options.TuneSettings)
command(app, "doctor", options.DoctorSettings)
command(app, "find", options.FindSettings)


@app.command()
def export(
    heads: Annotated[str, typer.Argument(help="Hub id or folder of heads: Medusa, EAGLE, P-EAGLE, DFlash.")],
    to: Annotated[str, typer.Option(help="The program: medusa, tgi or vllm; for others eagle, sglang or vllm.")],
    output: Annotated[Path, typer.Option(help="Folder to write to.")],
    target: Annotated[str, typer.Option(help="Hub id or folder of the target, for its output matrix (Medusa).")] = "",
) -> None:
    """Write heads in the layout that another program reads."""
    with errors():
        from transformers import AutoModelForCausalLM

        from hf_specgen.heads import load_medusa
        from hf_specgen.heads.checkpoint import Source, source_errors
        from hf_specgen.heads.export import export_head
        from hf_specgen.heads.head_formats import load_head
        from hf_specgen.heads.medusa_formats import export_medusa, holds_medusa

        if holds_medusa(Source(heads)):
            with source_errors(target):
                model = AutoModelForCausalLM.from_pretrained(target, dtype="auto") if target else None
            files = export_medusa(load_medusa(heads, model), output, to, model)
        else:
            files = export_head(load_head(heads), output, to)
        for file in files:
            typer.echo(file)
