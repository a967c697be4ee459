"""The examination: on paper first, then a quick run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_specgen.cli.doctor import recommend, static_checks
from hf_specgen.cli.doctor.blueprint import Blueprint, blueprint
from hf_specgen.cli.doctor.findings import Finding, Report
from hf_specgen.cli.doctor.heads import heads as check_heads


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine; every field is an option of `hf-specgen doctor`."""

    model: str
    draft: str = ""
    heads: str = ""
    prompts: tuple[str, ...] = ()
    batch_size: int = 1
    length: int = 2048
    temperature: float = 0.0
    max_new_tokens: int = 96
    dtype: str = "auto"
    device: str = "cpu"
    run: bool = True


def examine(settings: DoctorSettings) -> Report:
    """Check a target, with a draft and heads if there are any.

    What is bad on paper ends the examination: nothing is loaded then.

    Args:
        settings: what to examine.

    Returns:
        the findings and a recommendation.

    Raises:
        OSError, ValueError: if a model cannot be found or is no causal language model.
    """
    report = Report()
    target = blueprint(settings.model, settings.dtype)
    draft = blueprint(settings.draft, settings.dtype) if settings.draft else None
    report.findings += _on_paper(settings, target, draft)
    if report.bad:
        report.reason = "settle what is marked with ✗ first"
        return report
    if settings.run:
        _run(settings, target, report)
    else:
        report.recommendation = recommend.LINE.format(_codes(settings)[_most(settings)])
        report.reason = "nothing speaks against it on paper; it was not measured"
    return report


def _on_paper(settings: DoctorSettings, target: Blueprint, draft: Blueprint | None) -> list[Finding]:
    findings = [static_checks.support(target, "target")]
    if draft is not None:
        findings.append(static_checks.support(draft, "draft"))
        findings += static_checks.tokenizers(target, draft)
        findings.append(static_checks.size_ratio(target, draft))
    if settings.heads:
        findings += check_heads(settings.heads, target)
    models = [target] if draft is None else [target, draft]
    findings.append(static_checks.memory(models, settings.batch_size, settings.length, settings.device))
    return findings


def _run(settings: DoctorSettings, target: Blueprint, report: Report) -> None:
    from hf_specgen.cli.doctor.quick_benchmark import PLAIN, PROMPTS, Trial

    trial = Trial(settings.model, settings.draft, target.dtype, settings.device, settings.batch_size)
    report.findings.append(recommend.width(trial.costs()))
    generation: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        generation = {"do_sample": True, "temperature": settings.temperature}
    totals = trial.race(settings.prompts or PROMPTS, settings.max_new_tokens, generation)
    report.findings.append(recommend.same_tokens(totals, target.dtype == torch.float32))
    for name, total in totals.items():
        rate = total.tokens_per_second
        report.measured[name] = {"tokens_per_second": rate, "speedup": rate / totals[PLAIN].tokens_per_second}
        if name != PLAIN:
            report.findings.append(recommend.speed(name, total, totals[PLAIN]))
    report.recommendation, report.reason = recommend.recommend(totals, PLAIN, _codes(settings))


def _codes(settings: DoctorSettings) -> dict[str, str]:
    """How each strategy is written, the cheapest first."""
    ngram, draft = "NgramCandidates()", f'DraftModelCandidates("{settings.draft}")'
    codes = {"n-grams": ngram}
    if settings.draft:
        codes |= {"draft model": draft, "n-grams, draft model": f"AutoCandidates([{ngram}, {draft}])"}
    return codes


def _most(settings: DoctorSettings) -> str:
    return "n-grams, draft model" if settings.draft else "n-grams"


def exit_code(report: Report) -> int:
    """1 if something has to be settled first, else 0."""
    return int(bool(report.bad))
