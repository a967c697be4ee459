"""From what was measured to a line of code: the decision tree of the README's "When it helps, when it does not"."""

from __future__ import annotations

from hf_specgen.cli.doctor.findings import CheckResult, Finding
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.evaluation.measure import Total

CLEAR = 1.05
CHEAP_WIDTH, DEAR_WIDTH = 1.3, 2.0
LINE = "model.generate(**inputs, candidate_generator={})"


def width(curve: CostCurve) -> Finding:
    """Does this machine score eight tokens in about the time of one?"""
    ratio = curve.relative(8)
    found = (
        f"T(1) {1000 * curve(1):.1f} ms; scoring 8 tokens costs {ratio:.2f} of one, 16 cost {curve.relative(16):.2f}"
    )
    found += f" (batch {curve.batch})"
    if ratio <= CHEAP_WIDTH:
        return Finding(
            "verification", CheckResult.GOOD, found, "decoding is memory-bound here: draft tokens are nearly free"
        )
    if ratio <= DEAR_WIDTH:
        return Finding(
            "verification", CheckResult.WARNING, found, "draft tokens cost time: a high acceptance rate is needed"
        )
    meaning = (
        "the machine is busy with one token a row already: only text that repeats itself gains; try a smaller batch"
    )
    return Finding("verification", CheckResult.WARNING, found, meaning)


def speed(name: str, total: Total, plain: Total) -> Finding:
    """What a strategy brought in the quick run."""
    speedup = total.tokens_per_second / plain.tokens_per_second
    found = f"{speedup:.2f}x plain, {total.tokens_per_step:.2f} tokens a step, {total.acceptance_rate:.0%} accepted"
    if speedup >= CLEAR:
        return Finding(name, CheckResult.GOOD, found)
    return Finding(name, CheckResult.WARNING, found, _why(total))


def same_tokens(totals: dict[str, Total], exact: bool) -> Finding:
    """Whether the text was that of plain `generate`."""
    different = [name for name, total in totals.items() if not total.identical]
    if not different:
        return Finding("same tokens", CheckResult.GOOD, "every answer is that of plain generate")
    found = f"answers of {', '.join(different)} differ from plain generate"
    if exact:
        meaning = "in float32 that must not happen: please report it, with the model's name"
        return Finding("same tokens", CheckResult.BAD, found, meaning)
    return Finding(
        "same tokens", CheckResult.WARNING, found, "near-ties fall differently in this dtype, as between batch sizes"
    )


def recommend(totals: dict[str, Total], plain: str, codes: dict[str, str]) -> tuple[str, str]:
    """The line for the fastest variant, and why.

    Args:
        totals: of the quick run.
        plain: the name of plain `generate` among them.
        codes: how each strategy is built, by name; the cheapest first.
    """
    base = totals[plain].tokens_per_second
    speedups = {name: totals[name].tokens_per_second / base for name in codes}
    best = max(speedups, key=lambda name: speedups[name])
    if speedups[best] >= CLEAR:
        return LINE.format(codes[best]), f"the fastest in the quick run: {speedups[best]:.2f}x plain"
    first = next(iter(codes))
    return LINE.format(codes[first]), (
        'nothing was clearly faster on these prompts; k="auto" then drafts next to nothing, and takes its chance where '
        "the text repeats itself"
    )


def _why(total: Total) -> str:
    if total.drafted == 0:
        return "it found nothing worth guessing"
    if total.acceptance_rate < 0.3:
        return (
            "few guesses are right here: text that repeats little, a high temperature, or a draft trained on other text"
        )
    return "guesses are right, but scoring or drafting them costs as much as they save: a larger target gains more"
