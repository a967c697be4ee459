"""After an exception in the middle of a call: sessions have ended, and the random generator is where plain `generate`
would have left it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specgen import (
    Call,
    DraftSession,
    DraftTree,
    Monitor,
    MonitorSession,
    Policy,
    PolicySession,
    StepRecord,
    VerificationResult,
    VerificationSession,
    Verifier,
)
from hf_specgen.verification import CoupledVerifier, RejectionVerifier, TypicalVerifier
from tests.helpers import FailingOracle, Oracle, RecordingStreamer, prompts, tiny_model

SAMPLED: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "top_k": 0}


class Failure(Exception):
    """Raised by the part that is to fail."""


class Faults:
    """The parts of a call, of which one raises `Failure` in its third step; records which sessions ended."""

    def __init__(self, place: str):
        self.place, self.ended, self.streamer = place, [], RecordingStreamer()  # type: ignore[var-annotated]
        self._steps: dict[str, int] = {}

    def reach(self, place: str) -> None:
        """Raise if it is time for this part to fail."""
        self._steps[place] = self._steps.get(place, 0) + 1
        if place == self.place and self._steps[place] == 3:
            raise Failure(place)

    def arguments(self, answers: torch.Tensor) -> dict[str, Any]:
        """Of `generate`, for a call with an oracle for these answers."""
        return {
            "candidate_generator": FaultyOracle(answers, self),
            "verification": FaultyVerifier(self),
            "policy": FaultyPolicy(self),
            "monitor": FaultyMonitor(self),
            "streamer": FaultyStreamer(self),
            "stopping_criteria": StoppingCriteriaList([FaultyCriterion(self)]),
        }


class FaultyOracle(Oracle):
    def __init__(self, answers: torch.Tensor, faults: Faults):
        super().__init__(answers, 0.6)
        self.faults = faults

    def start(self, call: Call) -> DraftSession:
        session, faults = super().start(call), self.faults
        draft, observe = session.draft, session.observe

        def faulty_draft(budget: Sequence[int]) -> DraftTree:
            faults.reach("draft")
            return draft(budget)

        def faulty_observe(result: VerificationResult) -> None:
            faults.reach("observe")
            observe(result)

        session.draft, session.observe = faulty_draft, faulty_observe  # type: ignore[method-assign]
        session.end = lambda: faults.ended.append("candidates")  # type: ignore[method-assign]
        return session


class FaultyVerifier(CoupledVerifier):
    def __init__(self, faults: Faults):
        self.faults = faults

    def start(self, call: Call) -> VerificationSession:
        session, faults = super().start(call), self.faults
        verify, end = session.verify, session.end

        def faulty_verify(*args: Any) -> VerificationResult:
            faults.reach("verify")
            return verify(*args)

        def recorded_end(columns: int) -> None:
            faults.ended.append("verifier")
            end(columns)

        session.verify, session.end = faulty_verify, recorded_end  # type: ignore[method-assign]
        return session


class FaultyPolicy(Policy):
    def __init__(self, faults: Faults):
        self.faults = faults

    def start(self, call: Call) -> PolicySession:
        return _FaultyPolicySession(self.faults)


class _FaultyPolicySession(PolicySession):
    def __init__(self, faults: Faults):
        self._faults = faults

    def depths(self, room: Sequence[int]) -> list[int]:
        self._faults.reach("policy")
        return [4] * len(room)


class FaultyMonitor(Monitor):
    def __init__(self, faults: Faults):
        self.faults = faults

    def start(self, call: Call) -> MonitorSession:
        return _FaultyMonitorSession(self.faults)


class _FaultyMonitorSession(MonitorSession):
    def __init__(self, faults: Faults):
        self._faults = faults

    def observe(self, step: StepRecord) -> None:
        self._faults.reach("monitor")

    def end(self) -> None:
        self._faults.ended.append("monitor")


class FaultyStreamer(RecordingStreamer):
    def __init__(self, faults: Faults):
        super().__init__()
        self.faults = faults

    def put(self, value: torch.Tensor) -> None:
        self.faults.streamer.put(value)
        self.faults.reach("streamer")


class FaultyCriterion(StoppingCriteria):
    def __init__(self, faults: Faults):
        self.faults = faults

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.faults.reach("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("place", ["draft", "verify", "observe", "policy", "monitor", "streamer", "criterion"])
@pytest.mark.parametrize("batch", [1, 3])
def test_exception_anywhere_ends_sessions_and_restores_the_random_state(place: str, batch: int) -> None:
    """Would catch: noise drawn ahead that is not given back, a session whose `end` is never called, or called twice."""
    model, inputs = tiny_model("llama"), prompts(batch)
    torch.manual_seed(5)
    answers = model.generate(**inputs, **SAMPLED)[:, 12:]
    faults = Faults(place)
    torch.manual_seed(5)
    with pytest.raises(Failure, match=place):
        model.generate(**inputs, **SAMPLED, **faults.arguments(answers))
    state = torch.get_rng_state()
    assert sorted(faults.ended) == ["candidates", "monitor", "verifier"]
    # Plain `generate` fails in the same column where the fault is in a part that it has too.
    columns = len(faults.streamer.chunks) - 1 + (place == "criterion")
    torch.manual_seed(5)
    if columns:
        model.generate(**inputs, **{**SAMPLED, "max_new_tokens": columns})
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("verifier", [CoupledVerifier(), RejectionVerifier(), TypicalVerifier()])
def test_exception_leaves_nothing_on_the_verifier(verifier: Verifier) -> None:
    """Would catch: a verifier that is held by the caller and keeps the noise of a failed call."""
    model, inputs = tiny_model("llama"), prompts(1)
    before = dict(vars(verifier))
    failing = FailingOracle(model.generate(**inputs, max_new_tokens=30)[:, 12:])
    with pytest.raises(RuntimeError, match="the draft session failed"):
        model.generate(**inputs, **SAMPLED, candidate_generator=failing, verification=verifier)
    assert vars(verifier) == before
