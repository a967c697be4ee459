"""Acceptance and speed per task domain, ours against plain `generate` and Transformers' own.

    python benchmarks/run.py                          # the embedded model; under 10 minutes on two cores
    python benchmarks/run.py --quick                  # a look, about a minute
    accelerate launch benchmarks/run.py               # prompts sharded over processes
    python benchmarks/run.py --model M --strategies ngram,draft=D --domains spec-bench,gsm8k --dtype bfloat16

Writes `report.html`, `report.json`, `plots/` and the single measurements (`records-*.jsonl`) into `--out`. Exit code 1
if a token of ours differs from plain decoding in float32, 130 if Ctrl-C ended it early (`--resume` goes on).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

if __name__ == "__main__":  # a script's own folder is where Python looks first, and it is not where `benchmarks` is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.plan import Plan

DEFAULT = Plan()
INTERRUPTED = 130  # what a shell gives for a command that Ctrl-C ended
NEEDED = ("datasets", "evaluate", "matplotlib", "yaml")


def _names(values: tuple) -> str:
    return ",".join(map(str, values))


def main(
    model: Annotated[str, typer.Option(help="Hub id or folder; the embedded model if left out.")] = "",
    strategies: Annotated[
        str, typer.Option(help="ngram, draft=MODEL, layerskip=ADAPTER, medusa=HEADS; with commas between.")
    ] = _names(DEFAULT.strategies),
    domains: Annotated[str, typer.Option(help="Domains or sets of benchmarks/domains.yaml.")] = _names(DEFAULT.domains),
    peers: Annotated[str, typer.Option(help="transformers, or empty for none.")] = _names(DEFAULT.peers),
    prompts: Annotated[int, typer.Option(help="Measured prompts per domain.")] = DEFAULT.prompts,
    tuning_prompts: Annotated[
        int, typer.Option(help="Further prompts, from the domains in turn, to choose settings on.")
    ] = DEFAULT.tuning_prompts,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = DEFAULT.max_new_tokens,
    repeats: Annotated[int, typer.Option(help="Runs of every domain.")] = DEFAULT.repeats,
    sweep_prompts: Annotated[int, typer.Option(help="Prompts at each point of a sweep.")] = DEFAULT.sweep_prompts,
    batches: Annotated[str, typer.Option(help="Batch sizes to sweep; empty for none.")] = _names(DEFAULT.batches),
    temperatures: Annotated[str, typer.Option(help="Temperatures to sweep.")] = _names(DEFAULT.temperatures),
    contexts: Annotated[str, typer.Option(help="Context lengths to sweep.")] = _names(DEFAULT.contexts),
    traces: Annotated[int, typer.Option(help="Recorded texts to replay; 0 for none.")] = DEFAULT.trace_texts,
    seed: Annotated[int, typer.Option(help="Seed of the sampled domains.")] = DEFAULT.seed,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = DEFAULT.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = DEFAULT.device,
    widen: Annotated[int, typer.Option(help="Measure the same function with so many parameters.")] = DEFAULT.widen,
    quick: Annotated[bool, typer.Option("--quick", help="Little of everything: a look, no figures to quote.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in --out.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmark-report"),
) -> None:
    """Measure acceptance and speed per task domain; write a report."""
    console = Console(stderr=True)
    try:
        plan = Plan(
            model=model,
            strategies=tuple(_split(strategies)),
            peers=tuple(_split(peers)),
            domains=tuple(_split(domains)),
            prompts=prompts,
            tuning_prompts=tuning_prompts,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            sweep_prompts=sweep_prompts,
            batches=tuple(map(int, _split(batches))),
            temperatures=tuple(map(float, _split(temperatures))),
            contexts=tuple(map(int, _split(contexts))),
            trace_texts=traces,
            seed=seed,
            dtype=dtype,
            device=device,
            widen=widen,
        )
        _measure(plan.quick() if quick else plan, out, resume, console)
    except ImportError as error:
        if error.name not in NEEDED:
            raise
        console.print(f"[red]error:[/] the benchmark needs {error.name}: pip install 'hf-specgen\\[bench]'")
        raise typer.Exit(2) from None
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}", markup=True)
        raise typer.Exit(2) from None


def _measure(plan: Plan, out: Path, resume: bool, console: Console) -> None:
    from benchmarks import report
    from benchmarks.core import table
    from benchmarks.results import differing, result
    from benchmarks.runner import run

    outcome = run(plan, out, console, resume=resume)
    if outcome is None:
        return
    found = result(outcome)
    page = report.write(found, out)
    for name in ("speed", "acceptance", "limits", "batch"):
        if name in found["tables"]:
            console.print(table(name, found["tables"][name]))
    for note in outcome.notes:
        console.print(f"[yellow]{note}[/]")
    console.print(f"report: {page}")
    if (wrong := differing(outcome)) and plan.dtype == "float32":
        console.print(f"[red]tokens differ from plain decoding: {', '.join(wrong)}[/]")
        raise typer.Exit(1)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
