"""The commands of `hf-specgen`. PyTorch and Transformers are imported inside commands, so that `--help` is fast."""

from __future__ import annotations

import typer

from hf_specgen.cli.options import command
from hf_specgen.cli.settings import (
    ChatSettings,
    DemoSettings,
    DoctorSettings,
    ExportSettings,
    GenerateSettings,
    TuneSettings,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Lossless speculative decoding for Transformers.")


@app.callback()
def main() -> None:
    """Lossless speculative decoding for Transformers."""


@command(app, DemoSettings)
def demo(settings: DemoSettings) -> None:
    """Compare plain generate and every strategy on two targets, live, in about a minute.

    Exit code 1 if a token differs in float32.
    """
    from hf_specgen.cli.demo import show

    if not show(settings):
        raise typer.Exit(1)


@command(app, ChatSettings)
def chat(settings: ChatSettings) -> None:
    """Chat with a model; accepted draft tokens are coloured. /strategy and /plain compare."""
    from hf_specgen.cli.chat import show

    show(settings)


@command(app, GenerateSettings)
def generate(settings: GenerateSettings) -> None:
    """Answer the prompts of a file or dataset: batched by length, resumable, sharded by `accelerate launch`."""
    from hf_specgen.cli.generate import show

    show(settings)


@command(app, TuneSettings)
def tune(settings: TuneSettings) -> None:
    """Measure latencies on this machine and store them as the profiles by which draft depths are chosen.

    For Medusa heads with --output, also measure their acceptance on a dataset and save it with them.
    """
    from hf_specgen.cli.tune import show

    show(settings)


@command(app, ExportSettings)
def export(settings: ExportSettings) -> None:
    """Write heads in the layout that another program reads."""
    from hf_specgen.cli.export import export_heads

    for file in export_heads(settings):
        typer.echo(file)


@command(app, DoctorSettings)
def doctor(settings: DoctorSettings) -> None:
    """Check whether speculation works and is faster here, and recommend a strategy.

    Exit code 1 if a problem has to be solved first.
    """
    from hf_specgen.cli.doctor import show

    if not show(settings):
        raise typer.Exit(1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure acceptance and speed by task domain: `python -m benchmarks suite` in a clone; see `bench --help`."""
    from hf_specgen.cli.bench import run

    run(context.args)
