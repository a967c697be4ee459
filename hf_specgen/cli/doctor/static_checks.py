"""Checks that load no weights: support, tokenizers, sizes, heads, memory."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from hf_specgen.cli.doctor.blueprint import Blueprint, gigabytes, readable
from hf_specgen.cli.doctor.findings import CheckResult, Finding
from hf_specgen.compat import attention_implementation
from hf_specgen.heads.checkpoint import Source, open_checkpoint
from hf_specgen.heads.compatibility import check_heads
from hf_specgen.heads.head_formats import holds_medusa, load_head
from hf_specgen.heads.medusa_formats import inspect_medusa
from hf_specgen.heads.mtp_format import has_mtp_layers
from hf_specgen.targets.support import check_model

SMALL_DRAFT, LARGE_DRAFT = 0.12, 0.35
"""Bytes of a draft model relative to the target: up to the first it is cheap, above the second rarely faster."""
TIGHT_MEMORY = 0.85
"""Share of the free memory above which a fit is called tight: activations and other processes need some too."""


def support(model: Blueprint, role: str) -> Finding:
    """Whether the model can verify draft trees: attention implementation, positions, a cache with rollback."""
    kind = f"{type(model.model).__name__}, attention {attention_implementation(model.config)!r}"
    try:
        check_model(model.model)
    except ValueError as error:
        return Finding(f"{role} support", CheckResult.BAD, kind, str(error))
    return Finding(f"{role} support", CheckResult.GOOD, f"{kind}, key/value cache that can be rolled back")


def tokenizers(target: Blueprint, draft: Blueprint) -> list[Finding]:
    """Whether both models have the same vocabulary, special tokens and chat template."""
    sizes = f"embedding tables of {target.config.vocab_size} and {draft.config.vocab_size} rows"
    a, b = target.tokenizer, draft.tokenizer
    if a is None or b is None:
        missing = target.name if a is None else draft.name
        same = target.config.vocab_size == draft.config.vocab_size
        found = f"no tokenizer could be loaded for {missing!r}; {sizes}"
        meaning = "the tokenizers cannot be compared; give folders that hold them"
        return [Finding("tokenizers", CheckResult.WARNING if same else CheckResult.BAD, found, meaning)]
    different = set(a.get_vocab().items()) ^ set(b.get_vocab().items())
    if different:
        found = f"{len(different)} entries differ"
        meaning = "a draft model must share the target's tokenizer; use one of the same family"
        return [Finding("tokenizers", CheckResult.BAD, found, meaning)]
    findings = [Finding("tokenizers", CheckResult.GOOD, f"all {len(a.get_vocab())} entries are the same; {sizes}")]
    names = ("bos_token_id", "eos_token_id")
    unlike = [
        f"{name} {getattr(a, name)} and {getattr(b, name)}" for name in names if getattr(a, name) != getattr(b, name)
    ]
    if unlike:
        meaning = "the draft model was trained on texts that begin or end differently: fewer draft tokens are accepted"
        findings.append(Finding("special tokens", CheckResult.WARNING, ", ".join(unlike), meaning))
    else:
        findings.append(Finding("special tokens", CheckResult.GOOD, "the same"))
    if a.chat_template and a.chat_template != b.chat_template:
        found = "the draft model has none" if not b.chat_template else "they differ"
        meaning = "prompts use the target's template: fewer tokens of a draft model trained without it are accepted"
        findings.append(Finding("chat template", CheckResult.WARNING, found, meaning))
    elif a.chat_template:
        findings.append(Finding("chat template", CheckResult.GOOD, "the same"))
    return findings


def size_ratio(target: Blueprint, draft: Blueprint) -> Finding:
    """Whether the draft model, which runs once per draft token, is small enough."""
    ratio = draft.weight_bytes / target.weight_bytes
    found = (
        f"{readable(draft.parameters)} / {readable(target.parameters)} parameters, {ratio:.0%} of the target's bytes"
    )
    if ratio <= SMALL_DRAFT:
        return Finding("draft size", CheckResult.GOOD, found)
    if ratio <= LARGE_DRAFT:
        meaning = "faster only if most draft tokens are accepted; about a tenth of the target is safe"
        return Finding("draft size", CheckResult.WARNING, found, meaning)
    meaning = "a draft model of this size is rarely faster; use one of a tenth of the target"
    return Finding("draft size", CheckResult.WARNING, found, meaning)


def heads(name: str, target: Blueprint) -> list[Finding]:
    """Whether heads, in any format that can be loaded, belong to the target.

    Args:
        name: folder or Hub id of the heads.
        target: the target.
    """
    try:
        if not holds_medusa(Source(name)):
            return _draft_head(name, target)
        config = inspect_medusa(name).config
    except (OSError, ValueError) as error:
        return [Finding("heads", CheckResult.BAD, f"{name!r} cannot be read", str(error))]
    findings = [Finding("heads", CheckResult.GOOD, f"{config.num_heads} heads, layers in each: {config.num_layers}")]
    config.vocab_size = config.vocab_size or target.config.vocab_size  # Medusa v2 does not state it
    try:
        check_heads(config, target.model, "this set of heads")
    except ValueError as error:
        findings.append(Finding("heads' target", CheckResult.BAD, "not this target", str(error)))
    return findings + _base(str((config.base or {}).get("name_or_path") or ""), target)


def _draft_head(name: str, target: Blueprint) -> list[Finding]:
    """The same for heads that read several hidden states, and for the layers in a target's own checkpoint."""
    if has_mtp_layers(open_checkpoint(Source(name))):
        return [Finding("heads", CheckResult.GOOD, "MTP layers in the target's own checkpoint")]
    head = load_head(name)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    findings = [Finding("heads", CheckResult.GOOD, f"{type(head).__name__}, {readable(parameters)} parameters")]
    try:
        taps = head.bind(target.model).aux_hidden_state_layers
        findings[0] = replace(findings[0], found=f"{findings[0].found}, reads hidden states {taps}")
    except ValueError as error:
        findings.append(Finding("heads' target", CheckResult.BAD, "not this target", str(error)))
    return findings + _base(head.config.base_model or "", target)


