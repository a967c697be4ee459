"""The latency profile of a target and a strategy: learnt from the first calls on a machine, then fixed and kept."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from statistics import median
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_specgen import compat
from hf_specgen.depth import profiles
from hf_specgen.depth.latency import MAX_SLICES, LatencyModel, Slice, StepLatency
from hf_specgen.depth.recorder import MAX_CATCH_UP_TOKENS, LatencyRecorder

if TYPE_CHECKING:
    from hf_specgen.call import Call
    from hf_specgen.counters import StepRecord

MAX_DEVIATION, CHECKED_STEPS = 2.0, 33
"""Factor by which median times may deviate from the profile, and steps of each kind in a median."""
MAX_PROFILES = 64
"""Profiles that a process keeps; the least recently used are dropped, and read from their files again."""


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

    def view(self, key: tuple[int, int]) -> View:
        """Latencies at a number of rows and a context length, which are the `key` of a slice: see `slice_of`.

        A full profile learns no further slices: the nearest one is used.
        """
        with self._lock:
            if key in self._fixed or self._is_full:
                return View(self._model())
            recorder = self._recorder(key)
            return View(self._model(self._slice(recorder.latest())), False, recorder.wants_plain_step)

    def add(self, step: StepRecord, key: tuple[int, int], unread: int) -> None:
        """Learn from the times of a step; once a slice has enough measurements, fix it and write the file.

        Steps of a fixed slice are compared with it.

        Args:
            step: the outcome of the step.
            key: of its slice, as in `view`.
            unread: tokens of each row that the drafter had not processed before the step.
        """
        with self._lock:
            if key in self._fixed:
                target, drafters = self._fixed[key]
                return self._compare(step, StepLatency(target, drafters[self._default.drafter]), unread)
            if self._is_full:
                return
            recorder = self._recorder(key)
            recorder.add(step, unread)
            if not recorder.complete:
                return
            self._read_file()  # slices that another process has fixed first are used, so that all decide alike
            if not self._is_full:
                self._fixed.setdefault(key, self._slice(recorder.estimate(final=True)))
            if self._description is not None:
                profiles.save(self._description, self._model())

    def _compare(self, step: StepRecord, expected: StepLatency, unread: int) -> None:
        """Warn, once, if step times deviate from the profile."""
        factor = self._check.deviation(step, expected, unread)
        if factor <= MAX_DEVIATION or self._reported or self._description is None:
            return
        self._reported = True
        key = profiles.key_of(self._description)
        warnings.warn(
            f"step times deviate by a factor of {factor:.1f} from the latency profile {key!r}, so draft depths may be "
            f"suboptimal. `hf-specgen profile delete {key}` deletes it, and the next calls measure it again; "
            "`hf-specgen tune MODEL` renews it at once.",
            stacklevel=compat.stacklevel_of_user(),
        )

    @property
    def _is_full(self) -> bool:
        return len(self._fixed) >= MAX_SLICES

    def _model(self, *more: Slice) -> LatencyModel:
        return LatencyModel((*self._fixed.values(), *more), self._default.drafter)

    def _slice(self, latency: StepLatency) -> Slice:
        return Slice(latency.target, {self._default.drafter: latency.drafter})

    def _recorder(self, key: tuple[int, int]) -> LatencyRecorder:
        if key not in self._recorders:
            prior = (self._model() if self._fixed else self._default).at(*key)
            self._recorders[key] = LatencyRecorder(*key, prior, measured=bool(self._fixed))
        return self._recorders[key]

    def _read_file(self) -> None:
        stored = None if self._description is None else profiles.load(profiles.key_of(self._description))
        for one in stored.slices if stored is not None else ():
            if self._default.drafter in one.drafters and not self._is_full:
                self._fixed.setdefault((one.target.batch, one.target.context), one)


_profiles: OrderedDict[tuple[str, str], Profile] = OrderedDict()
_profiles_lock = Lock()


def profile_of(call: Call) -> Profile:
    """The profile of a call's target and strategy, shared by all such calls of the process."""
    strategy = call.drafting.key
    device = getattr(getattr(call.model, "device", None), "type", "cpu")
    default = LatencyModel.default(device, str(strategy[0]), call.drafting.negligible_cost)
    if call.model is None:
        return Profile(default)
    description = profiles.describe(call.model, strategy, call.temperature > 0, call.compiled, False)
    file = str(profiles.directory()), profiles.key_of(description)
    with _profiles_lock:
        profile = _profiles.pop(file, None) or Profile(default, description)
        _profiles[file] = profile
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

    def deviation(self, step: StepRecord, expected: StepLatency, unread: int) -> float:
        """Add a step; returns the factor by which the two kinds of steps deviate from each other, 1.0 if unknown."""
        drafted = any(step.requested)
        if "forward" not in step.seconds or (drafted and unread > MAX_CATCH_UP_TOKENS):
            return 1.0
        seconds = expected.target.seconds_of(step.batch * step.tokens_per_row)
        seconds += expected.drafter.draft(step.passes) if drafted else 0.0
        self._ratios[drafted].append(sum(step.seconds.values()) / seconds)
        if min(map(len, self._ratios)) < CHECKED_STEPS:
            return 1.0
        low, high = sorted(median(ratios) for ratios in self._ratios)
        for ratios in self._ratios:
            ratios.clear()
        return high / max(low, 1e-12)
