"""`hf-specgen find`: draft models and heads for a target, on the Hub or in the local cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, prod
from typing import Any, cast

from huggingface_hub import HfApi, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound, HfHubHTTPError
from rich.box import SIMPLE
from rich.table import Table

from hf_specgen.candidates import AutoCandidates, DraftModelCandidates
from hf_specgen.cli.settings import FindSettings, terminal
from hf_specgen.cli.static_checks import BAD, blueprint, heads, support, tokenizers
from hf_specgen.evaluation.workloads import BLOCK, DRAFT, EAGLE, HEAD_NAMES, MEDUSA, MTP, PEAGLE
from hf_specgen.heads.checkpoint import Source, open_checkpoint

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
class Draft:
    """A checkpoint that may draft for a target: its size is a fraction of the target's parameters, if it is known."""

    name: str
    kind: str
    size: float | None
    downloads: int = 0

    @property
    def rank(self) -> tuple[int, float, int]:
        """Heads first, by format; then the smaller ones, and those that are used more."""
        return list(KINDS).index(self.kind), inf if self.size is None else self.size, -self.downloads


def show(settings: FindSettings) -> bool:
    """Print what was found, best first; returns False if that is nothing."""
    console, place = terminal(), "the local cache"
    if not (settings.offline or constants.HF_HUB_OFFLINE):
        try:
            place, found = "the Hub", on_hub(settings.model, settings.limit)
        except (HfHubHTTPError, OSError) as error:
            console.print(f"the Hub cannot be reached ({type(error).__name__}); looking in the local cache")
            place = "the local cache"
    if place != "the Hub":
        found = in_cache(settings.model)
    found = sorted(found, key=lambda draft: draft.rank)[: settings.limit]
    if not found:
        console.print(f"nothing was found for {settings.model!r} in {place}; the presets need no checkpoint")
        return False
    titles = ("checkpoint", "format", "of the target's size", "downloads")
    view = Table(*titles, box=SIMPLE, pad_edge=False, title=f"for {settings.model}, in {place}", title_justify="left")
    for one in found:
        view.add_row(one.name, one.kind, "" if one.size is None else f"{one.size:.1%}", str(one.downloads or ""))
    console.print(view)
    options = " ".join(f"--{'draft' if one.kind == DRAFT else 'heads'} {one.name}" for one in found[:3])
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


def in_cache(target: str) -> list[Draft]:
    """Cached checkpoints that fit the target: heads by their tensors, draft models by size and tokenizer."""
    try:
        names = [repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    plan, found = blueprint(target, "auto"), []
    for name in set(names) - {target}:
        try:
            kind = type(AutoCandidates.from_pretrained(name)).__name__
            tensors = open_checkpoint(Source(name)).tensors.values()
            size = sum(prod(info.shape) for info in tensors) / plan.model.num_parameters()
            if kind == DraftModelCandidates.__name__:
                draft = blueprint(name, "auto")
                checks = [support(draft, "draft"), *tokenizers(plan, draft)]
                fits = size <= MAX_RATIO and all(check.result != BAD for check in checks)
            else:
                fits = kind in HEAD_NAMES and all(check.result != BAD for check in heads(name, plan))
        except (OSError, ValueError, ImportError):
            continue  # neither a head nor a draft model
        if fits:
            found.append(Draft(name, HEAD_NAMES.get(kind, DRAFT), size))
    return found
