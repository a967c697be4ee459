"""Command line of the benchmarks.

    python -m benchmarks suite                        # every strategy on the bundled model, with a report
    python -m benchmarks suite drafting --quick       # another suite, in about a minute
    python -m benchmarks suite --model M --strategies ngram,draft=D --domains spec-bench --dtype bfloat16
    accelerate launch -m benchmarks suite             # prompts divided among processes
    python -m benchmarks micro ngram-lookup           # single parts
    python -m benchmarks tables benchmarks/results    # recorded results as Markdown

`suite` writes `report.html`, `report.json`, `plots/` and the single measurements (`records-*.jsonl`) into `--out`.
It exits with 1 if a token differs from plain decoding (in lower precision, if rounding does not explain it), and with
130 if Ctrl-C ended it (`--resume` continues it).
"""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness.plan import WIDE, WIDE_FLOAT32, Plan

TOKENS_DIFFER, BAD_INPUT, INTERRUPTED = 1, 2, 130
NEEDED = ("datasets", "jinja2", "matplotlib", "yaml")
RESULTS = Path("benchmarks/results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ImportError as error:
        if error.name not in NEEDED:
            raise
        print(f"error: the benchmarks need {error.name}: pip install 'hf-specgen[bench]'", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def make_parser() -> ArgumentParser:
    """The parser of all commands; the options of `suite` are the fields of `Plan`."""
    parser = ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    suite = commands.add_parser("suite", help="acceptance and speed by task domain, with a report")
    suite.set_defaults(run=run_suite)
    suite.add_argument(
        "name", nargs="?", default="full", help="full, domains, batches, drafting, heads, memory or projected"
    )
    for field in fields(Plan):
        default = getattr(Plan(), field.name)
        flag = f"--{field.name.replace('_', '-')}"
        shown = f"{field.metadata['help']} (full suite: {_shown(default) or 'empty'})"
        if isinstance(default, bool):
            suite.add_argument(flag, action="store_true", default=SUPPRESS, help=field.metadata["help"])
        else:
            suite.add_argument(flag, type=_reader(default), default=SUPPRESS, help=shown, metavar="VALUE")
    suite.add_argument(
        "--wide",
        action="store_true",
        help="the bundled model widened to 300M parameters, in bfloat16, or in float32 on a CPU where that is faster",
    )
    suite.add_argument("--quick", action="store_true", help="little work: no results to quote")
    suite.add_argument("--resume", action="store_true", help="continue the interrupted run in --out")
    suite.add_argument("--out", type=Path, default=Path("benchmark-report"), help="folder for the results")
    micro = commands.add_parser("micro", help="single parts, each with a table")
    micro.set_defaults(run=run_micro)
    micro.add_argument("names", nargs="*", help="all short ones that need no GPU if left out")
    micro.add_argument("--repeats", type=int, default=3, help="repeats of everything that is timed")
    micro.add_argument("--quick", action="store_true", help="little work: no results to quote")
    micro.add_argument("--prompt", help="text to continue in step-operations (a bundled prompt)")
    micro.add_argument("--max-new-tokens", type=int, help="tokens of a call in step-operations (80)")
    micro.add_argument("--out", type=Path, default=RESULTS, help="folder for one JSON file of each")
    tables = commands.add_parser("tables", help="recorded results as Markdown")
    tables.set_defaults(run=run_tables)
    tables.add_argument("folder", type=Path, help="folder with result files")
    tables.add_argument("--table", default="", help="only this table of the reports")
    tables.add_argument("--write", type=Path, help="a Markdown file; the text between its two markers is replaced")
    return parser


def run_suite(options: Namespace) -> int:
    """Run a suite and write its report."""
    from rich.console import Console

    from benchmarks.harness.runner import run
    from benchmarks.report import page
    from benchmarks.report.results import differing, result, sentence
    from benchmarks.report.tables import show
    from benchmarks.suites import SUITES

    if options.name not in SUITES:
        raise ValueError(f"unknown suite {options.name!r}; there are {', '.join(SUITES)}")
    suite = SUITES[options.name]
    given = {field.name: getattr(options, field.name) for field in fields(Plan) if hasattr(options, field.name)}
    wide = _wide(given) if options.wide else {}
    plan = replace(suite.plan.quick() if options.quick else suite.plan, **{**wide, **given})
    console = Console(stderr=True)
    outcome = run(plan, options.out, console, resume=options.resume)
    if outcome is None:
        return 0
    found = result(outcome, options.name, suite.tables)
    written = page.write(found, options.out)
    if suite.table in found["tables"]:
        show(console, suite.table, found["tables"][suite.table])
    if (advice := sentence(found)) is not None:
        console.print(f"\n{advice}", markup=False, highlight=False)
    for note in outcome.notes:
        console.print(note, style="yellow", markup=False)
    console.print(f"report: {written}", soft_wrap=True)
    if wrong := differing(outcome):
        console.print(f"tokens differ from plain decoding: {', '.join(wrong)}", style="red")
        return TOKENS_DIFFER
    return INTERRUPTED if outcome.interrupted else 0


def _wide(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of `--wide` on this machine."""
    from hf_specgen.evaluation.cost import fast_dtype
    from hf_specgen.evaluation.workloads import load

    if given.get("device", "cpu") != "cpu" or {"dtype", "resume"} & set(given):
        return WIDE
    small, _ = load()
    return WIDE_FLOAT32 if fast_dtype(small, WIDE["widen"]) == "float32" else WIDE


def run_micro(options: Namespace) -> int:
    """Measure single parts, one result file each."""
    from rich.console import Console

    from benchmarks.harness.provenance import provenance
    from benchmarks.micro import IF_NAMED, MICRO, WITH_PROMPT
    from benchmarks.report.tables import show

    if unknown := sorted(set(options.names) - set(MICRO)):
        raise ValueError(f"unknown measurement {unknown[0]!r}; there are {', '.join(MICRO)}")
    given = {name: getattr(options, name) for name in ("prompt", "max_new_tokens")}
    settings = {name: value for name, value in given.items() if value is not None}
    if settings and not set(options.names) & set(WITH_PROMPT):
        raise ValueError(
            f"--prompt and --max-new-tokens belong to {', '.join(WITH_PROMPT)}; name it, or leave them out"
        )
    console, repeats = Console(), 1 if options.quick else options.repeats
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or (name for name in MICRO if name not in IF_NAMED):
        begin = perf_counter()
        rows = MICRO[name](repeats, options.quick, **(settings if name in WITH_PROMPT else {}))
        if not rows:
            console.print(f"{name}: nothing written; the libraries that it measures are not installed", markup=False)
            continue
        show(console, name, rows)
        result = {
            "section": name,
            "quick": options.quick,
            "repeats": options.repeats,
            "seconds": perf_counter() - begin,
        }
        text = json.dumps({**result, "rows": rows, "provenance": provenance()}, indent=2)
        (options.out / f"{name}.json").write_text(text, encoding="utf-8")
    return 0


def run_tables(options: Namespace) -> int:
    """Print recorded results, or write them into a file."""
    from benchmarks.report.tables import collect, write

    text = collect(options.folder, options.table)
    if options.write is None:
        print(text)
    else:
        write(text, options.write)
    return 0


def _reader(default: Any) -> Callable[[str], Any]:
    """Reads an option of the type of its default; the element type of an empty tuple does not occur."""
    if not isinstance(default, tuple):
        return type(default)
    element = type(default[0])

    def read(text: str) -> tuple[Any, ...]:
        return tuple(element(part.strip()) for part in text.split(",") if part.strip())

    read.__name__ = f"list of {element.__name__}"  # for the error message of argparse
    return read


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


if __name__ == "__main__":
    sys.exit(main())