def _base(base: str, target: Blueprint) -> list[Finding]:
    """A warning if heads were trained on a model of another name."""
    if not base or base.rstrip("/").split("/")[-1] == target.name.rstrip("/").split("/")[-1]:
        return []
    meaning = "draft tokens are accepted only if the heads were trained on this very model"
    return [Finding("heads' base", CheckResult.WARNING, f"trained on {base!r}, not {target.name!r}", meaning)]


def memory(models: list[Blueprint], batch: int, length: int, device: str, available: int | None = None) -> Finding:
    """Weights and caches, compared with the free memory.

    Args:
        models: the target, and a draft model if there is one.
        batch, length: rows, and tokens per row, prompt included.
        device: where they are loaded.
        available: bytes that are free there; looked up if left out.
    """
    weights = sum(model.weight_bytes for model in models)
    caches = sum(model.cache_bytes(batch, length) for model in models)
    free = free_bytes(device) if available is None else available
    found = f"weights {gigabytes(weights)}, caches for {batch} x {length} tokens {gigabytes(caches)}"
    if free is None:
        return Finding("memory", CheckResult.WARNING, found, f"the free memory of {device} is unknown")
    found += f"; {gigabytes(free)} free on {device}"
    if weights + caches > free:
        meaning = "does not fit: use a smaller batch, length, dtype or draft model, or device_map='auto'"
        return Finding("memory", CheckResult.BAD, found, meaning)
    if weights + caches > TIGHT_MEMORY * free:
        return Finding("memory", CheckResult.WARNING, found, "a tight fit: activations need memory too")
    return Finding("memory", CheckResult.GOOD, found)


def free_bytes(device: str) -> int | None:
    """Free memory of a device; None if unknown."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0]) if torch.cuda.is_available() else None
    if torch.device(device).type != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            amounts = dict(line.split(":", 1) for line in file)
        return 1024 * int(amounts["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux: all of the memory, where the system reports it (Windows does not)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
