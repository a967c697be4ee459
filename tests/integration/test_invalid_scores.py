"""NaN, infinite or all -inf scores: when sampling the error of plain `generate`, when greedy its tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_specgen import Call, Candidates, DraftSession, DraftTree, NgramCandidates, SpeculationMonitor, Verifier
from hf_specgen.verification import CoupledVerifier, RejectionVerifier, TypicalVerifier
from tests.helpers import FailingOracle, Oracle, RecordingStreamer, assert_same_tokens, prompts, tiny_model
from tests.helpers.policies import Irregular

MESSAGE = "probability tensor contains either `inf`, `nan` or element < 0"
VERIFICATION = ["exact", "rejection", "typical"]
VALUES = {"nan": float("nan"), "inf": float("inf"), "all -inf": float("-inf")}
FIRST_INVALID = 5
"""Generated column from which on scores are invalid."""


class Invalidate(LogitsProcessor):
    """Makes the scores of token 7, or of all tokens, invalid from a column on; rows advance in lockstep."""

    def __init__(self, value: str, column: int = FIRST_INVALID):
        self.value, self.column = value, column

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < 12 + self.column:
            return scores
        scores = scores.clone()
        scores[:, slice(None) if self.value == "all -inf" else 7] = VALUES[self.value]
        return scores


class RowWiseInvalidate(Invalidate):
    """The same, declared row-wise."""

    row_wise = True


@contextmanager
def changed_logits(model: Any, change: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Inside, `change` receives the tokens of each pass and its logits, which it may change."""

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        change(kwargs["input_ids"][:, -output.logits.shape[1] :], output.logits)

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def nan_behind(token: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Logits are NaN after this token."""

    def change(ids: torch.Tensor, logits: torch.Tensor) -> None:
        logits[ids == token] = float("nan")

    return change


class FromPass:
    """Logits of the fourth forward pass and of all later ones are invalid."""

    def __init__(self, value: str):
        self.value, self.passes = value, 0

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        self.passes += 1
        if self.passes > 3:
            logits[..., slice(None) if self.value == "all -inf" else 7] = VALUES[self.value]


@pytest.mark.parametrize("verification", [None, *VERIFICATION], ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("processor", [None, Invalidate, RowWiseInvalidate])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_invalid_scores_raise(
    verification: str | None, value: str, processor: type[Invalidate] | None, batch: int
) -> None:
    """Would catch: token 0 generated to the end, a column walk that emits tokens whose scores are no distribution.

    None is plain `generate`, and logits of the target instead of scores of a processor.
    """
    model, arguments = tiny_model("llama"), {"max_new_tokens": 40, "do_sample": True, "top_k": 0}
    if verification is not None:
        arguments |= {"candidate_generator": NgramCandidates(k=4, tree=8), "verification": verification}
    if processor is not None:
        arguments["logits_processor"] = LogitsProcessorList([processor(value)])
    broken = nullcontext() if processor else changed_logits(model, FromPass(value))
    with broken, pytest.raises(RuntimeError, match=MESSAGE):
        model.generate(**prompts(batch), **arguments)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("processor", [Invalidate, RowWiseInvalidate])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_invalid_scores_same_tokens(value: str, processor: type[Invalidate], batch: int) -> None:
    assert_same_tokens(
        tiny_model("llama"),
        prompts(batch),
        NgramCandidates(k=4, tree=8),
        max_new_tokens=20,
        make_processors=lambda: LogitsProcessorList([processor(value)]),
    )


class Constant(Candidates):
    """Always proposes one token, three times."""

    def __init__(self, token: int):
        super().__init__(3)
        self.token = token

    def start(self, call: Call) -> DraftSession:
        class Session(DraftSession):
            def draft(session, budget: Sequence[int]) -> DraftTree:
                return DraftTree.chains([[self.token] * depth for depth in budget])

        return Session(call)


@pytest.mark.parametrize("verification", VERIFICATION)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.2}], ids=["at once", "column walk"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_invalid_logits_of_rejected_node_do_not_raise(verification: str, processors: dict, batch: int) -> None:
    """Would catch: an error for scores that plain `generate` never computes. Logits are NaN after token 98 only."""
    model, inputs, token = tiny_model("llama"), prompts(batch), 98
    assert not (inputs["input_ids"] == token).any()
    candidates = Constant(token)
    arguments = {"max_new_tokens": 12, "do_sample": True, "suppress_tokens": [token], **processors}
    with changed_logits(model, nan_behind(token)):
        torch.manual_seed(1)
        plain = model.generate(**inputs, **arguments)
        torch.manual_seed(1)
        ours = model.generate(**inputs, **arguments, candidate_generator=candidates, verification=verification)
    assert candidates.speculation is not None
    assert candidates.speculation.drafted > 0 and candidates.speculation.accepted == 0
    assert ours.shape == plain.shape
    if verification == "exact":
        assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    "outputs", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=["tokens", "scores"]
)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.2}], ids=["at once", "column walk"])
def test_sampling_invalid_logits_of_padding_returns_the_tokens(processors: dict, outputs: dict) -> None:
    """Would catch: an error for scores that no token depends on. Plain `generate` samples padding too, and raises."""
    model, inputs, pad = tiny_model("llama"), prompts(3), 98
    assert not (inputs["input_ids"] == pad).any()
    arguments = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": pad, "suppress_tokens": [pad], **processors}
    torch.manual_seed(1)
    unbroken = model.generate(**inputs, **arguments)
    arguments |= {"eos_token_id": int(unbroken[0, 12 + 4])}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **arguments)
    assert expected[:, -1].eq(pad).any() and not expected[:, -1].eq(pad).all()
    with changed_logits(model, nan_behind(pad)):
        torch.manual_seed(1)
        with pytest.raises(RuntimeError, match=MESSAGE):
            model.generate(**inputs, **arguments)
        torch.manual_seed(1)
        ours = model.generate(**inputs, **arguments, **outputs, candidate_generator=NgramCandidates(k=4, tree=8))
    assert torch.equal(ours.sequences if outputs else ours, expected)


# After an exception in the middle of a call: sessions have ended, and the random generator is where plain `generate`


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


@pytest.mark.parametrize("processor", [Invalidate, RowWiseInvalidate])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_stopped_before_the_invalid_scores_does_not_raise(processor: type[Invalidate], batch: int) -> None:
    """Would catch: an exception for a token that plain `generate` never samples, since a criterion ends the text."""

    def stop(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12 + FIRST_INVALID, dtype=torch.bool)

    assert_same_tokens(
        tiny_model("llama"),
        prompts(batch),
        lambda ids: Oracle(ids, accuracy=1.0, k=8),
        make_processors=lambda: LogitsProcessorList([processor("nan")]),
        stopping_criteria=StoppingCriteriaList([stop]),
        max_new_tokens=20,
        do_sample=True,
        top_k=0,
    )


def test_sampling_stopped_before_invalid_logits_does_not_raise() -> None:
    """The same where whole paths are verified at once: logits are NaN behind the last token of the text."""
    model, inputs, arguments = tiny_model("llama"), prompts(1), {"do_sample": True, "top_k": 0}
    torch.manual_seed(1)
    plain = model.generate(**inputs, **arguments, max_new_tokens=20)
    last = int(plain[0, 12 + FIRST_INVALID - 1])
    assert last not in plain[0, : 12 + FIRST_INVALID - 1]

    def stop(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12 + FIRST_INVALID, dtype=torch.bool)

    arguments |= {"stopping_criteria": [stop], "candidate_generator": Oracle(plain[:, 12:], accuracy=1.0, k=8)}
    with changed_logits(model, nan_behind(last)):
        torch.manual_seed(1)
        ours = model.generate(**inputs, **arguments, max_new_tokens=20)
    assert torch.equal(ours, plain[:, : 12 + FIRST_INVALID])
