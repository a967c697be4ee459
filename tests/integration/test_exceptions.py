"""After an exception in the middle of a call: sessions have ended, and the random generator is where plain `generate`
would have left it."""

from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from hf_specgen import Call, SpeculationMonitor, Verifier
from hf_specgen.verification import CoupledVerifier, RejectionVerifier, TypicalVerifier
from tests.helpers import FailingOracle, Oracle, RecordingStreamer, prompts, tiny_model
from tests.helpers.policies import Irregular

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
        put = self.streamer.put
        self.streamer.put = lambda value: (put(value), self.reach("streamer"))[0]  # type: ignore[method-assign]
        return {
            "candidate_generator": self.faulty(Oracle, {"draft": "draft", "observe": "observe"}, answers, 0.6),
            "verification": self.faulty(CoupledVerifier, {"verify": "verify"}),
            "policy": self.faulty(Irregular, {"depths": "policy"}),
            "monitor": self.faulty(SpeculationMonitor, {"observe": "monitor"}, prometheus=False),
            "streamer": self.streamer,
            "stopping_criteria": StoppingCriteriaList([self.criterion]),
        }

    def criterion(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.reach("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def faulty(self, kind: Any, methods: dict[str, str], *arguments: Any, **settings: Any) -> Any:
        """A part whose sessions fail in these methods, which have the names of places, and record their end."""

        def reaching(method: Any, place: str) -> Any:
            return lambda *given: (self.reach(place), method(*given))[1]

        class Faulty(kind):  # type: ignore[misc]
            def start(part, call: Call) -> Any:
                session = super().start(call)
                for name, place in methods.items():
                    setattr(session, name, reaching(getattr(session, name), place))
                if (end := getattr(session, "end", None)) is not None:
                    session.end = lambda *given: (self.ended.append(kind.__name__), end(*given))[1]
                return session

        return Faulty(*arguments, **settings)


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
    assert sorted(faults.ended) == ["CoupledVerifier", "Oracle", "SpeculationMonitor"]
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
