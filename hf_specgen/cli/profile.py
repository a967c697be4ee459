"""`hf-specgen profile`: tables of the latency profiles in the cache directory."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table

from hf_specgen.depth import profiles
from hf_specgen.depth.latency import LatencyModel, Slice

SHOWN_TOKENS = (2, 4, 8, 16, 32)


def show_all() -> None:
    """Print a line for each profile."""
    console, found = Console(), profiles.list_profiles()
    if not found:
        console.print(
            f'no latency profiles in {profiles.directory()}; calls with k="auto" and `hf-specgen tune` make them'
        )
        return
    view = Table(box=SIMPLE, pad_edge=False, title=f"latency profiles in {profiles.directory()}", title_justify="left")
    for column in ("key", "target", "dtype", "tokens", "slices"):
        view.add_column(column, overflow="fold")
    for key, latency in found.items():
        about = latency.description
        kind = "sampled" if about.get("samples") else "greedy"
        target = f"{_count(about.get('parameters'))} {_devices(about)}"
        view.add_row(key, target, str(about.get("dtype")).removeprefix("torch."), kind, str(len(latency.slices)))
    console.print(view)


def show_one(key: str) -> None:
    """Print what a profile depends on, and its latencies.

    Raises:
        ValueError: if there is no such profile.
    """
    latency = profiles.load(key)
    if latency is None:
        raise ValueError(
            f"there is no readable profile {key!r} in {profiles.directory()}; see `hf-specgen profile list`"
        )
    Console().print(Group(_description(latency), latency_table(latency)))


def latency_table(latency: LatencyModel) -> Table:
    """Latencies relative to a plain step, a row for each slice."""
    view = Table(box=SIMPLE, pad_edge=False, title="latency in plain steps", title_style="bold", title_justify="left")
    for name in ("rows", "context", "plain step"):
        view.add_column(name, justify="right")
    for tokens in SHOWN_TOKENS:
        view.add_column(f"T({tokens})", justify="right")
    view.add_column("draft\npass", justify="right")
    view.add_column("empty\ndraft", justify="right")
    for one in latency.slices:
        view.add_row(*_row(one, latency.drafter))
    return view


def _row(one: Slice, kind: str) -> list[str]:
    curve = one.target
    drafter = one.drafters.get(kind) or next(iter(one.drafters.values()))
    cells = [str(curve.batch), str(curve.context), f"{1000 * curve(1):.1f} ms"]
    cells += [f"{curve.relative(tokens):.2f}" for tokens in SHOWN_TOKENS]
    one_pass = float(drafter.by_tokens(curve.batch)) / curve(1)
    return [*cells, f"{one_pass:.2f}", f"{drafter.overhead / curve(1):.2f}"]


def _description(latency: LatencyModel) -> Table:
    view = Table(box=SIMPLE, pad_edge=False, show_header=False)
    view.add_column(style="bold")
    view.add_column(overflow="fold")
    for name, value in latency.description.items():
        view.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    return view


def _devices(about: dict[str, Any] | Any) -> str:
    return ", ".join(str(device).partition(":")[0] for device in about.get("devices", ()))


def _count(parameters: Any) -> str:
    return f"{parameters / 1e6:.0f}M" if isinstance(parameters, int | float) else "?"
