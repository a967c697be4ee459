"""Measures T(q), the target's latency by tokens per row, and the time of drafting, once per model, rows and context.

On a CPU the steps of a call time T(q) (`hf_specgen.depth.step_times`). On accelerators, where steps are asynchronous,
and for passes that calls share, T(q) is measured after the prefill, on the call's own cache, by passes over chains of a
few sizes that are rolled back. They take about 8 T(1), at most 12, without the first pass of each size on an
accelerator, which is not timed: it loads kernels, and may capture a CUDA graph. The time of drafting is taken from the
first drafts. Both are kept as long as the model; another object of the same architecture begins with its T(q). All
ranks of a tensor-parallel model use what the first rank measured.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from itertools import cycle
from math import inf, sqrt
from statistics import median
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Call, CallSettings, GenerationState, memory
from hf_specgen.call_statistics import StepRecord
from hf_specgen.clock import thread_clock
from hf_specgen.depth.latency import ANY_DRAFTER, Bucket, CostCurve, DraftLatency, LatencyModel
from hf_specgen.targets.graphs import is_captured
from hf_specgen.targets.inputs import PreparedCall
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

T = TypeVar("T")
QUERIES = (1, 8, 2, 24, 1, 64)  # tokens per row of the timed passes, in this order, as far as there is time for them
MIN_SECONDS = 1e-9  # of a pass that takes less than a step of the clock: times are divided by each other
DRAFTS_TIMED = 16  # from which the time of drafting is derived
DRAFTS_TIMED_ON_CPU = 5
MAX_RELATIVE_TIME = 8.0
MAX_RELATIVE_TIME_NEW_SIZE = 12.0
"""Limits of the time of all passes, in units of T(1): for timing a size again, and for a new size. The second is
higher: where T(8) is 3, T(24) would not fit into 8, and deep drafts depend on it, as it may be no longer than T(8)."""


def recalled_curve(call: Call) -> CostCurve | None:
    """T(q) of the target, if an earlier call has measured it for this dtype, device, rows and context.

    The call may have had another model of the same architecture, whose curve is then stored for this model too.
    """
    if call.model is None:
        return None
    curve: CostCurve | None = memory.recall(call.model, curve_key(call), lambda: None)
    if curve is None and lockstep_group(call.model) is None:
        curve = memory.recall(type(call.model), shared_curve_key(call), lambda: None)
        memory.store(call.model, curve_key(call), curve)
    return curve


def model_curve(model: PreTrainedModel) -> CostCurve | None:
    """T(q) of one row with a text of 8 tokens, for the packed steps of Transformers; measured now if it is unknown."""
    tokens = torch.zeros(1, 8, dtype=torch.long)
    state = GenerationState(tokens)
    state.append(0, [0])
    call = Call(model, state, GenerationConfig(), settings=CallSettings(compile=False))
    with torch.no_grad():
        return recalled_curve(call) or measured_curve(call, prefilled_target(model, tokens))


def prefilled_target(model: PreTrainedModel, tokens: torch.Tensor) -> Target:
    """The target with `tokens`, `[batch, context]`, in its cache."""
    tokens = tokens.to(compat.input_device(model))
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand(len(tokens), -1)
    arguments = {"attention_mask": torch.ones_like(tokens), "position_ids": positions, "use_cache": True}
    target = Target(PreparedCall(model, tokens, GenerationConfig(), arguments))
    target.prefill()
    return target


def rows_key(rows: int) -> int:
    """Numbers of rows that share a T(q): up to the same power of two."""
    return (rows - 1).bit_length()


def curve_key(call: Call, rows: int | None = None) -> tuple[Hashable, ...]:
    """The key of T(q) in the memory of a model: what its times depend on; by default for all rows of the call."""
    model: Any = call.model
    attention = compat.attention_implementation(text_config(model))
    rows = rows_key(call.state.batch if rows is None else rows)
    context = max(0, (call.state.prompt_length - 1).bit_length() - 9) // 2  # powers of four from 1,024 on
    captured = bool(call.settings.compile) and is_captured(model)
    return "T(q)", model.dtype, compat.input_device(model), attention, captured, rows, context


def shared_curve_key(call: Call, rows: int | None = None) -> tuple[Hashable, ...]:
    """The key of T(q) for all models of a class with the same config, classes of modules and number of threads."""
    return *curve_key(call, rows), *call.architecture_key, torch.get_num_threads()


def measured_curve(call: Call, target: Target) -> CostCurve | None:
    """T(q) of the target, measured now and kept; None near the end of the target's position table.

    Times chains of several sizes for `MAX_RELATIVE_TIME`, or `MAX_RELATIVE_TIME_NEW_SIZE` if some have not been timed
    by then; the minimum of each size counts. Larger sizes are assumed to take time in proportion to their tokens, so
    that no large tree is built because a small one was fast.
    """
    longest = target.last_position - max(target.first_positions, default=0) + 1
    if longest <= QUERIES[1]:
        return None
    pending = call.state.pending()
    group = lockstep_group(call.model)
    target = target.copy()  # drafters read the hidden states of the prompt of the original
    target.capture_now()
    return _store_curve(call, _timed_passes(target, pending, [q for q in QUERIES if q <= longest], group))


def _store_curve(call: Call, times: dict[int, float]) -> CostCurve:
    """Make T(q) of measured times, and store it for later calls; larger sizes take time in proportion to tokens."""
    points = dict(times)
    earlier: CostCurve | None = memory.recall(call.model, ("delayed", *curve_key(call)), lambda: None)
    # In a curve that `forget_slow_curve` has deleted some sizes were delayed, as others may be now: the minimum counts.
    if earlier is not None:
        points = {q: min(seconds, earlier(q)) for q, seconds in times.items()}
    largest = max(points)
    if largest < QUERIES[-1]:
        points[QUERIES[-1]] = points[largest] * QUERIES[-1] / largest
    sizes = tuple(sorted(points))
    curve = CostCurve(sizes, tuple(points[q] for q in sizes), call.context_length, call.state.batch)
    memory.store(call.model, curve_key(call), curve)
    if call.model is not None and lockstep_group(call.model) is None:
        memory.store(type(call.model), shared_curve_key(call), curve)
    return curve


def _timed_passes(target: Target, pending: Sequence[int], sizes: Sequence[int], group: Any) -> dict[int, float]:
    """Seconds of passes by tokens per row, the smallest of each size."""
    times: dict[int, float] = {}
    spent = 0.0  # in units of T(1), which is the first size
    for q in cycle(sizes):
        if times:  # stop where the next pass would exceed the limit of the time of all passes
            largest = max(times)
            expected = times.get(q, times[largest] * sqrt(q / largest))  # between memory-bound and compute-bound
            if spent + expected / times[1] > (MAX_RELATIVE_TIME if q in times else MAX_RELATIVE_TIME_NEW_SIZE):
                break
        if target.device.type != "cpu" and q not in times:
            time_pass(target, pending, q)  # the first pass of a size loads kernels, or is captured
        seconds = from_first_rank(time_pass(target, pending, q), group)
        times[q] = min(seconds, times.get(q, seconds))
        spent += seconds / times[1]
    return times


def time_pass(target: Target, pending: Sequence[int], queries: int) -> float:
    """Seconds of one pass over the pending token of each row and a chain, which is then rolled back.

    On a CPU they are the thread's own, which other processes do not prolong.
    """
    tree = DraftTree.chains([[token] * (queries - 1) for token in pending])
    clock = thread_clock() if target.device.type == "cpu" else time.perf_counter
    wait(target.device)
    begin = clock()
    target.forward(tree, pending)
    wait(target.device)
    seconds = max(clock() - begin, MIN_SECONDS)
    target.rewind([0] * len(pending))
    return seconds


def wait(device: torch.device) -> None:
    """Block until all work submitted to the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class DrafterLatencyEstimator:
    """Estimates the time of a drafter's pass, or of a draft without passes, from the first drafts with a target."""

    def __init__(self, call: Call, *curves: CostCurve):
        self._call = call
        self.curves = curves  # T(q) of the target, at different numbers of rows
        self._model = cast(PreTrainedModel, call.model)
        self._without_passes = call.drafting.negligible_draft_cost
        self._key = (*curve_key(call), call.drafting.key)
        self._group = lockstep_group(self._model)
        self._is_cpu = compat.input_device(self._model).type == "cpu"
        measured: float | None = memory.recall(self._model, self._key, lambda: None)
        self.is_known = measured is not None
        self._ratios = list[float]()
        # Time of a drafter's pass over q tokens / T(q); of a draft without passes / T(1).
        self.fraction = measured or (0.0 if self._without_passes else 0.3)

    def latency(self) -> LatencyModel:
        """The latencies of target and drafter, as far as they are known."""
        return LatencyModel(tuple(Bucket(curve, {ANY_DRAFTER: self._draft_latency(curve)}) for curve in self.curves))

    def _draft_latency(self, curve: CostCurve) -> DraftLatency:
        """The latency of drafting, as a fraction of T(q)."""
        if self._without_passes:
            return DraftLatency(overhead=self.fraction * curve.seconds[0])
        tokens = tuple(float(curve.batch * q) for q in curve.queries)
        return DraftLatency(tokens, tuple(self.fraction * seconds for seconds in curve.seconds))

    def forget_slow_curve(self, step: StepRecord) -> None:
        """Delete T(q) if a pass on a CPU took less than half of it, so that the next call measures it again.

        Other processes then delayed some of the threads of a measured pass, which wait for each other.
        """
        (curve,) = self.curves  # measured at all rows of the call
        queries = (step.pass_rows + self._call.state.other_rows) * step.tokens_per_row / curve.batch
        seconds = step.seconds.get("forward", inf) if self._is_cpu and self._group is None else inf
        if 1 <= queries <= QUERIES[1] and 2 * seconds < curve(queries):
            memory.store(self._model, ("delayed", *curve_key(self._call)), curve)
            memory.store(self._model, curve_key(self._call), None)
            memory.store(type(self._model), shared_curve_key(self._call), None)

    def observe(self, step: StepRecord) -> bool:
        """Use the time of a draft; returns whether the latencies have changed by it.

        The first draft includes the drafter's prefill. On an accelerator some of the next ones run eagerly, and some
        capture graphs, so that more drafts are timed, and the fastest one so far can only lower what is assumed.
        """
        has_passes = bool(step.tokens_per_pass)
        if self.is_known or "forward" not in step.seconds or has_passes == self._without_passes:  # no usual draft
            return False
        seconds = step.seconds.get("draft", 0.0)
        rows = step.pass_rows + self._call.state.other_rows
        curve = self.latency().at(rows, step.context).target
        # Other processes prolong wall times, also that of the target's pass. The size of a shared one is unknown here.
        if self._is_cpu and not self._call.state.other_rows:
            seconds *= curve.seconds_of(rows * step.tokens_per_row) / max(step.seconds["forward"], MIN_SECONDS)
        # Seconds of the draft over T of its passes, or over T(1) if it has none.
        self._ratios.append(seconds / (sum(map(curve.seconds_of, step.tokens_per_pass)) or curve.seconds[0]))
        self.is_known = len(self._ratios) == (DRAFTS_TIMED_ON_CPU if self._is_cpu else DRAFTS_TIMED)
        # The first draft includes the prefill. A CPU uses the median once all are timed; an accelerator the minimum so
        # far, and the median at the end.
        if len(self._ratios) == 1 or (self._is_cpu and not self.is_known):
            return False
        ratio = median(self._ratios[1:]) if self.is_known else min(self.fraction, *self._ratios[1:])
        self.fraction = from_first_rank(ratio, self._group)
        if self.is_known:
            memory.store(self._model, self._key, self.fraction)
        return True


def lockstep_group(model: Any) -> Any:
    """The tensor-parallel process group of a model, whose ranks run every step together; None if there is none.

    Replicas of the model, as under `accelerate launch`, take different numbers of steps and must not wait.
    """
    mesh = compat.device_mesh(model)
    if mesh is None or (getattr(model, "tp_size", None) or 1) == 1:
        return None
    names = mesh.mesh_dim_names or ()
    return (mesh["tp"] if "tp" in names and mesh.ndim > 1 else mesh).get_group()


def from_first_rank(value: T, group: Any) -> T:
    """The value of the group's first rank, on each of its ranks; all of them call it in the same step."""
    if group is None:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]
