"""Findings from measurements, with explanations, and the recommended line of code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hf_specgen.cli.doctor.findings import CheckResult, Finding
from hf_specgen.depth.cost import CostCurve
from hf_specgen.evaluation.intervals import Interval, speedup_interval
from hf_specgen.evaluation.measure import Total
from hf_specgen.evaluation.taps import TapsResult

MIN_SPEEDUP = 1.05
"""Smallest measured speedup for which a strategy is recommended."""
LOW_COST, MODERATE_COST = 1.3, 2.0
"""T(8) / T(1) up to which draft tokens are nearly free, and up to which a high acceptance rate makes up for them."""
LOW_ACCEPTANCE = 0.3
"""Share of accepted draft tokens below which a slow strategy is explained by rejections."""
MEASUREMENT_ERROR = 1.05
"""How far above the tokens per step a measured speedup may be: the first token of a call is not counted as a step."""
TAPS_MARGIN = 1.05
"""How many times more tokens per step neighbouring taps must have: heads with several taps lose little by one layer."""
LINE = "model.generate(**inputs, candidate_generator={})"


@dataclass(frozen=True)
class Speed:
    """The measured speed of a strategy.

    Args:
        tokens_per_second: throughput.
        interval: speedup over plain `generate`, with its confidence interval over calls.
        tokens_per_step: mean, bonus token included.
        acceptance_rate: accepted / drafted.
        drafted: number of draft tokens.
    """

    tokens_per_second: float
    interval: Interval
    tokens_per_step: float
    acceptance_rate: float
    drafted: int

    @classmethod
    def of(cls, total: Total, plain: Total) -> Speed:
        """From the totals of a strategy and of plain `generate` on the same batches."""
        ours, theirs = total.samples, plain.samples
        interval = speedup_interval(
            [sample.tokens for sample in ours],
            [sample.seconds for sample in ours],
            [sample.tokens for sample in theirs],
            [sample.seconds for sample in theirs],
        )
        rate, accepted = total.tokens_per_second, total.acceptance_rate
        return cls(rate, interval, total.tokens_per_step, accepted, total.drafted)

    @property
    def speedup(self) -> str:
        """The speedup and its interval, such as "1.32x plain (1.21-1.40)"."""
        return f"{self.interval.value:.2f}x plain ({self.interval.low:.2f}-{self.interval.high:.2f})"

    @property
    def plausible(self) -> bool:
        """Whether the speedup is possible: a step takes no less than a plain one, so it is at most tokens per step."""
        return self.interval.value <= MEASUREMENT_ERROR * max(1.0, self.tokens_per_step)

    @property
    def faster(self) -> bool:
        """Whether the strategy was clearly faster than plain `generate`."""
        return self.plausible and self.interval.low > 1 and self.interval.value >= MIN_SPEEDUP

    def to_dict(self) -> dict[str, float]:
        """Numbers by name, ready for JSON."""
        interval = asdict(self.interval)
        return {
            "tokens_per_second": self.tokens_per_second,
            "speedup": interval["value"],
            "speedup_low": interval["low"],
            "speedup_high": interval["high"],
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
        }


def verification_cost(curve: CostCurve, packable: bool = False) -> Finding:
    """Whether this machine reads eight tokens in about the time of one.

    Args:
        curve: latencies of the target's forward pass.
        packable: whether the target has weights that only `pack_weights=True` packs.
    """
    ratio = curve.relative(8)
    found = (
        f"T(1) {1000 * curve(1):.1f} ms; reading 8 tokens takes {ratio:.2f} times as long, 16 tokens "
        f"{curve.relative(16):.2f} times (batch size {curve.batch})"
    )
    if ratio <= LOW_COST:
        meaning = "decoding is bound by memory bandwidth here: draft tokens are nearly free"
        return Finding("verification", CheckResult.GOOD, found, meaning)
    if packable:
        meaning = "matrix products rearrange the weights here: give pack_weights=True, which takes their memory again"
        return Finding("verification", CheckResult.WARNING, found, meaning)
    if ratio <= MODERATE_COST:
        meaning = "draft tokens take time: a high acceptance rate is needed"
        return Finding("verification", CheckResult.WARNING, found, meaning)
    meaning = "decoding is bound by computation here: only text that repeats itself is faster; try a smaller batch"
    return Finding("verification", CheckResult.WARNING, found, meaning)


def speed(name: str, measured: Speed) -> Finding:
    """The measured speed of a strategy."""
    found = (
        f"{measured.speedup}, {measured.tokens_per_step:.2f} tokens per step, "
        f"{measured.acceptance_rate:.0%} of draft tokens accepted"
    )
    result = CheckResult.GOOD if measured.faster else CheckResult.WARNING
    return Finding(name, result, found, "" if measured.faster else _explanation(measured))


def taps(compared: Sequence[TapsResult]) -> Finding:
    """Whether a head does best with the hidden states that its checkpoint names.

    Args:
        compared: the configured taps first, then their neighbours.
    """
    configured, *neighbours = compared
    found = f"{configured.taps}: {configured.tokens_per_step:.2f} tokens per step"
    found += "".join(f"; {one.taps}: {one.tokens_per_step:.2f}" for one in neighbours)
    best = max(neighbours, key=lambda one: one.tokens_per_step, default=configured)
    if best.tokens_per_step > TAPS_MARGIN * configured.tokens_per_step:
        meaning = "the head was trained with another convention than its config says: "
        meaning += f"use aux_hidden_state_layers={best.taps}"
        return Finding("taps", CheckResult.WARNING, found, meaning)
    return Finding("taps", CheckResult.GOOD, found)


def same_tokens(totals: Mapping[str, Total], exact: bool) -> Finding:
    """Whether the tokens are those of plain `generate`."""
    different = [name for name, total in totals.items() if not total.identical]
    if not different:
        return Finding("same tokens", CheckResult.GOOD, "every answer is that of plain generate")
    found = f"answers of {', '.join(different)} differ from plain generate"
    if exact:
        meaning = "in float32 that must not happen: please report it, with the model's name"
        return Finding("same tokens", CheckResult.BAD, found, meaning)
    meaning = "rounding decides near-ties differently in this data type, as it does between batch sizes"
    return Finding("same tokens", CheckResult.WARNING, found, meaning)


def recommend(speeds: Mapping[str, Speed], codes: Mapping[str, str]) -> tuple[str, str]:
    """The line of code for the fastest strategy, and the reason.

    Args:
        speeds: of each strategy, by name.
        codes: how each strategy is built, by name; the cheapest one first.
    """
    faster = [name for name, measured in speeds.items() if measured.faster]
    if faster:
        best = max(faster, key=lambda name: speeds[name].interval.value)
        return LINE.format(codes[best]), f"the fastest in the quick benchmark: {speeds[best].speedup}"
    first = next(iter(codes))
    return LINE.format(codes[first]), (
        'no strategy was clearly faster on these prompts; k="auto" then drafts almost nothing, and more where text '
        "repeats itself"
    )


def _explanation(measured: Speed) -> str:
    if not measured.plausible:
        return (
            f"not possible: {measured.tokens_per_step:.2f} tokens per step allow at most that speedup; another process "
            "used the machine meanwhile, so measure again"
        )
    if measured.drafted == 0:
        return "nothing was drafted"
    if not measured.interval.differs:
        return "the interval includes 1: no difference was shown; more --rounds make it smaller"
    if measured.acceptance_rate < LOW_ACCEPTANCE:
        return "few draft tokens are accepted: text without repetition, a high temperature, or an unrelated draft"
    return "draft tokens are accepted, but drafting and verifying them takes too long; a larger target gains more"
