"""What `hf-specgen demo` shows: bars of tokens per second, the conclusion, and one answer with its draft tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_specgen.evaluation.measure import Sample, Total
from hf_specgen.evaluation.workloads import PACKED, PEER, PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_specgen.evaluation.workloads import Difference

BAR = 15
"""Width of the longest bar, in columns of the terminal."""
ACCEPTED = "black on green"
"""Style of accepted draft tokens."""


class Measured(Protocol):
    """What is shown of a target."""

    title: str
    dtype: str
    totals: dict[str, Total]
    prompts: int
    length: int
    answers: int
    differences: list[tuple[str, Difference]]


def comparison(targets: Sequence[Measured], now: str = "") -> RenderableType:
    """A row for each variant, a bar for each target; strategies in increasing order of speed on the last target.

    Args:
        targets: what has been measured so far.
        now: what is being done, for a line below.
    """
    view = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    view.add_column("tokens per second", no_wrap=True)
    for target in targets:
        view.add_column(target.title, no_wrap=True)
    for name in _ordered(targets[-1].totals):
        view.add_row(_name(name), *(_bar(target.totals, name) for target in targets))
    return Group("", view, Text(now, style="dim"))


def closing_lines(targets: Sequence[Measured], widened: bool) -> Iterator[str]:
    """The conclusion: the fastest strategy, whether tokens were the same, what the second target is."""
    for target in targets:
        totals = target.totals
        best = _ordered(totals)[-1]
        if best not in (PLAIN, PEER) and totals[best].tokens:
            speedup = _speedup(totals, best)
            yield (
                f"[bold]{target.title}[/]: {best} is [bold {_colour(speedup)}]{speedup:.2f}x[/] as fast as plain "
                f"generate, with {totals[best].tokens_per_step:.1f} tokens per step, on {target.prompts} "
                f"{'prompt' if target.prompts == 1 else 'prompts'} and up to {target.length} new tokens for each."
            )
    for target in targets:
        yield _same_tokens(target)
    if widened:
        yield (
            f"[dim]{targets[-1].title} computes the function of the small model with wider layers: a latency model of "
            "a larger target. Texts and acceptance are those of the small one, the cost of a step is not.[/]"
        )
        if targets[-1].dtype == "float32":
            yield "[dim]It runs in float32, since this processor has no fast kernels for several tokens in bfloat16.[/]"
    if PACKED in targets[-1].totals:
        yield f"[dim]Ours run with pack_weights=True, which without drafts brings what the row '{PACKED}' shows.[/]"


def one_answer(totals: dict[str, Total], tokenizer: PreTrainedTokenizerBase) -> RenderableType:
    """The answer with the most tokens per step of the fastest strategy, its accepted draft tokens coloured."""
    name = next((name for name in reversed(_ordered(totals)) if _samples(totals[name])), None)
    if name is None:
        return ""
    best = max(_samples(totals[name]), key=lambda sample: sample.speculation.tokens_per_step)  # type: ignore[union-attr]
    title = f"\nOne answer, with {name}. [{ACCEPTED}]Accepted draft tokens[/]; the others are the target's own.\n"
    return Group(Text.from_markup(title), coloured(tokenizer, best), "")


def coloured(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Text:
    """The first row of an answer, its accepted draft tokens coloured."""
    statistics = sample.speculation
    assert statistics is not None
    answer = sample.ids[0, sample.ids.shape[1] - max(statistics.lengths) :].tolist()
    text = Text()
    for token, accepted in zip(answer, statistics.origins(0), strict=False):
        text.append(str(tokenizer.decode([token], skip_special_tokens=True)), style=ACCEPTED if accepted else "")
    return text


def _ordered(totals: dict[str, Total]) -> list[str]:
    """Plain, Transformers' prompt lookup, then our strategies by increasing speed; unmeasured ones as given."""
    ours = [name for name in totals if name not in (PLAIN, PEER)]
    return [PLAIN, PEER, *sorted(ours, key=lambda name: totals[name].tokens_per_second)]


def _name(name: str) -> str:
    return f"[dim]{'HF ' if name == PEER else ''}{name}[/]" if name in (PLAIN, PEER) else name


def _bar(totals: dict[str, Total], name: str) -> Text:
    total = totals.get(name, Total())
    if not total.tokens:
        return Text("one row only" if totals[PLAIN].tokens else "waiting", style="dim")
    fastest = max(one.tokens_per_second for one in totals.values())
    speedup = _speedup(totals, name)
    style = "dim" if name in (PLAIN, PEER) else _colour(speedup)
    bar = "█" * max(1, round(BAR * total.tokens_per_second / fastest))
    text = Text(f"{bar:<{BAR}}", style=style)
    digits = 0 if fastest >= 20 else 1
    text.append(f"{total.tokens_per_second:>6.{digits}f}", style="default")
    text.append("       " if name == PLAIN else f"{speedup:6.2f}x", style="bold" if name not in (PLAIN, PEER) else "")
    return text


def _colour(speedup: float) -> str:
    return "green" if speedup > 1 else "yellow"


def _speedup(totals: dict[str, Total], name: str) -> float:
    """Throughput relative to plain `generate` on the same prompts."""
    plain = totals[PLAIN].tokens_per_second
    return totals[name].tokens_per_second / plain if plain else 0.0


def _same_tokens(target: Measured) -> str:
    if not target.answers:
        return f"{target.title}: this verification does not promise the tokens of plain generate."
    if not target.differences:
        return f"{target.title}: the tokens of all {target.answers} answers are those of plain generate."
    name, d = target.differences[0]
    return (
        f"[yellow]{target.title}: {len(target.differences)} of {target.answers} answers differ from plain generate; "
        f"{name} first at position {d.position}, plain took token {d.plain_token} (logit {d.plain_logit:.4f}) and ours "
        f"{d.our_token} (logit {d.our_logit:.4f}).[/]"
    )


def _samples(total: Total) -> list[Sample]:
    return [sample for sample in total.samples if sample.speculation is not None]
