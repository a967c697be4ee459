"""`hf-specgen tune`: load, measure, save, and a table of what was found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from hf_specgen.candidates.tree_shape import MAX_NODES
from hf_specgen.evaluation.calibration import Counts, measure_acceptance, measure_cost, save_tuning
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.evaluation.workloads import DOMAINS, EMBEDDED_PROMPTS, GREEDY, WorkloadSettings, encode, load
from hf_specgen.heads.acceptance import best_tree
from hf_specgen.heads.compatibility import other_chat_template
from hf_specgen.heads.formats import load_medusa
from hf_specgen.heads.lora import copy_lora

SHOWN_RANKS = 5


@dataclass(frozen=True)
class TuneSettings:
    """Every field is an option of `hf-specgen tune`."""

    heads: str
    target: str
    output: Path
    prompts: Path | None = None
    prompts_per_domain: int = 10
    max_new_tokens: int = 128
    dtype: str = "float32"
    device: str = "cpu"


def run(settings: TuneSettings, console: Console) -> RenderableType:
    """Measure, save the tuned heads, and return what to show.

    Raises:
        FileNotFoundError: if the prompts are not there.
        ValueError: for prompts that are no rows {prompt}, or heads of another target.
    """
    rows = read_prompts(settings.prompts or EMBEDDED_PROMPTS, settings.prompts_per_domain)
    model, tokenizer = load(WorkloadSettings(model=settings.target, dtype=settings.dtype, device=settings.device))
    heads = load_medusa(settings.heads, model)
    if warning := other_chat_template(heads.config.base, tokenizer):
        console.print(f"[yellow]{warning}[/]")
    console.print("timing the target's forward pass …")
    cost = measure_cost(model)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        calls = progress.track(list(_calls(rows, tokenizer, settings, model.device)))
        counts = measure_acceptance(model, heads, calls)
    tuned = load_medusa(settings.heads, model)  # in the dtype of its file; the other set has taken the target's
    save_tuning(tuned, counts, cost)
    tuned.save_pretrained(settings.output)
    if tuned.config.lora_rank:
        copy_lora(settings.heads, settings.output)
    return _report(counts, cost, settings.output)


def read_prompts(path: Path, per_domain: int) -> list[tuple[str, str]]:
    """The first prompts of each domain, as pairs (domain, prompt)."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; give JSONL rows {{domain, prompt}} with --prompts")
    chosen: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            domain, prompt = str(row.get("domain", "")), str(row["prompt"])
        except (json.JSONDecodeError, KeyError, AttributeError):
            raise ValueError(f"{path}, line {number}: expected a JSON object with the key prompt") from None
        if len(chosen.setdefault(domain, [])) < per_domain:
            chosen[domain].append(prompt)
    if not chosen:
        raise ValueError(f"{path} has no prompts; give JSONL rows {{domain, prompt}}")
    return [(domain, prompt) for domain, prompts in chosen.items() for prompt in prompts]


def _calls(
    rows: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, settings: TuneSettings, device: Any
) -> Iterator[dict[str, Any]]:
    for domain, prompt in rows:
        inputs = next(encode(tokenizer, [prompt], 1))
        yield {
            **{name: tensor.to(device) for name, tensor in inputs.items()},
            "max_new_tokens": settings.max_new_tokens,
            **DOMAINS.get(domain, GREEDY),
        }


def _report(counts: Counts, cost: CostCurve, output: Path) -> RenderableType:
    """How often each rank was right, and what T(q) makes of it where all heads are as sure as they are on average."""
    by_rank = counts.by_rank()
    view = Table(title="how often each guess was right", title_style="bold")
    view.add_column("head")
    for rank in range(SHOWN_RANKS):
        view.add_column(f"rank {rank}", justify="right")
    for head, shares in enumerate(by_rank.tolist()):
        view.add_row(str(head), *[f"{share:.0%}" for share in shares[:SHOWN_RANKS]])
    times = Table(title="T(q) / T(1), time of a forward pass over q tokens", title_style="bold")
    for queries in cost.queries:
        times.add_column(str(queries), justify="right")
    times.add_row(*[f"{cost.relative(queries):.2f}" for queries in cost.queries])
    paths, expected = best_tree(by_rank.tolist(), lambda nodes: cost(1 + nodes), MAX_NODES)
    gain = expected / cost.relative(1 + len(paths))
    tree = f"{[list(path) for path in sorted(paths)]}" if paths else "none: plain decoding is faster"
    text = (
        f"Best single tree: {len(paths)} nodes, {expected:.2f} tokens per step, {gain:.2f}x plain decoding at most.\n"
        f"[dim]{tree}[/]\nSaved with the heads in {output}; MedusaCandidates uses it, by how sure the heads are."
    )
    return Group(view, times, text)
