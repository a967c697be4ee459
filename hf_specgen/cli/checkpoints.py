"""Draft models and heads for a target: which exist (`hf-specgen find`), and whether they fit; no weights are loaded.

The checks of `hf-specgen doctor`: support, tokenizers, sizes, heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from huggingface_hub import HfApi, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.box import SIMPLE
from rich.table import Table
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from hf_specgen.candidates import Candidates, DraftModelCandidates, LayerSkipCandidates, MTPCandidates
from hf_specgen.candidates.cross_tokenizer import load_tokenizer, shared_ids
from hf_specgen.candidates.draft_model import check_draft
from hf_specgen.cli.settings import FindSettings, terminal
from hf_specgen.compat import attention_implementation
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.workloads import BLOCK_HEAD, DRAFT, EAGLE, MEDUSA, MTP, PEAGLE, Strategy
from hf_specgen.heads.checkpoint import open_checkpoint, without_numbers
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from hf_specgen.heads.source import Source, first_line, source_errors
from hf_specgen.targets.support import check_model

PROMPTS = (
    "Rename `x` to `total` in this code and repeat it whole.\n\n"
    "def add(x, y):\n    x = x + y\n    if x > 10:\n        x = 10\n    return x\n",
    "Write a Python function that parses a CSV line, with a docstring and two examples.",
    "Tell a short story about a lighthouse keeper who collects clocks.",
)
GOOD = "good"
WARNING = "warning"
BAD = "bad"
"""Results of a check."""
KINDS = {
    EAGLE: r"eagle",
    BLOCK_HEAD: r"dflash|dspark|domino|jetspec",
    PEAGLE: r"p-?eagle|peagle",
    MTP: r"\bmtp\b",
    MEDUSA: r"medusa|hydra",
    DRAFT: r"\bdraft\b|speculator",
}
"""How the names and tags of repositories call each format, the most accurate per draft token first."""
SMALL = 0.12
MAX_RATIO = 0.35
"""Draft models as a fraction of the target: usually faster up to the first one, rarely above the second one."""


@dataclass(frozen=True)
class Finding:
    """One check: its result, what was found, and the consequence with what to change."""

    subject: str
    result: str
    found: str
    meaning: str = ""


def without_weights(source: Source, dtype: str = "auto") -> PreTrainedModel:
    """A model on the meta device, in a dtype or "auto" for the checkpoint's; only its configuration is read."""
    with source_errors(source.path_or_id):
        config = workloads.from_pretrained(AutoConfig, source)
        chosen = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
        with init_empty_weights():
            model = workloads.generating_class(source, config)(config).eval().to(chosen)
        model.tie_weights()
        workloads.name_by_revision(model, source)
    return cast(PreTrainedModel, model)


def check(drafter: Strategy, target: PreTrainedModel, dtype: str = "auto") -> list[Finding]:
    """Whether the checkpoint of a strategy fits the target."""
    assert drafter.source is not None
    if not isinstance(drafter.candidates, DraftModelCandidates):
        return heads(drafter.candidates, drafter.source, target)
    draft = without_weights(drafter.source, dtype)
    fits = partial(check_draft, target=target)
    return [support(draft, "draft", fits), *draft_model(target, draft)]


def support(model: PreTrainedModel, role: str, check: Callable[[PreTrainedModel], None] = check_model) -> Finding:
    """Whether the model can verify draft trees: attention implementation, positions, a cache with rollback.

    `check` raises a `ValueError` if it cannot.
    """
    attention = attention_implementation(model.config.get_text_config())
    found = f"{type(model).__name__}, {_count(model)} parameters, attention {attention!r}"
    try:
        check(model)
    except ValueError as error:
        return Finding(f"{role} support", BAD, found, str(error))
    return Finding(f"{role} support", GOOD, f"{found}, key/value cache that can be rolled back")


def draft_model(target: PreTrainedModel, draft: PreTrainedModel) -> list[Finding]:
    """Whether a draft model is small, and has the vocabulary and the chat template of the target."""
    ratio = draft.num_parameters() / target.num_parameters()
    meaning = "" if ratio <= SMALL else f"faster only if most draft tokens are accepted; {SMALL:.0%} and less is safe"
    size = Finding("draft size", WARNING if meaning else GOOD, f"{ratio:.0%} of the target's parameters", meaning)
    names = str(target.name_or_path), str(draft.name_or_path)
    try:
        a, b = map(load_tokenizer, names)
    except Exception as error:  # damaged files and missing packages raise errors of many types
        same = len({one.config.get_text_config().vocab_size for one in (target, draft)}) == 1
        found = f"cannot be loaded: {first_line(error)}"
        meaning = "not compared; give folders that hold the tokenizers"
        return [size, Finding("tokenizers", WARNING if same else BAD, found, meaning)]
    if a.get_vocab() != b.get_vocab():
        shared = shared_ids(*names)
        tokens = [token for text in PROMPTS for token in a(text, add_special_tokens=False)["input_ids"]]
        fraction = sum(shared[token] >= 0 for token in tokens) / len(tokens)
        count = sum(token >= 0 for token in shared)
        found = f"another tokenizer: {count} tokens are in both, {fraction:.0%} of those of sample texts"
        meaning = "supported: draft tokens come from those in both; a draft model of the same family is faster"
        return [size, Finding("tokenizers", WARNING if fraction > 0.5 else BAD, found, meaning)]
    findings = [size, Finding("tokenizers", GOOD, f"all {len(a.get_vocab())} entries are the same")]
    if a.chat_template == b.chat_template:
        return [*findings, Finding("chat template", GOOD, "the same")]
    meaning = "trained on texts of another form: fewer of its draft tokens are accepted"
    return [*findings, Finding("chat template", WARNING, "not the target's", meaning)]


