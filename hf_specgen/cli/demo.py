"""`hf-specgen demo`: plain `generate`, Transformers' prompt lookup and our strategies on the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import (
    Candidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    NgramCandidates,
)
from hf_specgen.cli.settings import DemoSettings
from hf_specgen.evaluation.measure import Total, Variant, interleave
from hf_specgen.evaluation.provenance import provenance
from hf_specgen.evaluation.strategies import head_strategy
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    DRAFT,
    EMBEDDED_ADAPTER,
    EMBEDDED_DFLASH,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE,
    EMBEDDED_HEADS,
    GREEDY,
    NGRAM,
    OURS,
    PEER,
    PLAIN,
    SKIP,
    Difference,
    domain_prompts,
    encode,
    first_difference,
    load,
)
from hf_specgen.heads.exit_head import exit_layer_of

WARM_UP = "Write a function that adds two numbers."


@dataclass
class DomainResult:
    """The totals of every variant in one domain, and the first differences from plain `generate`.

    Args:
        domain: its name.
        totals: by variant.
        exact: whether the verification mode promises the tokens of plain `generate` in this domain.
        differences: (variant, difference), where tokens differ although `exact`.
    """

    domain: str
    totals: dict[str, Total]
    exact: bool = True
    differences: list[tuple[str, Difference]] = field(default_factory=list)


def show(settings: DemoSettings) -> bool:
    """Run the demo and print it.

    Returns:
        False if a token differs in float32.

    Raises:
        OSError, ValueError: for models, prompts or settings that cannot be used.
    """
    console = Console()
    results, example = run_demo(settings, console)
    console.print(table(results))
    console.print("\nOne answer. [black on green]Accepted draft tokens[/]; the others are the target's own.\n")
    console.print(example)
    differences = [(result.domain, *found) for result in results for found in result.differences]
    for domain, name, d in differences:
        console.print(
            f"[yellow]{domain}, {name}: first difference at position {d.position}: plain {d.plain_token} (logit "
            f"{d.plain_logit:.4f}), ours {d.our_token} (logit {d.our_logit:.4f})[/]"
        )
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(to_json(settings, results), indent=2, default=str), encoding="utf-8")
    return not (differences and settings.dtype == "float32")


def run_demo(settings: DemoSettings, console: Console) -> tuple[list[DomainResult], Text]:
    """Run all variants in all domains.

    Returns:
        the results per domain, and one answer with its accepted draft tokens coloured.
    """
    variants = _variants(settings)
    domains = domain_prompts(settings)
    model, tokenizer = load(settings)
    results: list[DomainResult] = []
    _warm_up(model, tokenizer, variants, settings)
    columns = (TextColumn("{task.description:>7}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(len(prompts) for prompts in domains.values()))
        for domain, prompts in domains.items():
            progress.update(task, description=domain)
            generation = {"max_new_tokens": settings.max_new_tokens, **DOMAINS.get(domain, GREEDY)}
            result = DomainResult(domain, {c.name: Total() for c in variants}, _is_exact(settings, generation))
            batches = encode(tokenizer, prompts, settings.batch_size)
            for samples in interleave(model, batches, variants, generation, settings.seed):
                for name, sample in samples.items():
                    result.totals[name].add(sample, samples[PLAIN])
                for name in (name for name in OURS if result.exact and name in samples):
                    if difference := first_difference(model, samples[PLAIN], samples[name]):
                        result.differences.append((name, difference))
                progress.advance(task, len(samples[PLAIN].ids))
            results.append(result)
    return results, coloured_example(tokenizer, results)


def _is_exact(settings: DemoSettings, generation: dict[str, Any]) -> bool:
    greedy = not generation["do_sample"]
    return settings.verification == "exact" or (settings.verification == "rejection" and greedy)


def _variants(settings: DemoSettings) -> list[Variant]:
    draft, adapter, heads = settings.draft, settings.adapter, [settings.heads] if settings.heads else []
    if not settings.model:
        draft, adapter = draft or str(EMBEDDED_DRAFT), adapter or str(EMBEDDED_ADAPTER)
        shipped = (EMBEDDED_HEADS, EMBEDDED_EAGLE, EMBEDDED_DFLASH)
        heads = heads or [str(folder) for folder in shipped if folder.exists()]
    strategies: dict[str, Candidates] = {NGRAM: NgramCandidates(k=settings.k, branches=settings.branches)}
    if draft:
        strategies[DRAFT] = DraftModelCandidates(draft, k=4, dtype=settings.dtype)
    if adapter:
        strategies[SKIP] = LayerSkipCandidates(exit_layer_of(adapter), k=1, adapter=adapter)
    for folder in heads:
        strategy = head_strategy(folder)
        strategies[strategy.name] = strategy.candidates
    ours: Any = partial(dict, verification=settings.verification)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}, batched=False),
        *(Variant(name, partial(ours, candidate_generator=candidates)) for name, candidates in strategies.items()),
    ]


def _warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, variants: Sequence[Variant], settings: DemoSettings
) -> None:
    batches = encode(tokenizer, [WARM_UP] * settings.batch_size, settings.batch_size)
    for _ in interleave(model, batches, variants, {"max_new_tokens": 16}):
        pass


def coloured_example(tokenizer: PreTrainedTokenizerBase, results: Sequence[DomainResult]) -> Text:
    """The n-gram answer with the most tokens per step, its accepted draft tokens on green."""
    samples = [sample for result in results for sample in result.totals[NGRAM].samples]
    best = max(samples, key=lambda sample: sample.speculation.tokens_per_step if sample.speculation else 0)
    assert best.speculation is not None
    text = Text()
    answer = best.ids[0, best.ids.shape[1] - max(best.speculation.lengths) :].tolist()
    for token, accepted in zip(answer, best.speculation.origins(0), strict=False):
        text.append(str(tokenizer.decode([token])), style="black on green" if accepted else "")
    return text


def table(results: Sequence[DomainResult]) -> Table:
    """A row per domain and one over all."""
    names = list(results[0].totals)
    rows = [(result.domain, result.totals, result.exact) for result in results]
    if len(rows) > 1:
        sums = {name: sum((totals[name] for _, totals, _ in rows), Total()) for name in names}
        rows.append(("all", sums, all(exact for *_, exact in rows)))
    view = Table(
        title="tokens per second, and speedup over plain generate",
        title_style="bold",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        leading=1,
    )
    view.add_column("domain", no_wrap=True)
    for name in names:
        view.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    view.add_column("same\ntokens", justify="right", no_wrap=True)
    for domain, totals, exact in rows:
        identical = all(totals[name].identical for name in OURS if name in totals)
        same = ("[green]yes[/]" if identical else "[red]no[/]") if exact else "not\npromised"
        cells = [_cell(totals[name], totals[PLAIN]) for name in names]
        view.add_row(domain, *cells, same, style="bold" if domain == "all" else "")
    view.caption = "last line of a cell: tokens per step, and acceptance rate of draft tokens"
    return view


def _cell(total: Total, plain: Total) -> str:
    if not total.tokens:
        return "one row\nonly"
    lines = [f"{total.tokens_per_second:.0f}"]
    if total is not plain:
        lines.append(f"{total.tokens_per_second / plain.tokens_per_second:.2f}x")
    if total.steps:
        lines.append(f"{total.tokens_per_step:.2f}, {total.acceptance_rate:.0%}")
    return "\n".join(lines)


def to_json(settings: DemoSettings, results: Sequence[DomainResult]) -> dict[str, Any]:
    """All numbers of the table, with their provenance."""
    fields = ("tokens", "seconds", "tokens_per_second", "tokens_per_step", "acceptance_rate", "identical")
    domains = {
        result.domain: {
            "variants": {
                name: {field: getattr(total, field) for field in fields} for name, total in result.totals.items()
            },
            "differences": [{"variant": name, **asdict(difference)} for name, difference in result.differences],
        }
        for result in results
    }
    return {"provenance": provenance(), "settings": asdict(settings), "domains": domains}
