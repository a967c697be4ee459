"""What can be checked without loading weights: support, tokenizers, sizes, memory."""

from __future__ import annotations

import os

import torch

from hf_specgen.cli.doctor.blueprint import Blueprint, gigabytes, readable
from hf_specgen.cli.doctor.findings import CheckResult, Finding
from hf_specgen.target.support import check_model

SMALL_DRAFT, LARGE_DRAFT = 0.12, 0.35
FULL = 0.85


def support(model: Blueprint, role: str) -> Finding:
    """Whether the model can verify trees: attention implementation, positions, a cache that can be rolled back."""
    kind = f"{type(model.model).__name__}, attention {model.config._attn_implementation!r}"
    try:
        check_model(model.model)
    except ValueError as error:
        return Finding(f"{role} support", CheckResult.BAD, kind, str(error))
    return Finding(f"{role} support", CheckResult.GOOD, f"{kind}, key/value cache that can be rolled back")


def tokenizers(target: Blueprint, draft: Blueprint) -> list[Finding]:
    """Whether the two mean the same token by the same number, end alike, and are prompted alike."""
    sizes = f"{target.config.vocab_size} and {draft.config.vocab_size} entries in the models' tables"
    a, b = target.tokenizer, draft.tokenizer
    if a is None or b is None:
        missing = target.name if a is None else draft.name
        same = target.config.vocab_size == draft.config.vocab_size
        found = f"no tokenizer found for {missing!r}; {sizes}"
        meaning = "whether the two fit cannot be told; give folders that hold their tokenizers"
        return [Finding("tokenizers", CheckResult.WARNING if same else CheckResult.BAD, found, meaning)]
    different = set(a.get_vocab().items()) ^ set(b.get_vocab().items())
    if different:
        found = f"{len(different)} entries differ"
        meaning = "a draft must share the target's tokenizer; use a model of the same family"
        return [Finding("tokenizers", CheckResult.BAD, found, meaning)]
    findings = [Finding("tokenizers", CheckResult.GOOD, f"all {len(a.get_vocab())} entries are the same; {sizes}")]
    names = ("bos_token_id", "eos_token_id")
    unlike = [
        f"{name} {getattr(a, name)} and {getattr(b, name)}" for name in names if getattr(a, name) != getattr(b, name)
    ]
    if unlike:
        meaning = "the draft was trained on texts that begin or end differently: fewer of its guesses will be accepted"
        findings.append(Finding("special tokens", CheckResult.WARNING, ", ".join(unlike), meaning))
    else:
        findings.append(Finding("special tokens", CheckResult.GOOD, "the same"))
    if a.chat_template and a.chat_template != b.chat_template:
        found = "the draft has none" if not b.chat_template else "they differ"
        meaning = (
            "prompts follow the target's template; a draft that does not know it guesses worse: distil one from it"
        )
        findings.append(Finding("chat template", CheckResult.WARNING, found, meaning))
    elif a.chat_template:
        findings.append(Finding("chat template", CheckResult.GOOD, "the same"))
    return findings


def size_ratio(target: Blueprint, draft: Blueprint) -> Finding:
    """A draft is run once per guess: it must cost a small part of the target."""
    ratio = draft.weight_bytes / target.weight_bytes
    found = (
        f"{readable(draft.parameters)} / {readable(target.parameters)} parameters, {ratio:.0%} of the target's bytes"
    )
    if ratio <= SMALL_DRAFT:
        return Finding("draft size", CheckResult.GOOD, found)
    if ratio <= LARGE_DRAFT:
        meaning = "pays only if most guesses are accepted; about a tenth of the target is safe"
        return Finding("draft size", CheckResult.WARNING, found, meaning)
    meaning = "a draft this large seldom pays; take one of a tenth of the target"
    return Finding("draft size", CheckResult.WARNING, found, meaning)


def memory(models: list[Blueprint], batch: int, length: int, device: str, available: int | None = None) -> Finding:
    """Weights and caches against what is free.

    Args:
        models: the target, and a draft if there is one.
        batch, length: rows, and tokens per row, prompt included.
        device: where they go.
        available: bytes that are free there; looked up if left out.
    """
    weights = sum(model.weight_bytes for model in models)
    caches = sum(model.cache_bytes(batch, length) for model in models)
    free = free_bytes(device) if available is None else available
    found = f"weights {gigabytes(weights)}, caches for {batch} x {length} tokens {gigabytes(caches)}"
    if free is None:
        return Finding("memory", CheckResult.WARNING, found, f"how much of {device} is free could not be found out")
    found += f"; {gigabytes(free)} free on {device}"
    if weights + caches > free:
        meaning = "does not fit: a smaller batch or length, a smaller dtype, device_map='auto', or a smaller draft"
        return Finding("memory", CheckResult.BAD, found, meaning)
    if weights + 2 * caches > FULL * free:
        return Finding("memory", CheckResult.WARNING, found, "a tight fit: the cache doubles as it grows")
    return Finding("memory", CheckResult.GOOD, found)


def free_bytes(device: str) -> int | None:
    """Free memory of a device, None if unknown."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0]) if torch.cuda.is_available() else None
    if torch.device(device).type != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            amounts = dict(line.split(":", 1) for line in file)
        return 1024 * int(amounts["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
