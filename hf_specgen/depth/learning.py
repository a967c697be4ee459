"""Learns the latencies of a target and a strategy from the step times of the first calls, then fixes them."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import median, median_low
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_specgen.depth import profiles
from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import MAX_SLICES, DraftLatency, LatencyModel, Slice, StepLatency

if TYPE_CHECKING:
    from hf_specgen.depth.policy import StepRecord
    from hf_specgen.state import Call

GRID = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
"""Sizes (tokens per row) that times are binned by. Small ones are told apart, since kernels differ: on a processor with
AVX2, a step of 3 or 7 tokens in float32 takes 1.4 times as long as one of 4 or 8."""
KEPT = 7
"""Measurements that a median is taken over: three of them may be outliers."""
PRIOR_SPREAD = 8.0
"""Weight of the prior in the slope of a regression: as much as that of two sizes four tokens apart."""
PLAIN_NEEDED, DRAFTED_NEEDED = 5, 12
"""Measured plain steps, and steps with a draft, after which a slice is fixed: a call of 128 tokens has more."""
PLAIN_EVERY = 8
"""One step in so many is plain until enough plain steps are measured."""
CATCHING_UP = 16
"""Tokens that a drafter can catch up on in about the time of one pass; more are measured as its prefill."""
CONTRADICTION, CHECKED_STEPS = 2.0, 33
"""Factor by which median times may deviate from the profile, and steps of each kind in a median."""
MAX_PROFILES = 64
"""Profiles that a process keeps; the least recently used are dropped, and read from their files again."""


class LatencyRecorder:
    """Learns one slice of a latency model.

    Args:
        rows, context: of the slice.
        prior: latencies of a similar slice, or the default of the device.
        measured: whether the prior was measured on this machine.
    """

    def __init__(self, rows: int, context: int, prior: StepLatency, measured: bool):
        self.rows, self.context, self._prior, self._measured = rows, context, prior, measured
        self._target: dict[int, deque[float]] = {}
        self._drafts: dict[int, deque[tuple[float, int]]] = {}  # by tokens of a pass: seconds, and passes
        self._empty: deque[float] = deque(maxlen=KEPT)
        self._steps = self._drafted = 0
        self._has_drafted = False
        self._prefill_seconds = self._prefill_tokens = 0.0

    def add(self, step: StepRecord, unread: int) -> None:
        """Add a step before which the drafter had not processed the last `unread` tokens of each row."""
        self._steps += 1
        draft = step.seconds.get("draft", 0.0)
        if "forward" in step.seconds:
            size = min(GRID, key=lambda size: abs(log2(size / step.tokens_per_row)))
            if size in self._target:  # the first step of each size, a warm-up, is dropped
                self._target[size].append(sum(step.seconds.values()) - draft)
                self._drafted += step.tokens_per_row > 1
            self._target.setdefault(size, deque(maxlen=KEPT))
        if any(step.requested):
            if self._has_drafted:  # the first draft is dropped too
                self._add_draft(step.passes, draft, unread, step.batch)
            self._has_drafted = True

    def _add_draft(self, passes: Sequence[int], seconds: float, unread: int, rows: int) -> None:
        if unread > CATCHING_UP:
            usual = self._drafter(self._prior.drafter.scaled(0.0)).draft(passes)
            self._prefill_seconds += max(0.0, seconds - usual)
            self._prefill_tokens += unread * rows
        elif sum(passes):
            width = 1 << round(log2(sum(passes) / len(passes)))
            self._drafts.setdefault(width, deque(maxlen=KEPT)).append((seconds, len(passes)))
        else:
            self._empty.append(seconds)

    @property
    def wants_plain_step(self) -> bool:
        """Whether the next step should be plain, to measure its latency."""
        measured = len(self._target.get(1, ()))
        at_once = not self._measured and measured < 2
        return at_once or (measured < PLAIN_NEEDED and self._steps % PLAIN_EVERY == 0)

    @property
    def complete(self) -> bool:
        """Whether enough was measured to fix the slice."""
        return len(self._target.get(1, ())) >= PLAIN_NEEDED and self._drafted >= DRAFTED_NEEDED

    def estimate(self) -> StepLatency:
        """Latencies from the measurements so far: linear between medians, and extrapolated by `_slope`."""
        seconds = {size: median_low(times) for size, times in sorted(self._target.items()) if times}
        if not seconds:
            return self._prior
        first, most = min(seconds), max(seconds)
        plain, reference = self._prior.target.by_tokens(self.rows * np.array([1.0, first])).tolist()
        seconds.setdefault(1, seconds[first] * plain / reference)
        seconds.setdefault(GRID[-1], seconds[most] + self._slope(seconds) * (GRID[-1] - most))
        # Some kernels are slower for fewer tokens; a step with a draft is never assumed to be faster than a plain one.
        points = {size: max(seconds[1], seconds[size]) for size in sorted(seconds)}
        curve = CostCurve(tuple(points), tuple(points.values()), self.context, self.rows)
        return StepLatency(curve, self._drafter(self._prior.drafter.scaled(seconds[1] / plain)))

    def _slope(self, seconds: Mapping[int, float]) -> float:
        """Seconds of one more token per row beyond the largest measured size: a regression over the sizes of drafts.

        It is shrunk towards the prior, as kernels of neighbouring sizes may differ by more than sizes do. The time of
        a plain step is an upper bound only: a kernel for one token may be much faster than one for several.
        """
        plain, second, largest = self._prior.target.by_tokens(self.rows * np.array([1.0, 2.0, GRID[-1]])).tolist()
        prior: float = max(0.0, (largest - second) / (GRID[-1] - 2) * seconds[1] / plain)
        drafted = np.array([(size, time) for size, time in seconds.items() if size > 1]).T
        if not drafted.size:
            return prior
        sizes, times = drafted - drafted.mean(axis=1, keepdims=True)
        slope = (sizes @ times + PRIOR_SPREAD * prior) / (sizes @ sizes + PRIOR_SPREAD)
        most = max(seconds)
        return float(np.clip(slope, 0.0, max(0.0, seconds[most] - seconds[1]) / (most - 1)))

    def _drafter(self, latency: DraftLatency) -> DraftLatency:
        """The given latency of drafting, with measured values where there are any."""
        if self._empty or self._drafts:
            latency = replace(latency, overhead=median_low(self._empty) if self._empty else 0.0)
        if self._drafts:
            by_width = {
                width: median(max(0.0, seconds - latency.overhead) / passes for seconds, passes in drafts)
                for width, drafts in sorted(self._drafts.items())
            }
            rising = np.maximum.accumulate(list(by_width.values())).tolist()  # more tokens never take less time
            latency = replace(latency, tokens=tuple(by_width), seconds=tuple(rising))
        if self._prefill_tokens:
            latency = replace(latency, prefill=self._prefill_seconds / self._prefill_tokens)
        return latency


class View(NamedTuple):
    """Latencies for the next steps.

    Args:
        latency: the model.
        fixed: whether it is final for this number of rows and context.
        wants_plain_step: whether the next step should be plain, to measure its latency.
    """

    latency: LatencyModel
    fixed: bool = True
    wants_plain_step: bool = False


class Profile:
    """The latencies of one strategy on one target: slices that are fixed, and those still being learnt. Thread-safe.

    Args:
        default: assumed before any measurement.
        description: what the latencies depend on; None to keep nothing in a file.
    """

    def __init__(self, default: LatencyModel, description: dict[str, Any] | None = None):
        self._default, self._description, self._lock = default, description, RLock()
        self._recorders: dict[tuple[int, int], LatencyRecorder] = {}
        self._fixed: dict[tuple[int, int], Slice] = {}
        self._check, self._reported = ProfileCheck(), False
        self._read_file()

    def view(self, place: tuple[int, int]) -> View:
        """Latencies at a number of rows and a context length, rounded by `slice_of`."""
        with self._lock:
            if place in self._fixed:
                return View(self._model())
            recorder = self._recorder(place)
            return View(self._model(self._slice(recorder)), False, recorder.wants_plain_step)

    def add(self, step: StepRecord, place: tuple[int, int], unread: int) -> None:
        """Learn from the times of a step; once a slice has enough measurements, fix it and write the file.

        Steps of a fixed slice are compared with it.
        """
        with self._lock:
            if place in self._fixed:
                target, drafters = self._fixed[place]
                return self._compare(step, StepLatency(target, drafters[self._default.drafter]), unread)
            if len(self._fixed) == MAX_SLICES - 1:
                return
            recorder = self._recorder(place)
            recorder.add(step, unread)
            if not recorder.complete:
                return
            self._read_file()  # slices that another process has fixed first are used, so that all decide alike
            self._fixed.setdefault(place, self._slice(recorder))
            if self._description is not None:
                profiles.save(self._description, self._model())

    def _compare(self, step: StepRecord, expected: StepLatency, unread: int) -> None:
        """Warn, once, if step times deviate from the profile."""
        factor = self._check.departure(step, expected, unread)
        if factor <= CONTRADICTION or self._reported or self._description is None:
            return
        self._reported = True
        key = profiles.key_of(self._description)
        warnings.warn(
            f"step times deviate by a factor of {factor:.1f} from the latency profile {key!r}, so draft depths may be "
            f"suboptimal. `hf-specgen profile delete {key}` deletes it, and the next calls measure it again; "
            "`hf-specgen tune MODEL` renews it at once.",
            stacklevel=2,
        )

    def _model(self, *more: Slice) -> LatencyModel:
        return LatencyModel((*self._fixed.values(), *more), self._default.drafter)

    def _slice(self, recorder: LatencyRecorder) -> Slice:
        target, drafter = recorder.estimate()
        return Slice(target, {self._default.drafter: drafter})

    def _recorder(self, place: tuple[int, int]) -> LatencyRecorder:
        if place not in self._recorders:
            prior = (self._model() if self._fixed else self._default).at(*place)
            self._recorders[place] = LatencyRecorder(*place, prior, measured=bool(self._fixed))
        return self._recorders[place]

    def _read_file(self) -> None:
        stored = None if self._description is None else profiles.load(profiles.key_of(self._description))
        for one in stored.slices if stored is not None else ():
            if self._default.drafter in one.drafters:
                self._fixed.setdefault((one.target.batch, one.target.context), one)


_profiles: OrderedDict[tuple[str, str], Profile] = OrderedDict()
_profiles_lock = Lock()


def profile_of(call: Call) -> Profile:
    """The profile of a call's target and strategy, shared by all such calls of the process."""
    key = call.candidates.profile_key()
    device = getattr(getattr(call.model, "device", None), "type", "cpu")
    default = LatencyModel.default(device, str(key[0]), call.candidates.negligible_draft_cost)
    if call.model is None:
        return Profile(default)
    description = profiles.describe(call.model, key, call.temperature > 0, call.compiled)
    place = str(profiles.directory()), profiles.key_of(description)
    with _profiles_lock:
        profile = _profiles.pop(place, None) or Profile(default, description)
        _profiles[place] = profile
        if len(_profiles) > MAX_PROFILES:
            _profiles.popitem(last=False)
        return profile


class ProfileCheck:
    """Compares step times with a profile.

    Only the ratio between steps with and without drafts counts: on a uniformly slower, or busy, machine the best depths
    are the same.
    """

    def __init__(self) -> None:
        self._ratios: tuple[deque[float], deque[float]] = deque(maxlen=CHECKED_STEPS), deque(maxlen=CHECKED_STEPS)

    def departure(self, step: StepRecord, expected: StepLatency, unread: int) -> float:
        """Add a step; returns the factor by which the two kinds of steps deviate from each other, 1.0 if unknown."""
        drafted = any(step.requested)
        if "forward" not in step.seconds or (drafted and unread > CATCHING_UP):
            return 1.0
        seconds = float(expected.target.by_tokens(step.batch * step.tokens_per_row))
        seconds += expected.drafter.draft(step.passes) if drafted else 0.0
        self._ratios[drafted].append(sum(step.seconds.values()) / seconds)
        if min(map(len, self._ratios)) < CHECKED_STEPS:
            return 1.0
        low, high = sorted(median(ratios) for ratios in self._ratios)
        for ratios in self._ratios:
            ratios.clear()
        return high / max(low, 1e-12)
