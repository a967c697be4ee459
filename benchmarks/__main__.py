"""Benchmarks of hf_specgen.

    python -m benchmarks suite                        # every strategy on the bundled model, with a report
    python -m benchmarks suite drafting --quick       # another suite, in about a minute
    python -m benchmarks suite --model M --strategies ngram,draft=D --domains spec-bench --dtype bfloat16
    accelerate launch -m benchmarks suite             # prompts divided among processes
    python -m benchmarks micro ngram-lookup           # single parts
    python -m benchmarks records                      # everything that is recorded, anew
    python -m benchmarks tables benchmarks/results    # recorded results as Markdown
    python -m benchmarks gpu                          # everything that only a GPU can show, in nine minutes
    python -m benchmarks formats --hub                # whether published heads load, without their weights

`suite` writes `report.html`, `report.json`, `plots/` and the single measurements (`records-*.jsonl`) into `--out`.
It exits with 1 if a token differs from plain decoding (in lower precision, if rounding does not explain it), and with
130 if Ctrl-C ended it (`--resume` continues it).
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from typer import Argument, Option

from benchmarks.harness.plan import WIDE, WIDE_FLOAT32, Plan
from hf_specgen.cli.settings import errors

TOKENS_DIFFER, INTERRUPTED = 1, 130
NEEDED = ("datasets", "jinja2", "matplotlib", "yaml")
RESULTS = Path("benchmarks/results")
Quick = Annotated[bool, Option("--quick", help="Little work: no results to quote.")]

COMMANDS = __doc__.replace("    python", "\b\n    python", 1)  # a paragraph that is not wrapped anew

app = typer.Typer(help=COMMANDS, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        app(arguments, prog_name="python -m benchmarks")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@contextmanager
def expected_errors() -> Iterator[None]:
    """Prints an expected error as one sentence, that of a missing library too, and exits with code 2."""
    with errors():
        try:
            yield
        except ImportError as error:
            if error.name not in NEEDED:
                raise
            raise ImportError(f"the benchmarks need {error.name}: pip install 'hf-specgen[bench]'") from None


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of `Plan` as options, which it receives as keywords; None if they are left out."""
    signature = inspect.signature(command, eval_str=True)
    *parameters, _ = signature.parameters.values()
    for field in fields(Plan):
        default, flag = getattr(Plan(), field.name), f"--{field.name.replace('_', '-')}"
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        text = f"{field.metadata['help']} (full suite: {shown or 'empty'})"
        kind: Any = str if isinstance(default, tuple) else type(default)
        option = Annotated[kind | None, Option(flag, help=text, show_default=False)]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        )
    vars(command)["__signature__"] = signature.replace(parameters=parameters)
    return command


@app.command()
@with_plan_options
def suite(
    name: Annotated[
        str, Argument(help="full, domains, published, batches, drafting, heads, memory or projected.")
    ] = "full",
    *,
    wide: Annotated[
        bool,
        Option("--wide", help="The bundled model widened to 300M parameters, in bfloat16, or in float32 on a CPU where "
               "that is faster."),
    ] = False,
    quick: Quick = False,
    resume: Annotated[bool, Option("--resume", help="Continue the interrupted run in --out.")] = False,
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("benchmark-report"),
    **options: Any,
) -> None:  # fmt: skip
    """Acceptance and speed by task domain, with a report."""
    with expected_errors():
        from rich.console import Console

        from benchmarks.harness.runner import run
        from benchmarks.report import page
        from benchmarks.report.results import differing, result, sentence
        from benchmarks.report.tables import show
        from benchmarks.suites import SUITES

        if name not in SUITES:
            raise ValueError(f"unknown suite {name!r}; there are {', '.join(SUITES)}")
        chosen = SUITES[name]
        given = {key: _read(key, value) for key, value in options.items() if value is not None}
        settings = {**_wide(given), **given} if wide else given
        plan = replace(chosen.plan.quick() if quick else chosen.plan, **settings)
        console = Console(stderr=True)
        outcome = run(plan, out, console, resume=resume)
        if outcome is None:
            return
        found = result(outcome, name, chosen.tables)
        written = page.write(found, out)
        if chosen.table in found["tables"]:
            show(console, chosen.table, found["tables"][chosen.table])
        if (advice := sentence(found)) is not None:
            console.print(f"\n{advice}", markup=False, highlight=False)
        for note in outcome.notes:
            console.print(note, style="yellow", markup=False)
        console.print(f"report: {written}", soft_wrap=True)
    if wrong := differing(outcome):
        console.print(f"tokens differ from plain decoding: {', '.join(wrong)}", style="red")
        raise typer.Exit(TOKENS_DIFFER)
    raise typer.Exit(INTERRUPTED if outcome.interrupted else 0)


