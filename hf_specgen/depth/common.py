"""One policy for rows that are calls of their own, but share the forward passes of the target; see `generate_many`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_specgen.call import Call
from hf_specgen.counters import StepPasses, StepRecord
from hf_specgen.depth.latency import Bucket, LatencyModel, StepLatency
from hf_specgen.depth.policy import Policy, PolicySession
from hf_specgen.state import GenerationState
from hf_specgen.targets.target import Target


class CommonDepths(Policy):
    """Chooses the draft depths of `rows` calls together: each of them starts this policy, which starts the given one.

    Before the rows draft, `begin` is called, and `end` when all of them have observed the outcome of the step.
    """

    def __init__(self, policy: Policy, rows: int):
        self._policy, self._texts = policy, _Texts(rows)
        self._session: PolicySession | None = None
        self._depths, self._rows = list[int](), list[_RowDepth]()
        self._views: dict[tuple[int, int], LatencyModel] = {}

    def start(self, call: Call) -> PolicySession:
        if self._session is None:
            self._call = replace(call, state=self._texts)
            self._session = self._policy.start(self._call)
        return _RowDepth(self, call)

    @property
    def session(self) -> PolicySession:
        """The session of the policy."""
        assert self._session is not None
        return self._session

    def prefilled(self, states: Sequence[GenerationState], target: Target) -> None:
        """Let the policy measure the latency of a pass over all rows."""
        self._texts.show(states)
        self.session.prefilled(target)

    def begin(self, states: Sequence[GenerationState]) -> None:
        """Choose the depths of the next step of these rows."""
        self._texts.show(states)
        self._depths = self.session.depths([self._call.drafting.k] * len(states))
        self._rows = []

    def depth(self, row: _RowDepth, limit: int) -> int:
        """The depth of a row: of the steps in the order in which the rows draft, of a prefill that of the first row."""
        if not self._depths:
            return min(limit, self.session.depths([limit])[0])
        place = len(self._rows) if row not in self._rows else self._rows.index(row)
        self._rows.append(row)
        return min(limit, self._depths[min(place, len(self._depths) - 1)])

    @property
    def step_latency(self) -> StepLatency | None:
        """The latencies of the next step of all rows, if the policy has any."""
        latency = self.session.latency
        return None if latency is None else latency.at(self._texts.batch, max(1, self._call.context_length))

    def latency(self) -> LatencyModel | None:
        """The seconds of a common pass for each row, by the tokens of one row."""
        latency, step, rows = self.session.latency, self.step_latency, self._texts.batch
        if latency is None or step is None:
            return None
        target, drafter = step
        key = id(target), rows
        if key not in self._views:
            curve = replace(target, seconds=tuple(target.seconds_of(rows * q) / rows for q in target.queries), batch=1)
            self._views = {key: LatencyModel((Bucket(curve, {latency.drafter: drafter}),), latency.drafter)}
        return self._views[key]

    def end(self, nodes: int) -> StepPasses:
        """Report a step, with drafts of at most so many tokens, to the policy; returns its passes."""
        records = [row.record for row in self._rows if row.record is not None]
        passes = [count for record in records for count in record.passes]
        seconds: dict[str, float] = {}
        for record in records:
            for part, value in record.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + value
        step = StepRecord(
            [record.requested[0] for record in records],
            [record.rows[0] for record in records],
            1 + nodes,
            seconds,
            passes,
        )
        self.session.observe(step)
        self._depths = []
        drafter = tuple(passes) if any(step.requested) else None
        rows = self._texts.batch
        return StepPasses(rows, self._call.context_length, rows * (1 + nodes), drafter)


class _RowDepth(PolicySession):
    """The session of one row."""

    record: StepRecord | None = None

    def __init__(self, common: CommonDepths, call: Call):
        self._common, self._call = common, call
        self.remembers = common.session.remembers

    @property
    def latency(self) -> LatencyModel | None:  # type: ignore[override]
        return self._common.latency()

    def depths(self, limits: Sequence[int]) -> list[int]:
        return [self._common.depth(self, limits[0])]

    def observe(self, step: StepRecord) -> None:
        self.record = step


class _Texts(GenerationState):
    """The texts of all rows, as a policy reads them."""

    def __init__(self, rows: int):
        self.batch, self.prompt_length, self.max_length = rows, 0, float("inf")
        self.prompts, self.generated = [[]] * rows, [[]] * rows

    def show(self, states: Sequence[GenerationState]) -> None:
        """Let these be the rows."""
        self.batch, self.device = len(states), states[0].device
        self.prompts = [state.prompts[0] for state in states]
        self.generated = [state.generated[0] for state in states]
