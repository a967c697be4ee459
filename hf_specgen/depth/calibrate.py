"""Measures T(q), the target's latency by tokens per row, and the cost of a drafter's pass: once per model.

T(q) is measured after the prefill of the first adaptive call, on the call's own cache: passes over chains of a few
sizes, which are rolled back. Together they take about the time of eight plain steps. The cost of a drafter's pass is
taken from its first drafts. Both are kept as long as the model; decisions then follow from the text alone. All ranks of
a tensor-parallel model use what the first rank measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import cycle
from math import sqrt
from statistics import median
from threading import Lock
from time import perf_counter, thread_time
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Call
from hf_specgen.counters import StepRecord
from hf_specgen.depth.latency import CostCurve, DraftLatency
from hf_specgen.targets.graphs import is_captured
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

T = TypeVar("T")
QUERIES = (1, 8, 2, 24, 1, 64)
"""Tokens per row of the timed passes, in this order, as far as there is time for them."""
MAX_PLAIN_STEPS = 8.0
"""Time that the passes of a calibration may take, in plain steps."""

_lock = Lock()
_measured: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = WeakKeyDictionary()


def known_curve(call: Call) -> CostCurve | None:
    """T(q) of the target, if an earlier call has measured it for this dtype, device, rows and context."""
    with _lock:
        return None if call.model is None else _measured.setdefault(call.model, {}).get(_key(call))


def target_curve(call: Call, target: Target) -> CostCurve | None:
    """T(q) of the target, measured now and kept; None near the end of its position table."""
    assert call.model is not None
    if max(target.first_positions, default=0) + QUERIES[1] > target.last_position:
        return None
    curve = _measure(call, target)
    with _lock:
        return _measured.setdefault(call.model, {}).setdefault(_key(call), curve)


def _key(call: Call) -> tuple[Hashable, ...]:
    model = call.model
    assert model is not None
    attention = compat.attention_implementation(text_config(model))
    rows = (call.state.batch - 1).bit_length()  # powers of two
    context = max(0, (call.context_length - 1).bit_length() - 9) // 2  # powers of four from 512 on
    captured = bool(call.compiled) and is_captured(model)
    return model.dtype, compat.input_device(model), attention, captured, rows, context


def _measure(call: Call, target: Target) -> CostCurve:
    """Time chains of several sizes until `MAX_PLAIN_STEPS` are spent; the minimum of each size counts.

    Sizes beyond are assumed to take time in proportion, so that no large tree is built because a small one was fast.
    """
    pending, group = call.state.pending(), lockstep_group(call.model)
    attributes = dict(vars(target))  # a target that captures hidden states replaces them in every pass
    target.capture_at_once()
    longest = target.last_position - max(target.first_positions) + 1
    times: dict[int, float] = {}
    spent = 0.0
    for q in cycle(q for q in QUERIES if q <= longest):
        if times:
            largest = max(times)
            expected = times.get(q, times[largest] * sqrt(q / largest))  # between memory-bound and compute-bound
            if spent + expected / times[1] > MAX_PLAIN_STEPS:
                break
        seconds = from_first_rank(time_pass(target, pending, q), group)
        times[q] = min(seconds, times.get(q, seconds))
        spent += seconds / times[1]
    vars(target).update(attributes)
    times.setdefault(QUERIES[-1], times[max(times)] * QUERIES[-1] / max(times))
    sizes = sorted(times)
    return CostCurve(tuple(sizes), tuple(times[q] for q in sizes), call.context_length, call.state.batch)


def time_pass(target: Target, pending: Sequence[int], queries: int) -> float:
    """Seconds of one pass over the pending token of each row and a chain, which is then rolled back.

    On a CPU they are the thread's own, which other processes do not prolong.
    """
    tree = DraftTree.chains([[token] * (queries - 1) for token in pending])
    clock = thread_time if target.device.type == "cpu" else perf_counter
    _wait(target.device)
    begin = clock()
    target.forward(tree, pending)
    _wait(target.device)
    seconds = clock() - begin
    target.rewind([0] * len(pending))
    return seconds


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class DrafterTimer:
    """Derives the cost of a drafter's pass, as a fraction of T(q), from its first drafts with a target."""

    def __init__(self, call: Call, curve: CostCurve):
        self._curve, self._model = curve, call.model
        self._key, self._group = (*_key(call), call.drafting.key), lockstep_group(call.model)
        assert call.model is not None
        self._is_cpu = compat.input_device(call.model).type == "cpu"
        with _lock:
            known = 0.0 if call.drafting.negligible_cost else _measured.setdefault(call.model, {}).get(self._key)
        self.fraction = 0.3 if known is None else known
        self._ratios: list[float] | None = [] if known is None else None

    @property
    def is_known(self) -> bool:
        """Whether the cost has been measured."""
        return self._ratios is None

    def latency(self) -> DraftLatency:
        """The drafter's latency, as far as it is known."""
        curve = self._curve
        tokens = tuple(float(curve.batch * q) for q in curve.queries)
        return DraftLatency(tokens, tuple(self.fraction * seconds for seconds in curve.seconds))

    def observe(self, step: StepRecord) -> bool:
        """Use the time of a draft; returns whether the cost has become known by it."""
        if self._ratios is None or not step.passes or "forward" not in step.seconds:
            return False
        seconds = step.seconds["draft"]
        if self._is_cpu:  # other processes prolong wall times, that of the target's pass alike
            seconds *= self._curve.seconds_of(step.batch * step.tokens_per_row) / step.seconds["forward"]
        self._ratios.append(seconds / sum(map(self._curve.seconds_of, step.passes)))
        if len(self._ratios) < 5:  # the first draft includes the drafter's prefill
            return False
        fraction = from_first_rank(median(self._ratios[1:]), self._group)
        self._ratios = None
        assert self._model is not None
        with _lock:
            self.fraction = _measured.setdefault(self._model, {}).setdefault(self._key, fraction)
        return True


def lockstep_group(model: Any) -> Any:
    """The tensor-parallel process group of a model, whose ranks run every step together; None if there is none.

    Replicas of the model, as under `accelerate launch`, take different numbers of steps and must not wait.
    """
    size = getattr(model, "tp_size", None) or 1
    if size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        if dist.get_world_size() == size:
            return dist.group.WORLD
        raise ValueError(
            f"the model is spread over {size} of {dist.get_world_size()} processes, but has no device mesh that names "
            "them; give a fixed depth such as k=5, or a latency file, so that no agreement is needed"
        )
    names = mesh.mesh_dim_names or ()
    return (mesh["tp"] if "tp" in names and mesh.ndim > 1 else mesh).get_group()


def from_first_rank(value: T, group: Any) -> T:
    """The value of the group's first rank, on each of its ranks; all of them call it in the same step."""
    if group is None:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]