def _read(field: str, value: Any) -> Any:
    """The value of a field of `Plan`; a tuple is given with commas between its elements."""
    default = getattr(Plan(), field)
    if not isinstance(default, tuple):
        return value
    element = type(default[0])
    try:
        return tuple(element(part.strip()) for part in value.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--{field.replace('_', '-')} needs {element.__name__}s with commas, got {value!r}") from None


def _wide(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of `--wide` on this machine."""
    from benchmarks.harness.wide import fast_dtype
    from hf_specgen.evaluation.workloads import load

    if given.get("device", "cpu") != "cpu" or "dtype" in given:
        return WIDE
    small, _ = load()
    return WIDE_FLOAT32 if fast_dtype(small, WIDE["widen"]) == "float32" else WIDE


@app.command()
def micro(
    names: Annotated[list[str], Argument(help="All short ones that need no GPU, if left out.")] = [],  # noqa: B006
    repeats: Annotated[int, Option(help="Repeats of everything that is timed.")] = 3,
    quick: Quick = False,
    prompt: Annotated[str | None, Option(help="Text to continue in step-operations (a bundled prompt).")] = None,
    max_new_tokens: Annotated[int | None, Option(help="Tokens of a call in step-operations (80).")] = None,
    model: Annotated[str | None, Option(help="Folder of a model in first-call (the bundled one).")] = None,
    out: Annotated[Path | None, Option(help="Folder for one JSON file of each; without it nothing is written.")] = None,
) -> None:
    """Single parts, each with a table."""
    with expected_errors():
        from rich.console import Console

        from benchmarks.harness.provenance import provenance
        from benchmarks.micro import IF_NAMED, MICRO
        from benchmarks.report.tables import show

        if unknown := sorted(set(names) - set(MICRO)):
            raise ValueError(f"unknown measurement {unknown[0]!r}; there are {', '.join(MICRO)}")
        options = {"prompt": prompt, "max_new_tokens": max_new_tokens, "model": model}
        given = {option: value for option, value in options.items() if value is not None}
        takes = {name: inspect.signature(measure).parameters for name, measure in MICRO.items()}
        for option in given:
            if not any(option in takes[name] for name in names):
                takers = ", ".join(name for name in MICRO if option in takes[name])
                raise ValueError(f"--{option.replace('_', '-')} belongs to {takers}; name it, or leave the option out")
        console = Console()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        for name in names or (name for name in MICRO if name not in IF_NAMED):
            begin = perf_counter()
            taken = {option: value for option, value in given.items() if option in takes[name]}
            rows = MICRO[name](1 if quick else repeats, quick, **taken)
            if not rows:
                console.print(f"{name}: not measured; the libraries for it are not installed", markup=False)
                continue
            show(console, name, rows)
            result = {"section": name, "quick": quick, "repeats": repeats, "seconds": perf_counter() - begin}
            if out is not None:
                text = json.dumps({**result, "rows": rows, "provenance": provenance()}, indent=2)
                (out / f"{name}.json").write_text(text, encoding="utf-8")


@app.command()
def records(
    names: Annotated[list[str], Argument(help="All, the most important first, if left out.")] = [],  # noqa: B006
    out: Annotated[Path, Option(help="Folder for the results.")] = RESULTS,
    outdated: Annotated[
        bool,
        Option("--outdated", help="Only list records older than the code; exit code 1 if any."),
    ] = False,
) -> None:
    """Renew recorded results, in a clone without changes, on a quiet machine; all take 60 to 90 minutes."""
    from benchmarks.records import outdated as outdated_records
    from benchmarks.records import renew

    with expected_errors():
        failed = outdated_records(out) if outdated else renew(names, out)
    if outdated:
        print("\n".join(failed) or "every record is of the present code")
    raise typer.Exit(1 if failed else 0)


@app.command()
def gpu(
    names: Annotated[list[str], Argument(help="Stages; all, the most important first, if left out.")] = [],  # noqa: B006
    minutes: Annotated[float, Option(help="Time for all of them.")] = 9.0,
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("gpu-report"),
) -> None:
    """Tests, speed, T(q) of quantised targets and random cases on a GPU; each result is written as it comes."""
    from benchmarks import gpu as stages

    with expected_errors():
        succeeded = stages.run(out, 60 * minutes, names)
    raise typer.Exit(0 if succeeded else 1)


@app.command()
def tables(
    folder: Annotated[Path, Argument(help="Folder with result files.")],
    table: Annotated[str, Option(help="Only this table of the reports.")] = "",
    write: Annotated[
        Path | None, Option(help="A Markdown file; the text between its two markers is replaced.", show_default=False)
    ] = None,
) -> None:
    """Recorded results as Markdown."""
    from benchmarks.report import tables as report

    with expected_errors():
        text = report.collect(folder, table)
        if write is None:
            print(text)
        else:
            report.write(text, write)


@app.command()
def formats(
    names: Annotated[
        list[str], Argument(help="Folders or Hub ids of heads, HEAD or HEAD=TARGET, and of targets with MTP layers.")
    ] = [],  # noqa: B006
    hub: Annotated[
        bool, Option("--hub", help="The published heads of assets/published_heads.json; needs a network.")
    ] = False,
) -> None:
    """Whether heads load, by config.json and the names and shapes of their tensors; a line for each."""
    with expected_errors():
        from benchmarks import formats as heads

        if not names and not hub:
            raise ValueError("name folders or Hub ids of heads, or give --hub for the published ones")
        chosen = {head: target or None for head, _, target in (name.partition("=") for name in names)}
        chosen |= heads.published() if hub else {}
        failed = False
        for head, target in chosen.items():
            row = heads.check(head, target)
            print(row, flush=True)
            failed |= row.result == "fails"
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
