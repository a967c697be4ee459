"""NaN, infinite or all -inf scores: when sampling the error of plain `generate`, when greedy its tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specgen import Call, Candidates, DraftSession, DraftTree, NgramCandidates
from tests.helpers import assert_same_tokens, prompts, tiny_model

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
def invalid_logits(model: Any, value: str) -> Iterator[None]:
    """Inside, the target's logits of the fourth forward pass and all later ones are invalid."""
    passes = 0

    def invalidate(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes > 3:
            logits = logits.clone()
            logits[..., slice(None) if value == "all -inf" else 7] = VALUES[value]
        return logits

    handle = model.lm_head.register_forward_hook(invalidate)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("verification", [None, *VERIFICATION], ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_invalid_logits_raise(verification: str | None, value: str, batch: int) -> None:
    """Would catch: token 0 generated to the end. None is plain `generate`."""
    model = tiny_model("llama")
    candidates = {} if verification is None else {"candidate_generator": NgramCandidates(k=4, tree=8)}
    candidates |= {} if verification is None else {"verification": verification}
    with invalid_logits(model, value), pytest.raises(RuntimeError, match=MESSAGE):
        model.generate(**prompts(batch), max_new_tokens=40, do_sample=True, top_k=0, **candidates)


@pytest.mark.parametrize("verification", [None, *VERIFICATION], ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("processor", [Invalidate, RowWiseInvalidate])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_invalid_scores_of_prefix_reading_processor_raise(
    verification: str | None, value: str, processor: type[Invalidate], batch: int
) -> None:
    """Would catch: a column walk that emits tokens although their scores are no distribution."""
    candidates = {} if verification is None else {"candidate_generator": NgramCandidates(k=4, tree=8)}
    candidates |= {} if verification is None else {"verification": verification}
    processors = LogitsProcessorList([processor(value)])
    with pytest.raises(RuntimeError, match=MESSAGE):
        tiny_model("llama").generate(
            **prompts(batch), max_new_tokens=20, do_sample=True, top_k=0, logits_processor=processors, **candidates
        )


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
    """Always proposes one token, k times."""

    def __init__(self, token: int):
        super().__init__(3)
        self.token = token

    def start(self, call: Call) -> DraftSession:
        return _ConstantSession(call, self.token)


class _ConstantSession(DraftSession):
    def __init__(self, call: Call, token: int):
        super().__init__(call)
        self._token = token

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return DraftTree.chains([[self._token] * depth for depth in budget])


@pytest.mark.parametrize("verification", VERIFICATION)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.2}], ids=["at once", "column walk"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_invalid_logits_of_rejected_node_do_not_raise(verification: str, processors: dict, batch: int) -> None:
    """Would catch: an error for scores that plain `generate` never computes. Logits are NaN after token 98 only."""
    model, inputs, token = tiny_model("llama"), prompts(batch), 98
    assert not (inputs["input_ids"] == token).any()

    def invalidate(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        logits = output.logits
        logits[kwargs["input_ids"][:, -logits.shape[1] :] == token] = float("nan")

    candidates = Constant(token)
    arguments = {"max_new_tokens": 12, "do_sample": True, "suppress_tokens": [token], **processors}
    handle = model.register_forward_hook(invalidate, with_kwargs=True)
    try:
        torch.manual_seed(1)
        plain = model.generate(**inputs, **arguments)
        torch.manual_seed(1)
        ours = model.generate(**inputs, **arguments, candidate_generator=candidates, verification=verification)
    finally:
        handle.remove()
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

    def invalidate(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        logits = output.logits
        logits[kwargs["input_ids"][:, -logits.shape[1] :] == pad] = float("nan")

    handle = model.register_forward_hook(invalidate, with_kwargs=True)
    try:
        torch.manual_seed(1)
        with pytest.raises(RuntimeError, match=MESSAGE):
            model.generate(**inputs, **arguments)
        torch.manual_seed(1)
        ours = model.generate(**inputs, **arguments, **outputs, candidate_generator=NgramCandidates(k=4, tree=8))
    finally:
        handle.remove()
    assert torch.equal(ours.sequences if outputs else ours, expected)
