"""The examination: static checks first, then a quick benchmark."""

from __future__ import annotations

from typing import Any

import torch

from hf_specgen.cli.doctor import recommend, static_checks
from hf_specgen.cli.doctor.blueprint import Blueprint, blueprint
from hf_specgen.cli.doctor.findings import Finding, Report
from hf_specgen.cli.settings import DoctorSettings
from hf_specgen.evaluation.strategies import strategies
from hf_specgen.evaluation.workloads import check_device


def examine(settings: DoctorSettings) -> Report:
    """Check a target, with a draft model and heads if they are given.

    If a static check finds a problem, no weights are loaded.

    Args:
        settings: what to examine.

    Returns:
        the findings and a recommendation.

    Raises:
        OSError, ValueError: if a model cannot be found or is no causal language model.
    """
    check_device(settings.device)
    report = Report()
    target = blueprint(settings.model, settings.dtype)
    draft = blueprint(settings.draft, settings.dtype) if settings.draft else None
    report.findings += _static(settings, target, draft)
    if report.bad:
        report.reason = "solve what is marked with ✗ first"
    elif settings.run:
        _run(settings, target, report)
    else:
        most = strategies(settings.draft, settings.heads)[-1]
        report.recommendation = recommend.LINE.format(most.code)
        report.reason = "the static checks found no problem; the speed was not measured"
    return report


def _static(settings: DoctorSettings, target: Blueprint, draft: Blueprint | None) -> list[Finding]:
    findings = [static_checks.support(target, "target")]
    if draft is not None:
        findings.append(static_checks.support(draft, "draft"))
        findings += static_checks.tokenizers(target, draft)
        findings.append(static_checks.size_ratio(target, draft))
    if settings.heads:
        findings += static_checks.heads(settings.heads, target)
    models = [target] if draft is None else [target, draft]
    findings.append(static_checks.memory(models, settings.batch_size, settings.length, settings.device))
    return findings


def _run(settings: DoctorSettings, target: Blueprint, report: Report) -> None:
    from hf_specgen.cli.doctor.quick_benchmark import PROMPTS, QuickBenchmark

    found = strategies(settings.draft, settings.heads, dtype=target.dtype)
    benchmark = QuickBenchmark(settings.model, found, target.dtype, settings.device, settings.batch_size)
    report.findings.append(recommend.verification_cost(benchmark.cost_curve()))
    generation: dict[str, Any] = {"do_sample": False, "max_new_tokens": settings.max_new_tokens}
    if settings.temperature:
        generation |= {"do_sample": True, "temperature": settings.temperature}
    if compared := benchmark.compare_taps(settings.prompt or PROMPTS, generation):
        report.findings.append(recommend.taps(compared))
        report.measured |= {f"taps {one.taps}": {"tokens_per_step": one.tokens_per_step} for one in compared}
    totals, plain = benchmark.run(settings.prompt or PROMPTS, settings.rounds, generation)
    report.findings.append(recommend.same_tokens(totals, exact=target.dtype == torch.float32))
    report.measured["plain"] = {"tokens_per_second": plain.tokens_per_second, "speedup": 1.0}
    speeds = {name: recommend.Speed.of(total, plain) for name, total in totals.items()}
    for name, speed in speeds.items():
        report.measured[name] = speed.to_dict()
        report.findings.append(recommend.speed(name, speed))
    report.recommendation, report.reason = recommend.recommend(speeds, {one.name: one.code for one in found})
