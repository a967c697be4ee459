"""`hf-specgen tune`: measures latency profiles, and the acceptance of Medusa heads, and stores both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import compat
from hf_specgen.candidates.tree_search import TreeBuilder
from hf_specgen.cli.profile import latency_table
from hf_specgen.cli.settings import TuneSettings
from hf_specgen.depth import profiles
from hf_specgen.evaluation.calibration import Counts, measure_acceptance, save_acceptance
from hf_specgen.evaluation.latency import measure_profile
from hf_specgen.evaluation.strategies import Strategy, strategies
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    EMBEDDED_PROMPTS,
    GREEDY,
    encode,
    load_model,
    read_prompts,
    torch_dtype,
)
from hf_specgen.heads.compatibility import other_chat_template
from hf_specgen.heads.lora import copy_lora
from hf_specgen.heads.medusa_formats import load_medusa

SHOWN_RANKS, SHOWN_NODES = 5, (1, 2, 4, 8, 16, 32, 64)


def show(settings: TuneSettings) -> None:
    """Measure, store, and print what was measured.

    Raises:
        FileNotFoundError: if a model or the prompts are not there.
        ValueError: for settings that contradict each other, damaged files, or heads of another target.
    """
    console = Console()
    if settings.target:  # the form before latency profiles: tune HEADS --target MODEL
        settings = replace(settings, model=settings.target, heads=settings.model, target="")
    if settings.output is not None and not settings.heads:
        raise ValueError(f"--output {settings.output} is for tuned heads; name them with --heads")
    if settings.output is not None and settings.prompts is None and not EMBEDDED_PROMPTS.exists():
        raise FileNotFoundError("the embedded prompts are a package: pip install 'hf-specgen[demo]'; or give --prompts")
    rows = read_prompts(settings.prompts or EMBEDDED_PROMPTS, settings.prompts_per_domain) if settings.output else {}
    dtype = "auto" if settings.dtype == "auto" else torch_dtype(settings.dtype)
    model, tokenizer = load_model(settings.model, dtype, settings.device)
    if settings.output is not None:
        console.print(tune_heads(settings, settings.output, model, tokenizer, rows, console))
    heads = settings.heads if settings.output is None else str(settings.output)
    for strategy in strategies(settings.draft, heads, settings.adapter):
        _tune_latency(strategy, model, settings, console)


def _tune_latency(strategy: Strategy, model: PreTrainedModel, settings: TuneSettings, console: Console) -> None:
    """Measure and store the profiles of a strategy, for greedy and sampled calls, and print them."""
    for sample in (False, True):
        name = f"{strategy.code}, {'sampled' if sample else 'greedy'}"
        with console.status(f"timing {name}"):
            key = measure_profile(
                model, strategy.candidates, rows=settings.batch_size, context=settings.context, sample=sample
            )
        stored = profiles.load(key)
        if stored is None:
            raise OSError(f"the profile {key!r} could not be written to {profiles.directory()}; set HF_SPECGEN_CACHE")
        console.print(f"[bold]{name}[/]\n{key}", highlight=False)
        console.print(latency_table(stored))


def tune_heads(
    settings: TuneSettings,
    output: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, list[str]],
    console: Console,
) -> RenderableType:
    """Measure the acceptance of Medusa heads, and save it with the heads.

    Returns:
        tables of what was measured.

    Raises:
        ValueError: for heads whose acceptance is not measured in advance.
    """
    heads = load_medusa(settings.heads, model)
    if heads.config.reads_path:
        raise ValueError(
            f"the heads {settings.heads!r} read the path before their token and learn their acceptance while they "
            "draft: nothing is stored with them; leave out --output to measure latencies only"
        )
    if warning := other_chat_template(heads.config.base, tokenizer):
        console.print(f"[yellow]{warning}[/]")
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        calls = progress.track(list(_calls(prompts, tokenizer, settings.max_new_tokens, compat.input_device(model))))
        counts = measure_acceptance(model, heads, calls)
    tuned = load_medusa(settings.heads, model)  # in the dtype of its file; the other set was moved to the target's
    save_acceptance(tuned, counts)
    tuned.save_pretrained(output)
    if tuned.config.lora_rank:
        copy_lora(settings.heads, output)
    return _report(counts, output)


def _calls(
    prompts: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, device: Any
) -> Iterator[dict[str, Any]]:
    for domain, texts in prompts.items():
        for inputs in encode(tokenizer, texts, 1):
            tensors = {name: tensor.to(device) for name, tensor in inputs.items()}
            yield {**tensors, "max_new_tokens": max_new_tokens, **DOMAINS.get(domain, GREEDY)}


def _report(counts: Counts, output: Path) -> RenderableType:
    """Acceptance by rank, and the expected tokens per step of the best trees for heads of average confidence."""
    by_rank = counts.by_rank()
    view = Table(box=SIMPLE, title="acceptance of each head's tokens, by rank", title_style="bold")
    view.add_column("head")
    for rank in range(SHOWN_RANKS):
        view.add_column(f"rank {rank}", justify="right")
    for head, shares in enumerate(by_rank.tolist()):
        view.add_row(str(head), *[f"{share:.0%}" for share in shares[:SHOWN_RANKS]])
    trees = Table(box=SIMPLE, title="expected tokens per step of the best draft tree, by its nodes", title_style="bold")
    builder = TreeBuilder.from_marginals(
        [counts.heads], np.zeros((1, *by_rank.shape), dtype=np.int64), by_rank.numpy()[None], SHOWN_NODES[-1]
    )
    for nodes in SHOWN_NODES:
        trees.add_column(str(nodes), justify="right")
    trees.add_row(*[f"{1 + builder.sorted_joint(nodes)[0].sum():.2f}" for nodes in SHOWN_NODES])
    return Group(view, trees, f"Saved with the heads in {output}. MedusaCandidates chooses a tree in each step.")