def heads(candidates: Candidates, source: Source, target: PreTrainedModel) -> list[Finding]:
    """Whether the heads or the exit adapter of a strategy belong to the target."""
    if isinstance(candidates, LayerSkipCandidates):
        return [Finding("exit adapter", GOOD, f"drafts with the first {candidates.exit_layer} layers")]
    if isinstance(candidates, MTPCandidates):
        try:
            layers = load_mtp(target, source.local_name(), lambda *what: without_numbers(open_checkpoint(*what)))
        except ValueError as error:
            return [Finding("heads", BAD, "MTP layers that do not load", str(error))]
        return [Finding("heads", GOOD, f"{len(layers.layers)} MTP layers, {_count(layers)} parameters")]
    head = load_head(source.path_or_id, revision=source.revision)
    findings = [Finding("heads", GOOD, f"{type(head).__name__}, {_count(head)} parameters")]
    try:
        head.bind(target)
    except ValueError as error:
        findings.append(Finding("heads' target", BAD, "not this target", str(error)))
    name = str(target.config.name_or_path)
    if (base := head.config.base_model) and Path(base).name != Path(name).name:
        meaning = "draft tokens are accepted only if the heads were trained on this very model"
        findings.append(Finding("heads' base", WARNING, f"trained on {base!r}, not {name!r}", meaning))
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
    downloads: int = 0


def best_first(found: Iterable[Draft]) -> list[Draft]:
    """Heads first, by format; then the smaller ones, and those that are used more."""
    kinds = [*KINDS, workloads.ASSISTANT, workloads.SKIP]
    return sorted(found, key=lambda one: (kinds.index(one.kind), inf if one.size is None else one.size, -one.downloads))


def find(settings: FindSettings) -> bool:
    """Print what was found on the Hub, or else in the local cache, best first; returns False if that is nothing."""
    console = terminal()
    place = "the local cache"
    source = settings.target
    if Path(source.path_or_id).is_dir():
        console.print(f"{settings.model} is a folder: looking in the local cache", markup=False, highlight=False)
        found = in_cache(source)
    else:
        try:
            place = "the Hub"
            found = on_hub(source, settings.limit)
        except (
            Exception
        ) as error:  # no such id, HF_HUB_OFFLINE=1, no connection: a type of its own in every HTTP library
            console.print(f"the Hub cannot be searched ({type(error).__name__}): looking in the local cache")
            found = in_cache(source)
    if not found:
        console.print(
            f"nothing was found for {settings.model!r} in {place}; the presets need no checkpoint", markup=False
        )
        return False
    found = best_first(found)[: settings.limit]
    view = Table("checkpoint", "format", "of the target's size", "downloads", box=SIMPLE, pad_edge=False)
    for one in found:
        view.add_row(one.name, one.kind, "" if one.size is None else f"{one.size:.1%}", str(one.downloads or ""))
    console.print(view)
    named = [source.path_or_id + (f"@{source.revision}" if source.revision else ""), *(one.name for one in found[:3])]
    console.print(f"measure them: hf-specgen doctor {' --draft '.join(named)}", markup=False, highlight=False)
    return True


def on_hub(source: Source, limit: int) -> list[Draft]:
    """Repositories that name the target as their base model and a format in name or tags; smaller models beside it."""
    api = HfApi()
    target = source.path_or_id
    wanted = cast(Any, ["safetensors", "tags", "downloads", "config"])
    info = api.model_info(target, revision=source.revision, expand=["safetensors", "config"])
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


def in_cache(source: Source) -> list[Draft]:
    """Cached checkpoints that fit the target: heads by their tensors, draft models by size and tokenizer."""
    is_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # do not wait for the Hub at every file
    try:
        return _fitting(without_weights(source), source.path_or_id)
    finally:
        constants.HF_HUB_OFFLINE = is_offline


def _fitting(target: PreTrainedModel, target_name: str) -> list[Draft]:
    found = []
    try:
        names = {repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return []
    for name in names - {target_name}:
        try:
            drafter = workloads.strategies([name])[1]
            fits = all(finding.result != BAD for finding in check(drafter, target))
            tensors = open_checkpoint(Source(name)).tensors.values()
        except (OSError, ValueError, ImportError):
            continue  # neither a head nor a draft model
        size = sum(prod(info.shape) for info in tensors) / target.num_parameters()
        if fits and (size <= MAX_RATIO or drafter.name != DRAFT):
            found.append(Draft(name, drafter.name, size))
    return found


def _ratio(safetensors: object, total: int | None) -> float | None:
    parameters = getattr(safetensors, "total", None)
    return parameters / total if parameters and total else None
