"""The command line: `hf-specgen demo | doctor | bench | tune | export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Lossless speculative decoding for Transformers.")


@app.callback()
def main() -> None:
    """Lossless speculative decoding for Transformers."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="Hub id or folder; the embedded model if left out.")] = "",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    k: Annotated[int, typer.Option(help="Greatest draft length in tokens.")] = 16,
    branches: Annotated[int, typer.Option(help="Continuations verified at once, as a tree.")] = 1,
    draft: Annotated[str, typer.Option(help="Hub id or folder of a draft model for it.")] = "",
    adapter: Annotated[str, typer.Option(help="Hub id or folder of an exit adapter for it.")] = "",
    heads: Annotated[str, typer.Option(help="Hub id or folder of Medusa heads for it.")] = "",
    batch_size: Annotated[int, typer.Option(help="Prompts per generate call.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")] = "cpu",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    prompts: Annotated[int, typer.Option(help="Prompts per domain.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the sampled domains.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Compare plain generate, Transformers' prompt lookup and our strategies on the same prompts.

    Exit code 1 if a token differs in float32.
    """
    from hf_specgen.cli import demo as demonstration
    from hf_specgen.evaluation.workloads import WorkloadSettings

    console = Console()
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    for name, value in (("--batch-size", batch_size), ("--prompts", prompts), ("--max-new-tokens", max_new_tokens)):
        if value < 1:
            raise typer.BadParameter(f"{name} must be at least 1, got {value}")
    settings = WorkloadSettings(
        model=model,
        prompts=tuple(prompt or ()),
        k=k,
        branches=branches,
        draft=draft,
        adapter=adapter,
        heads=heads,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        max_new_tokens=max_new_tokens,
        prompts_per_domain=prompts,
        seed=seed,
    )
    try:
        results, example = demonstration.run_demo(settings, console)
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from None
    console.print(demonstration.table(results))
    console.print("\nOne answer. [black on green]Guessed and accepted[/] tokens; the others are the target's own.\n")
    console.print(example)
    differences = [(result.domain, *found) for result in results for found in result.differences]
    for domain, name, d in differences:
        console.print(
            f"[yellow]{domain}, {name}: first difference at position {d.position}: plain {d.plain_token} (logit "
            f"{d.plain_logit:.4f}), ours {d.our_token} (logit {d.our_logit:.4f})[/]"
        )
    if json_file is not None:
        json_file.write_text(json.dumps(demonstration.to_json(settings, results), indent=2))
    if differences and dtype == "float32":
        raise typer.Exit(1)


@app.command()
def tune(
    heads: Annotated[str, typer.Argument(help="Folder or Hub id of Medusa heads.")],
    target: Annotated[str, typer.Option(help="Hub id or folder of the model that they draft for.")],
    output: Annotated[Path, typer.Option(help="Folder to write the tuned heads to; may be the heads' own.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL rows {domain, prompt}; the embedded ones if left out.")
    ] = None,
    prompts_per_domain: Annotated[int, typer.Option(help="How many of each domain to generate from.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")] = "cpu",
) -> None:
    """Measure acceptance on a dataset and the target's cost on this machine, and save both with the heads.

    `MedusaCandidates(tree="auto")` then verifies, at each step, the tree that promises most tokens per second.
    """
    from hf_specgen.cli import tune as tuning

    console = Console()
    settings = tuning.TuneSettings(heads, target, output, prompts, prompts_per_domain, max_new_tokens, dtype, device)
    try:
        console.print(tuning.run(settings, console))
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from None


@app.command()
def export(
    heads: Annotated[str, typer.Argument(help="Folder or Hub id of Medusa heads.")],
    to: Annotated[str, typer.Option(help="medusa, tgi or vllm.")],
    output: Annotated[Path, typer.Option(help="Folder to write to.")],
    target: Annotated[str, typer.Option(help="The model that they draft for, where its matrix is needed.")] = "",
) -> None:
    """Write Medusa heads in the format of another program."""
    from transformers import AutoModelForCausalLM

    from hf_specgen.heads import load_medusa
    from hf_specgen.heads.export import export_medusa

    console = Console()
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto") if target else None
        for file in export_medusa(load_medusa(heads, model), output, to, model):
            console.print(str(file))
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from None


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure acceptance and speed by task domain: `python -m benchmarks suite` in a clone; see `bench --help`."""
    from hf_specgen.cli.bench import run

    run(context.args)


@app.command()
def doctor(
    model: Annotated[str, typer.Option(help="Hub id or folder of the target.")],
    draft: Annotated[str, typer.Option(help="Hub id or folder of a draft model.")] = "",
    heads: Annotated[str, typer.Option(help="Hub id or folder of Medusa heads.")] = "",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt like yours; may be given several times.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts per generate call.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per row, prompt included, that must fit into memory.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer of the quick run.")] = 96,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")] = "cpu",
    run: Annotated[bool, typer.Option(help="Measure; without it nothing is loaded.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether speculation works and pays here, and recommend a setting.

    Exit code 1 if something has to be settled first.
    """
    from hf_specgen.cli.doctor import DoctorSettings, examine
    from hf_specgen.cli.doctor.examine import exit_code

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    for name, value in (("--batch-size", batch_size), ("--length", length), ("--max-new-tokens", max_new_tokens)):
        if value < 1:
            raise typer.BadParameter(f"{name} must be at least 1, got {value}")
    if temperature < 0:
        raise typer.BadParameter(f"--temperature must be at least 0, got {temperature}")
    console = Console()
    settings = DoctorSettings(
        model, draft, heads, tuple(prompt or ()), batch_size, length, temperature, max_new_tokens, dtype, device, run
    )
    try:
        report = examine(settings)
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console.print(report.table())
        if report.recommendation:
            console.print(f"[bold]{report.recommendation}[/]", highlight=False)
        console.print(report.reason)
    raise typer.Exit(exit_code(report))
