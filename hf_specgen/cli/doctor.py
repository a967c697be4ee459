"""`hf-specgen doctor`: checks whether speculation works and is faster with these models on this machine.

Checks that load no weights come first: support, tokenizers, sizes, heads, memory. If they find no problem, every
strategy is timed on a few prompts, and the fastest one is recommended as a line of code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import psutil  # accelerate depends on it
import torch
from accelerate import init_empty_weights
from rich.box import SIMPLE
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import NgramCandidates
from hf_specgen.candidates.presets import Preset, PresetCandidates
from hf_specgen.cli.settings import DoctorSettings, terminal
from hf_specgen.compat import attention_implementation
from hf_specgen.depth import CostCurve, FixedDepth
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.cost import measure_cost_curve
from hf_specgen.evaluation.measure import Speed, Total, Variant, measure_round
from hf_specgen.evaluation.workloads import PLAIN, Strategy, strategies
from hf_specgen.heads.checkpoint import Source, open_checkpoint, source_errors
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.medusa import check_heads
from hf_specgen.heads.medusa_formats import holds_medusa, inspect_medusa
from hf_specgen.heads.mtp import has_mtp_layers
from hf_specgen.targets.support import check_model

PROMPTS = (
    "Rename `x` to `total` in this code and repeat it whole.\n\n"
    "def add(x, y):\n    x = x + y\n    if x > 10:\n        x = 10\n    return x\n",
    "Write a Python function that parses a CSV line, with a docstring and two examples.",
    "Tell a short story about a lighthouse keeper who collects clocks.",
)
LINE = "model.generate(**inputs, candidate_generator={})"
GIB = 2**30
GOOD, WARNING, BAD = "good", "warning", "bad"
"""Results of a check."""
SIGNS = {GOOD: "[green]✓[/]", WARNING: "[yellow]![/]", BAD: "[red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    """One check: its result, what was found, and the consequence with what to change."""

    subject: str
    result: str
    found: str
    meaning: str = ""


@dataclass
class Report:
    """All findings, a recommended line of code with its reason, and of each measured variant by
    name its numbers, its code, and why it is not faster."""

    findings: list[Finding] = field(default_factory=list)
    recommendation: str = ""
    reason: str = ""
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def bad(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.result == BAD]


def show(settings: DoctorSettings) -> bool:
    """Examine, and print the report; returns False if a problem has to be solved first."""
    report = examine(settings)
    if settings.as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        console = terminal()
        view = Table(box=SIMPLE, pad_edge=False, show_header=False)
        view.add_column()
        view.add_column(style="bold", no_wrap=True)
        view.add_column(overflow="fold")
        for finding in report.findings:
            text = finding.found + (f"\n[dim]{finding.meaning}[/]" if finding.meaning else "")
            view.add_row(SIGNS[finding.result], finding.subject, text)
        console.print(view)
        console.print(_ranking(report))
        if report.recommendation:
            console.print(f"[bold]{report.recommendation}[/]", highlight=False)
        console.print(report.reason)
    return not report.bad


def _ranking(report: Report) -> Table | str:
    """The measured variants, fastest first, with the code of each, or why it is not faster."""
    if not report.measured:
        return ""
    view = Table(box=SIMPLE, pad_edge=False)
    view.add_column("fastest first", overflow="fold")
    for title in ("tokens/s", "over plain", "tokens per step", "accepted"):
        view.add_column(title, justify="right")
    view.add_column("candidate_generator=", overflow="fold")
    for name, numbers in sorted(report.measured.items(), key=lambda item: -item[1]["tokens_per_second"]):
        speed = f"{numbers['tokens_per_second']:.1f}", f"{numbers['speedup']:.2f}"
        counts = f"{numbers.get('tokens_per_step', 1.0):.2f}", f"{numbers.get('acceptance_rate', 0.0):.0%}"
        about = f"\n[dim]{report.notes[name]}[/]" if report.notes.get(name) else ""
        view.add_row(name, *speed, *counts, report.codes.get(name, "") + about)
    return view


def examine(settings: DoctorSettings) -> Report:
    """Check a target, with a draft model and heads if they are given; no weights are loaded if a problem is found."""
    name = settings.model or settings.model_option
    if not name or (settings.model and settings.model_option):
        raise ValueError("name one target: hf-specgen doctor MODEL")
    settings = replace(settings, model=name, device=settings.device or workloads.default_device())
    workloads.check_device(settings.device)
    report = Report()
    target = blueprint(settings.model, settings.dtype)
    drafts = [blueprint(draft, settings.dtype) for draft in settings.draft]
    report.findings.append(support(target, "target"))
    for draft in drafts:
        found = [support(draft, "draft"), *tokenizers(target, draft), size_ratio(target, draft)]
        report.findings += _labelled(found, draft.name if len(drafts) > 1 else "")
    for name in settings.heads:
        report.findings += _labelled(heads(name, target), name if len(settings.heads) > 1 else "")
    report.findings.append(memory([target, *drafts], settings.batch_size, settings.length, settings.device))
    if report.bad:
        report.reason = "solve what is marked with ✗ first"
    elif settings.run:
        _measure(settings, target, report)
    else:
        most = strategies(settings.draft, settings.heads, settings.adapter)[-1]
        report.recommendation = LINE.format(most.code)
        report.reason = "the static checks found no problem; the speed was not measured"
    return report


def _labelled(findings: Sequence[Finding], name: str) -> list[Finding]:
    """The findings about one of several drafts or heads, each with its name."""
    label = f"{name}: " if name else ""
    return [replace(finding, found=label + finding.found) for finding in findings]


@dataclass
class Blueprint:
    """A model without weights: its modules on the meta device, its tokenizer if there is one, its future dtype."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype

    @property
    def config(self) -> Any:
        """The configuration of the language model."""
        return self.model.config.get_text_config()

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return _parameters(self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters; tied ones count once."""
        return self.parameters * self.dtype.itemsize

    def cache_bytes(self, batch: int, length: int) -> int:
        """Bytes of keys and values for `batch` rows of `length` tokens; sliding windows do not reduce them here."""
        config = self.config
        count = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * int(config.num_hidden_layers) * count * width * batch * length * self.dtype.itemsize


def blueprint(name: str, dtype: str) -> Blueprint:
    """Read the configuration and the tokenizer of a model, in a dtype or "auto" for the checkpoint's."""
    with source_errors(name):
        config = AutoConfig.from_pretrained(name)
        chosen = workloads.torch_dtype(dtype) if dtype != "auto" else config.dtype or torch.float32
        with init_empty_weights():
            model = workloads.generating_class(config).from_config(config).eval()
        model.tie_weights()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception:  # damaged files and missing packages raise errors of many types; `tokenizers` reports it
        tokenizer = None
    return Blueprint(name, model, tokenizer, chosen)


def support(model: Blueprint, role: str) -> Finding:
    """Whether the model can verify draft trees: attention implementation, positions, a cache with rollback."""
    kind = f"{type(model.model).__name__}, attention {attention_implementation(model.config)!r}"
    try:
        check_model(model.model)
    except ValueError as error:
        return Finding(f"{role} support", BAD, kind, str(error))
    return Finding(f"{role} support", GOOD, f"{kind}, key/value cache that can be rolled back")


def tokenizers(target: Blueprint, draft: Blueprint) -> list[Finding]:
    """Whether both models have the same vocabulary, special tokens and chat template."""
    sizes = f"embedding tables of {target.config.vocab_size} and {draft.config.vocab_size} rows"
    a, b = target.tokenizer, draft.tokenizer
    if a is None or b is None:
        missing = target.name if a is None else draft.name
        same = target.config.vocab_size == draft.config.vocab_size
        found = f"no tokenizer could be loaded for {missing!r}; {sizes}"
        meaning = "the tokenizers cannot be compared; give folders that hold them"
        return [Finding("tokenizers", WARNING if same else BAD, found, meaning)]
    if a.get_vocab() != b.get_vocab():
        shared = a.get_vocab().keys() & b.get_vocab().keys()
        tokens = a.convert_ids_to_tokens([token for text in PROMPTS for token in a(text)["input_ids"]])
        fraction = sum(token in shared for token in tokens) / len(tokens)
        found = f"another tokenizer: {len(shared)} tokens are in both, {fraction:.0%} of those of sample texts; {sizes}"
        meaning = "supported: draft tokens come from those in both; a draft model of the same family is faster"
        return [Finding("tokenizers", WARNING if fraction > 0.5 else BAD, found, meaning)]
    findings = [Finding("tokenizers", GOOD, f"all {len(a.get_vocab())} entries are the same; {sizes}")]
    ends = [(name, getattr(a, name), getattr(b, name)) for name in ("bos_token_id", "eos_token_id")]
    unlike = ", ".join(f"{name} {ours} and {theirs}" for name, ours, theirs in ends if ours != theirs)
    findings.append(_alike("special tokens", unlike, "texts that begin or end differently"))
    if a.chat_template:
        unlike = "" if a.chat_template == b.chat_template else "not the target's"
        findings.append(_alike("chat template", unlike, "texts in another template or none"))
    return findings


def _alike(subject: str, unlike: str, texts: str) -> Finding:
    """A warning if the draft model was trained on other texts than the target writes."""
    meaning = f"trained on {texts}: fewer of its draft tokens are accepted"
    return Finding(subject, WARNING, unlike, meaning) if unlike else Finding(subject, GOOD, "the same")


def size_ratio(target: Blueprint, draft: Blueprint) -> Finding:
    """Whether the draft model, which runs once per draft token, is small enough."""
    ratio = draft.weight_bytes / target.weight_bytes
    found = f"{_count(draft.model)} / {_count(target.model)} parameters, {ratio:.0%} of the target's bytes"
    if ratio <= 0.12:
        return Finding("draft size", GOOD, found)
    rarely = "faster only if most draft tokens are accepted" if ratio <= 0.35 else "rarely faster"
    return Finding("draft size", WARNING, found, f"{rarely}; about a tenth of the target is safe")


def heads(name: str, target: Blueprint) -> list[Finding]:
    """Whether heads, a folder or Hub id in any format that can be loaded, belong to the target."""
    try:
        if not holds_medusa(Source(name)):
            return _draft_head(name, target)
        config = inspect_medusa(name).config
    except (OSError, ValueError) as error:
        return [Finding("heads", BAD, f"{name!r} cannot be read", str(error))]
    findings = [Finding("heads", GOOD, f"{config.num_heads} heads, layers in each: {config.num_layers}")]
    config.vocab_size = config.vocab_size or target.config.vocab_size  # Medusa v2 does not state it
    try:
        check_heads(config, target.model, "this set of heads")
    except ValueError as error:
        findings.append(Finding("heads' target", BAD, "not this target", str(error)))
    return findings + _base(str((config.base or {}).get("name_or_path") or ""), target)


def _draft_head(name: str, target: Blueprint) -> list[Finding]:
    """The same for heads that read several hidden states, and for the layers in a target's own checkpoint."""
    if has_mtp_layers(open_checkpoint(Source(name))):
        return [Finding("heads", GOOD, "MTP layers in the target's own checkpoint")]
    head = load_head(name)
    findings = [Finding("heads", GOOD, f"{type(head).__name__}, {_count(head)} parameters")]
    try:
        layers = head.bind(target.model).aux_hidden_state_layers
        findings[0] = replace(findings[0], found=f"{findings[0].found}, reads hidden states {layers}")
    except ValueError as error:
        findings.append(Finding("heads' target", BAD, "not this target", str(error)))
    return findings + _base(head.config.base_model or "", target)


def _base(base: str, target: Blueprint) -> list[Finding]:
    """A warning if heads were trained on a model of another name."""
    if not base or base.rstrip("/").split("/")[-1] == target.name.rstrip("/").split("/")[-1]:
        return []
    meaning = "draft tokens are accepted only if the heads were trained on this very model"
    return [Finding("heads' base", WARNING, f"trained on {base!r}, not {target.name!r}", meaning)]


def memory(models: list[Blueprint], batch: int, length: int, device: str, available: int | None = None) -> Finding:
    """Weights, and caches for `batch` rows of `length` tokens, compared with the free memory (`available` bytes)."""
    weights = sum(model.weight_bytes for model in models)
    caches = sum(model.cache_bytes(batch, length) for model in models)
    free = free_bytes(device) if available is None else available
    found = f"weights {weights / GIB:.2f} GiB, caches for {batch} x {length} tokens {caches / GIB:.2f} GiB"
    if free is None:
        return Finding("memory", WARNING, found, f"the free memory of {device} is unknown")
    found += f"; {free / GIB:.2f} GiB free on {device}"
    if weights + caches > free:
        meaning = "does not fit: use a smaller batch, length, dtype or draft model, or device_map='auto'"
        return Finding("memory", BAD, found, meaning)
    if weights + caches > 0.85 * free:
        return Finding("memory", WARNING, found, "a tight fit: activations need memory too")
    return Finding("memory", GOOD, found)


def free_bytes(device: str) -> int | None:
    """Free memory of a device; None if unknown."""
    if device == "auto":
        gpus = [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]
        return int(sum(gpus) + psutil.virtual_memory().available)
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0]) if torch.cuda.is_available() else None
    return int(psutil.virtual_memory().available) if torch.device(device).type == "cpu" else None


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _count(model: nn.Module) -> str:
    parameters = _parameters(model)
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _measure(settings: DoctorSettings, target: Blueprint, report: Report) -> None:
    """Time T(q), and every strategy against plain `generate`; add findings and a recommendation to the report."""
    model, tokenizer = workloads.load_model(settings.model, target.dtype, settings.device)
    limit = getattr(target.config, "max_position_embeddings", None) or 2**31
    if not model.config.is_encoder_decoder:
        sizes, context = (1, 2, 4, 8, 16), min(128, limit // 2)
        curve = measure_cost_curve(model, sizes, context=context, batch=settings.batch_size, repeats=5)
        report.findings.append(verification_cost(curve))
    generation = workloads.generation_settings(settings.max_new_tokens, settings.temperature)
    named = strategies(settings.draft, settings.heads, settings.adapter, dtype=target.dtype)
    prompts = list(settings.prompt or PROMPTS)
    codes, variants = _variants([*_presets(model), *named], settings.device)
    texts = prompts if settings.batch_size == 1 else prompts * (-(-settings.batch_size // len(prompts)))
    batches = list(workloads.encode(tokenizer, texts, settings.batch_size))
    measure_round(model, batches[0], variants, generation, 0)  # not counted: it loads models and prepares kernels
    totals = {variant.name: Total() for variant in variants}
    for number, inputs in enumerate(batches * settings.rounds):
        samples = measure_round(model, inputs, variants, generation, 1 + number, first=number)
        for name, sample in samples.items():
            totals[name].add(sample, samples[PLAIN])
    plain = totals.pop(PLAIN)
    report.findings.append(same_tokens(totals, exact=target.dtype == torch.float32))
    report.measured[PLAIN] = {"tokens_per_second": plain.tokens_per_second, "speedup": 1.0}
    speeds = {name: Speed.of(total, plain) for name, total in totals.items()}
    for name, measured in speeds.items():
        report.measured[name] = measured.to_dict()
        report.notes[name] = note(measured)
    report.codes = codes
    report.recommendation, report.reason = recommend(speeds, codes)


def _presets(model: PreTrainedModel) -> list[Strategy]:
    """The presets that choose different strategies for this target."""
    chosen: dict[Any, str] = {}
    for name in get_args(Preset):
        chosen.setdefault(PresetCandidates(name).for_model(model), name)
    return [Strategy(name, f'"{name}"', candidates) for candidates, name in chosen.items()]


def _variants(found: Sequence[Strategy], device: str) -> tuple[dict[str, str], list[Variant]]:
    """Plain `generate` and every strategy, on CUDA also without graphs, and graphs without drafts; the code of each."""
    if device.startswith("cuda"):
        no_drafts = NgramCandidates(policy=FixedDepth(0))
        found = [*found, Strategy("graphs, no drafts", "NgramCandidates(policy=FixedDepth(0))", no_drafts)]
    codes = {one.name: one.code for one in found}
    variants = [Variant(PLAIN, dict), *(one.variant() for one in found)]
    if device.startswith("cuda"):
        codes |= {f"{one.name}, eager": f"{one.code}, compile=False" for one in found[:-1]}
        variants += [replace(one.variant(compile=False), name=f"{one.name}, eager") for one in found[:-1]]
    return codes, variants


def verification_cost(curve: CostCurve) -> Finding:
    """Whether this machine reads eight tokens in about the time of one."""
    ratio = curve.relative(8)
    found = (
        f"T(1) {1000 * curve(1):.1f} ms; reading 8 tokens takes {ratio:.2f} times as long, 16 tokens "
        f"{curve.relative(16):.2f} times (batch size {curve.batch})"
    )
    if ratio <= 1.3:
        return Finding("verification", GOOD, found, "bound by memory bandwidth: draft tokens are nearly free")
    if ratio <= 2.0:
        return Finding("verification", WARNING, found, "draft tokens take time: a high acceptance rate is needed")
    meaning = "bound by computation: only text that repeats itself is faster; try a smaller batch"
    return Finding("verification", WARNING, found, meaning)


def note(measured: Speed) -> str:
    """Why a strategy is not clearly faster than plain `generate`; empty if it is."""
    if measured.faster:
        return ""
    if not measured.plausible:
        return "not possible: another process used the machine meanwhile; measure again"
    if measured.total.drafted == 0:
        return "nothing was drafted"
    if not measured.interval.differs:
        return "no difference was shown; more --rounds make the interval smaller"
    if measured.total.acceptance_rate < 0.3:
        return "few draft tokens are accepted: no repetition, a high temperature, or an unrelated draft"
    return "drafting and verifying take too long"


def same_tokens(totals: Mapping[str, Total], exact: bool) -> Finding:
    """Whether the tokens are those of plain `generate`."""
    different = [name for name, total in totals.items() if not total.identical]
    if not different:
        return Finding("same tokens", GOOD, "every answer is that of plain generate")
    meaning = "rounding decides near-ties differently in this data type, as it does between batch sizes"
    if exact:
        meaning = "in float32 that must not happen: please report it, with the model's name"
    found = f"answers of {', '.join(different)} differ from plain generate"
    return Finding("same tokens", BAD if exact else WARNING, found, meaning)


def recommend(speeds: Mapping[str, Speed], codes: Mapping[str, str]) -> tuple[str, str]:
    """The line of code for the fastest variant, plain `generate` included, and the reason."""
    possible = {name: measured.interval.value for name, measured in speeds.items() if measured.plausible}
    best = max(possible, key=possible.__getitem__, default=PLAIN)
    if possible.get(best, 0.0) <= 1:
        return "model.generate(**inputs)", "no strategy was faster than plain generate on these prompts"
    doubt = "" if speeds[best].faster else "; the difference is small, more --rounds make it certain"
    return LINE.format(codes[best]), f"the fastest in the quick benchmark: {speeds[best]}{doubt}"
