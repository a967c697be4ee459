"""The main job: plain `generate`, Transformers' prompt lookup and ours on the same prompts, side by side."""

from __future__ import annotations

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
    MedusaCandidates,
    NgramCandidates,
)
from hf_specgen.evaluation.measure import Total, Variant, interleave
from hf_specgen.evaluation.provenance import provenance
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    DRAFT,
    EMBEDDED_ADAPTER,
    EMBEDDED_DRAFT,
    EMBEDDED_HEADS,
    GREEDY,
    MEDUSA,
    NGRAM,
    OURS,
    PEER,
    PLAIN,
    SKIP,
    Difference,
    WorkloadSettings,
    domain_prompts,
    encode,
    first_difference,
    load,
)
from hf_specgen.heads.exit_head import exit_layer_of


@dataclass
class DomainResult:
    """The totals of every variant in one domain, and where texts differed."""

    domain: str
    totals: dict[str, Total]
    differences: list[tuple[str, Difference]] = field(default_factory=list)


def run_demo(settings: WorkloadSettings, console: Console) -> tuple[list[DomainResult], Text]:
    """Run all variants over all domains.

    Returns:
        the results per domain, and one text in colour by the origin of its tokens.
    """
    model, tokenizer = load(settings)
    domains = domain_prompts(settings)
    variants = _variants(settings)
    results: list[DomainResult] = []
    _warm_up(model, tokenizer, variants, settings)
    columns = (TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(len(prompts) for prompts in domains.values()))
        for domain, prompts in domains.items():
            progress.update(task, description=domain)
            result = DomainResult(domain, {c.name: Total() for c in variants})
            generation = {"max_new_tokens": settings.max_new_tokens, **DOMAINS.get(domain, GREEDY)}
            batches = encode(tokenizer, prompts, settings.batch_size)
            for samples in interleave(model, batches, variants, generation, settings.seed):
                for name, sample in samples.items():
                    result.totals[name].add(sample, samples[PLAIN])
                for name in (name for name in OURS if name in samples):
                    if difference := first_difference(model, samples[PLAIN], samples[name]):
                        result.differences.append((name, difference))
                progress.advance(task, len(samples[PLAIN].ids))
            results.append(result)
    return results, coloured_example(tokenizer, results)


def _variants(settings: WorkloadSettings) -> list[Variant]:
    strategies: dict[str, Candidates] = {NGRAM: NgramCandidates(k=settings.k, branches=settings.branches)}
    draft, adapter, heads = settings.draft, settings.adapter, settings.heads
    if not settings.model:
        draft, adapter = draft or str(EMBEDDED_DRAFT), adapter or str(EMBEDDED_ADAPTER)
        heads = heads or str(EMBEDDED_HEADS)
    if draft:
        strategies[DRAFT] = DraftModelCandidates(draft, k=4, dtype=settings.dtype)
    if adapter:
        strategies[SKIP] = LayerSkipCandidates(exit_layer_of(adapter), k=1, adapter=adapter)
    if heads:
        strategies[MEDUSA] = MedusaCandidates(heads)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}, batched=False),
        *(Variant(name, partial(dict, candidate_generator=strategy)) for name, strategy in strategies.items()),
    ]


def _warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    variants: Sequence[Variant],
    settings: WorkloadSettings,
) -> None:
    batches = encode(tokenizer, ["Warm up."] * settings.batch_size, settings.batch_size)
    for _ in interleave(model, batches, variants, {"max_new_tokens": 16}):
        pass


def coloured_example(tokenizer: PreTrainedTokenizerBase, results: Sequence[DomainResult]) -> Text:
    """The output with the highest share of accepted guesses; guessed tokens green, the target's own as they are."""
    samples = [sample for result in results for sample in result.totals[NGRAM].samples]
    best = max(samples, key=lambda sample: sample.speculation.tokens_per_step if sample.speculation else 0)
    assert best.speculation is not None
    origins = best.speculation.origins(0)
    text = Text()
    shown = best.ids[0, best.ids.shape[1] - max(best.speculation.lengths) :].tolist()
    for token, guessed in zip(shown, origins, strict=False):
        text.append(str(tokenizer.decode([token])), style="black on green" if guessed else "")
    return text


def table(results: Sequence[DomainResult]) -> Table:
    """A row per domain and one over all."""
    names = list(results[0].totals)
    rows = [(result.domain, result.totals) for result in results]
    if len(rows) > 1:
        rows.append(("all", {name: sum((totals[name] for _, totals in rows), Total()) for name in names}))
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
    for domain, totals in rows:
        identical = all(totals[name].identical for name in OURS if name in totals)
        cells = [_cell(totals[name], totals[PLAIN]) for name in names]
        verdict = "[green]yes[/]" if identical else "[red]no[/]"
        view.add_row(domain, *cells, verdict, style="bold" if domain == "all" else "")
    view.caption = "last line of a cell: tokens per step, and the share of guesses that were accepted"
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


def to_json(settings: WorkloadSettings, results: Sequence[DomainResult]) -> dict[str, Any]:
    """Everything that the table shows, with its provenance."""
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
