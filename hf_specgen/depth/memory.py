"""What is kept between the calls of a process, safe to use from several threads: latencies and acceptance."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from hf_specgen.depth import profiles
from hf_specgen.depth.latency import MAX_POINTS, LatencyModel, Slice
from hf_specgen.depth.recorder import CONTRADICTION, LatencyRecorder

if TYPE_CHECKING:
    from hf_specgen.depth.acceptance import Snapshot
    from hf_specgen.depth.policy import StepRecord
    from hf_specgen.state import Call

MAX_PROFILES, MAX_SNAPSHOTS = 64, 64
"""Profiles of a process and snapshots of a target that are kept; those unused for longest are dropped."""


class View(NamedTuple):
    """Latencies for the next steps.

    Args:
        latency: the model.
        fixed: whether it stays as it is under these conditions.
        wants_plain_step: whether the next step should be plain, to be measured.
    """

    latency: LatencyModel
    fixed: bool
    wants_plain_step: bool


class Profile:
    """The latencies of one strategy on one target: slices that are fixed, and those that are still being learnt.

    Args:
        default: assumed before anything was measured.
        description: what the latencies depend on; None if nothing is to be kept in a file.
    """

    def __init__(self, default: LatencyModel, description: dict[str, Any] | None = None):
        self._default, self._description, self._lock = default, description, RLock()
        self._recorders: dict[tuple[int, int], LatencyRecorder] = {}
        self._fixed: dict[tuple[int, int], Slice] = {}
        self._reported = False
        self._take_from_file()

    def view(self, place: tuple[int, int]) -> View:
        """Latencies of a slice, given by its rows and context as `slice_of` rounds them."""
        drafter = self._default.drafter
        with self._lock:
            if place in self._fixed:
                return View(LatencyModel(tuple(self._fixed.values()), drafter), True, False)
            recorder = self._recorder(place)
            step = recorder.estimate()
            current = Slice(step.target, {drafter: step.drafter})
            slices = (*self._fixed.values(), current)[-MAX_POINTS:]
            return View(LatencyModel(slices, drafter), False, recorder.wants_plain_step)

    def add(self, step: StepRecord, place: tuple[int, int], unread: int) -> None:
        """Learn from the times of a step; fixes a slice, and writes it to the file, once enough is known of it."""
        with self._lock:
            if place in self._fixed:
                return
            recorder = self._recorder(place)
            recorder.add(step, unread)
            if recorder.complete and len(self._fixed) < MAX_POINTS:
                latency = recorder.estimate()
                self._take_from_file()  # another process may have fixed slices: all decide by the first
                self._fixed.setdefault(place, Slice(latency.target, {self._default.drafter: latency.drafter}))
                del self._recorders[place]
                if self._description is not None:
                    profiles.save(self._description, LatencyModel(tuple(self._fixed.values()), self._default.drafter))

    def report(self, factor: float) -> None:
        """Warn, once, if times depart from the profile by this factor."""
        with self._lock:
            if factor <= CONTRADICTION or self._reported or self._description is None:
                return
            self._reported = True
        key = profiles.key_of(self._description)
        warnings.warn(
            f"steps take {factor:.1f} times as long, relative to each other, as in the latency profile {key!r}; draft "
            f"depths may not be the best ones. Renew it with `hf-specgen profile --delete {key}`, after which it is "
            "learnt again, or at once with `hf-specgen tune MODEL`.",
            stacklevel=2,
        )

    def _recorder(self, place: tuple[int, int]) -> LatencyRecorder:
        if place not in self._recorders:
            prior = LatencyModel(tuple(self._fixed.values()), self._default.drafter) if self._fixed else self._default
            self._recorders[place] = LatencyRecorder(*place, prior.at(*place), measured=bool(self._fixed))
        return self._recorders[place]

    def _take_from_file(self) -> None:
        file = None if self._description is None else profiles.load(profiles.key_of(self._description))
        for one in file.latency.slices if file is not None else ():
            place = one.target.batch, one.target.context
            if self._default.drafter in one.drafters:
                self._fixed.setdefault(place, one)


_profiles: OrderedDict[tuple[str, str], Profile] = OrderedDict()
_profiles_lock = Lock()


def profile_of(call: Call) -> Profile:
    """The profile of a call's target and strategy, shared by all such calls of the process."""
    key, negligible = call.candidates.profile_key(), call.candidates.negligible_draft_cost
    device = getattr(getattr(call.model, "device", None), "type", "cpu")
    default = LatencyModel.default(device, str(key[0]), negligible)
    if call.model is None:
        return Profile(default)
    description = profiles.describe(call.model, key, call.temperature > 0)
    place = str(profiles.directory()), profiles.key_of(description)
    with _profiles_lock:
        if place not in _profiles:
            _profiles[place] = Profile(default, description)
            if len(_profiles) > MAX_PROFILES:
                _profiles.popitem(last=False)
        _profiles.move_to_end(place)
        return _profiles[place]


class Remembered(NamedTuple):
    """What a call leaves to the next one: acceptance over its rows, and the balance of its exploration budget."""

    acceptance: Snapshot
    balance: float


class AcceptanceMemory:
    """Acceptance at the end of earlier calls, by target, strategy and temperature."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._snapshots: WeakKeyDictionary[Any, OrderedDict[tuple[Any, float], Remembered]] = WeakKeyDictionary()

    def store(self, model: Any, strategy: tuple[Any, ...], temperature: float, value: Remembered) -> None:
        """Remember a value for as long as the model lives; nothing is kept for None."""
        if model is None:
            return
        with self._lock:
            known = self._snapshots.setdefault(model, OrderedDict())
            known[strategy, temperature] = value
            known.move_to_end((strategy, temperature))
            if len(known) > MAX_SNAPSHOTS:
                known.popitem(last=False)

    def recall(self, model: Any, strategy: tuple[Any, ...], temperature: float) -> tuple[Remembered, float] | None:
        """The value at the nearest temperature, and that temperature."""
        if model is None:
            return None
        with self._lock:
            known = self._snapshots.get(model, {})
            temperatures = [other for name, other in known if name == strategy]
            if not temperatures:
                return None
            nearest = min(temperatures, key=lambda other: abs(other - temperature))
            return known[strategy, nearest], nearest


acceptance_memory = AcceptanceMemory()
