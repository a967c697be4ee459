"""Draft models and heads for a target: which the Hub has (`hf-specgen find`), and whether they fit, without weights.

The checks of `hf-specgen doctor`: support, tokenizers, sizes, heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from huggingface_hub import HfApi
from rich.box import SIMPLE
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import (
    Candidates,
    LayerSkipCandidates,
    MTPCandidates,
)
from hf_specgen.cli.settings import FindSettings, terminal
from hf_specgen.compat import attention_implementation
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.workloads import BLOCK, DRAFT, EAGLE, MEDUSA, MTP, PEAGLE
from hf_specgen.heads.checkpoint import Source, open_checkpoint, source_errors
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import has_mtp_layers
from hf_specgen.targets.support import check_model

PROMPTS = (
    "Rename `x` to `total` in this code and repeat it whole.\n\n"
    "def add(x, y):\n    x = x + y\n    if x > 10:\n        x = 10\n    return x\n",
    "Write a Python function that parses a CSV line, with a docstring and two examples.",
    "Tell a short story about a lighthouse keeper who collects clocks.",
)
GOOD, WARNING, BAD = "good", "warning", "bad"
"""Results of a check."""
KINDS = {
    EAGLE: r"eagle",
    BLOCK: r"dflash|dspark|domino|jetspec",
    PEAGLE: r"p-?eagle|peagle",
    MTP: r"\bmtp\b",
    MEDUSA: r"medusa|hydra",
    DRAFT: r"\bdraft\b|speculator",
}
"""How the names and tags of repositories call each format, the most accurate per draft token first."""
MAX_RATIO = 0.35
"""Largest draft model, as a fraction of the target: a larger one is rarely faster."""


@dataclass(frozen=True)
class Finding:
    """One check: its result, what was found, and the consequence with what to change."""

    subject: str
    result: str
    found: str
    meaning: str = ""


@dataclass
class Blueprint:
    """A model without weights: its modules on the meta device, in its future dtype, and its tokenizer if it has one."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def config(self) -> Any:
        """The configuration of the language model."""
        return self.model.config.get_text_config()


def blueprint(name: str, dtype: str) -> Blueprint:
    """Read the configuration and the tokenizer of a model, in a dtype or "auto" for the checkpoint's."""
    with source_errors(name):
        config = AutoConfig.from_pretrained(name)
        chosen = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
        with init_empty_weights():
            model = workloads.generating_class(config)(config).eval().to(chosen)
        model.tie_weights()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception:  # damaged files and missing packages raise errors of many types; `tokenizers` reports it
        tokenizer = None
    return Blueprint(name, model, tokenizer)


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
        same = target.config.vocab_size == draft.config.vocab_size
        found = f"no tokenizer could be loaded for {target.name if a is None else draft.name!r}; {sizes}"
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
    settings = {"special tokens": ("bos_token_id", "eos_token_id"), "chat template": ("chat_template",)}
    for subject, names in settings.items():
        if any(getattr(a, name) is not None and getattr(a, name) != getattr(b, name) for name in names):
            meaning = "trained on texts of another form: fewer of its draft tokens are accepted"
            findings.append(Finding(subject, WARNING, "not the target's", meaning))
        else:
            findings.append(Finding(subject, GOOD, "the same"))
    return findings


def size_ratio(target: Blueprint, draft: Blueprint) -> Finding:
    """Whether the draft model, which runs once per draft token, is small enough."""
    ratio = draft.model.num_parameters() / target.model.num_parameters()
    found = f"{_count(draft.model)} / {_count(target.model)} parameters, {ratio:.0%}"
    if ratio <= 0.12:
        return Finding("draft size", GOOD, found)
    rarely = "faster only if most draft tokens are accepted" if ratio <= 0.35 else "rarely faster"
    return Finding("draft size", WARNING, found, f"{rarely}; about a tenth of the target is safe")


def heads(candidates: Candidates, name: str, target: Blueprint) -> list[Finding]:
    """Whether the heads or the exit adapter of a strategy belong to the target."""
    if isinstance(candidates, LayerSkipCandidates):
        return [Finding("exit adapter", GOOD, f"drafts with the first {candidates.exit_layer} layers")]
    if isinstance(candidates, MTPCandidates) and has_mtp_layers(open_checkpoint(Source(name))):
        return [Finding("heads", GOOD, "MTP layers in the target's own checkpoint")]
    head = load_head(name)
    findings = [Finding("heads", GOOD, f"{type(head).__name__}, {_count(head)} parameters")]
    try:
        head.bind(target.model)
    except ValueError as error:
        findings.append(Finding("heads' target", BAD, "not this target", str(error)))
    if (base := head.config.base_model) and Path(base).name != Path(target.name).name:
        meaning = "draft tokens are accepted only if the heads were trained on this very model"
        findings.append(Finding("heads' base", WARNING, f"trained on {base!r}, not {target.name!r}", meaning))
    return findings


def _count(model: nn.Module) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


@dataclass(frozen=True)
class Draft:
    """A checkpoint that may draft for a target: its size is a fraction of the target's parameters, if it is known."""

    name: str
    kind: str
    size: float | None
    downloads: int

    @property
    def rank(self) -> tuple[int, float, int]:
        """Heads first, by format; then the smaller ones, and those that are used more."""
        return list(KINDS).index(self.kind), inf if self.size is None else self.size, -self.downloads


def find(settings: FindSettings) -> bool:
    """Print what was found on the Hub, best first; returns False if that is nothing."""
    console = terminal()
    found = sorted(on_hub(settings.model, settings.limit), key=lambda draft: draft.rank)[: settings.limit]
    if not found:
        console.print(f"nothing was found for {settings.model!r} on the Hub; the presets need no checkpoint")
        return False
    view = Table("checkpoint", "format", "of the target's size", "downloads", box=SIMPLE, pad_edge=False)
    for one in found:
        view.add_row(one.name, one.kind, "" if one.size is None else f"{one.size:.1%}", str(one.downloads))
    console.print(view)
    options = " ".join(f"--draft {one.name}" for one in found[:3])
    console.print(f"measure them: hf-specgen doctor {settings.model} {options}", highlight=False)
    return True


def on_hub(target: str, limit: int) -> list[Draft]:
    """Repositories that name the target as their base model and a format in name or tags; smaller models beside it."""
    api, wanted = HfApi(), cast(Any, ["safetensors", "tags", "downloads", "config"])
    info = api.model_info(target, expand=["safetensors", "config"])
    total = info.safetensors.total if info.safetensors else None
    found = []
    for repo in api.list_models(filter=f"base_model:{target}", sort="downloads", limit=20 * limit, expand=wanted):
        text = " ".join([repo.id.lower().replace("_", "-"), *(tag for tag in repo.tags or () if ":" not in tag)])
        kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, text)]
        if kinds:
            kind = PEAGLE if PEAGLE in kinds else kinds[0]
            found.append(Draft(repo.id, kind, _ratio(repo.safetensors, total), repo.downloads or 0))
    family = (info.config or {}).get("model_type")
    for repo in api.list_models(author=target.partition("/")[0], filter=family, limit=20 * limit, expand=wanted):
        size = _ratio(repo.safetensors, total)
        if size is not None and size <= MAX_RATIO and (repo.config or {}).get("model_type") == family:
            found.append(Draft(repo.id, DRAFT, size, repo.downloads or 0))
    return list({draft.name: draft for draft in reversed(found)}.values())


def _ratio(safetensors: object, total: int | None) -> float | None:
    parameters = getattr(safetensors, "total", None)
    return parameters / total if parameters and total else None
