"""`hf-specgen tune`: measures latencies, and the acceptance of Medusa heads, and writes both."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import compat
from hf_specgen.cli.settings import TuneSettings, check_writable, terminal
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.calibration import Counts, measure_acceptance, save_acceptance
from hf_specgen.evaluation.cost import measure_latency
from hf_specgen.evaluation.workloads import EMBEDDED_PROMPTS, encode, load_model, read_prompts, strategies
from hf_specgen.heads.lora import copy_lora
from hf_specgen.heads.medusa import other_chat_template
from hf_specgen.heads.medusa_formats import load_medusa


def show(settings: TuneSettings) -> None:
    """Measure, store, and print what was measured."""
    console = terminal()
    if settings.output is not None and not settings.heads:
        raise ValueError(f"--output {settings.output} is for tuned heads; name them with --heads")
    if settings.output is not None and settings.prompts is None and not EMBEDDED_PROMPTS.exists():
        raise FileNotFoundError("the embedded prompts are a package: pip install 'hf-specgen[demo]'; or give --prompts")
    check_writable(settings.latency)
    rows = read_prompts(settings.prompts or EMBEDDED_PROMPTS, settings.prompts_per_domain) if settings.output else {}
    model, tokenizer = load_model(settings.model, settings.dtype, settings.device)
    named = strategies(settings.draft, settings.heads, settings.adapter)
    for strategy in named:  # every strategy must fit the target before anything is measured
        strategy.candidates.target_requirements(model)
    if settings.output is not None:
        console.print(tune_heads(settings, settings.output, model, tokenizer, rows, console))
        console.print(f"saved with the heads in {settings.output}", highlight=False)
        named = strategies(settings.draft, str(settings.output), settings.adapter)
    with console.status("measuring latencies"):
        candidates = [strategy.candidates for strategy in named]
        latency = measure_latency(model, candidates, rows=settings.batch_size, context=settings.context)
    latency.save(settings.latency)
    console.print(_latencies(latency))
    console.print(f"{settings.latency}: read by AdaptiveDepth(latency={str(settings.latency)!r})", highlight=False)


def _latencies(latency: LatencyModel) -> Table:
    """Latencies relative to a plain step, a row for each number of rows."""
    shown = (2, 4, 8, 16, 32)
    view = Table(box=SIMPLE, pad_edge=False, title="latency in plain steps", title_style="bold", title_justify="left")
    drafters = sorted({kind for one in latency.buckets for kind in one.drafters} - {"any"})
    for name in ("rows", "context", "plain step", *(f"T({tokens})" for tokens in shown), *drafters):
        view.add_column(name.replace("_", " "), justify="right")
    for curve, kinds in latency.buckets:
        cells = [str(curve.batch), str(curve.context), f"{1000 * curve(1):.1f} ms"]
        cells += [f"{curve.relative(tokens):.2f}" for tokens in shown]
        cells += [f"{kinds[kind].seconds[0] / curve(1):.2f}" for kind in drafters]
        view.add_row(*cells)
    return view


def tune_heads(
    settings: TuneSettings,
    output: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, list[str]],
    console: Console,
) -> Table:
    """Measure the acceptance of Medusa heads, save it with the heads, and return it as a table."""
    heads = load_medusa(settings.heads, model)
    if warning := other_chat_template(heads.config.base, tokenizer):
        console.print(f"[yellow]{warning}[/]")
    calls = [
        {
            **{name: tensor.to(compat.input_device(model)) for name, tensor in inputs.items()},
            "max_new_tokens": settings.max_new_tokens,
            **workloads.DOMAINS.get(domain, workloads.GREEDY),
        }
        for domain, texts in prompts.items()
        for inputs in encode(tokenizer, texts, 1)
    ]
    counts = measure_acceptance(model, heads, track(calls, "generating", console=console, transient=True))
    tuned = load_medusa(settings.heads, model)  # in the dtype of its file; the other set was moved to the target's
    save_acceptance(tuned, counts)
    tuned.save_pretrained(output)
    if tuned.config.lora_rank:
        copy_lora(settings.heads, output)
    return _acceptance(counts)


def _acceptance(counts: Counts) -> Table:
    """Acceptance by rank over all confidences, a row for each head."""
    view = Table(box=SIMPLE, title="acceptance of each head's tokens, by rank", title_style="bold")
    view.add_column("head")
    by_rank = counts.by_rank()[:, :5]
    for rank in range(by_rank.shape[1]):
        view.add_column(f"rank {rank}", justify="right")
    for head, rates in enumerate(by_rank.tolist()):
        view.add_row(str(head), *[f"{rate:.0%}" for rate in rates])
    return view
