"""The verification modes inside `generate`: a draft that is the target itself, stops, scores, batches, processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from hf_specgen import Candidates, DraftTree
from hf_specgen.candidates import DraftContext, Drafter
from tests.helpers import Oracle, PrefixReader, RowWisePrefixReader, prompts, tiny_model

PROCESSORS = {
    "none": {"top_k": 0},
    "scores only": {"temperature": 0.7, "top_k": 30, "top_p": 0.95},
    "row-wise": {"repetition_penalty": 1.2, "make": RowWisePrefixReader},
    "in step": {"make": PrefixReader},
}


def arguments(kind: str) -> dict[str, Any]:
    given = dict(PROCESSORS[kind])
    make = given.pop("make", None)
    return {**given, "logits_processor": LogitsProcessorList([make()] if make else [])}


class Itself(Candidates):
    """Drafts with the target, read from the start every time: what `verifier.sample_draft` draws, and its q."""

    def __init__(self, model: Any, temperature: float = 1.0, k: int = 3):
        self.model, self.temperature, self.k = model, temperature, k

    def bind(self, context: DraftContext, model: Any) -> Drafter:
        return _ItselfDrafter(self)


class _ItselfDrafter(Drafter):
    def __init__(self, settings: Itself):
        self._settings = settings

    def draft(self, context: DraftContext) -> DraftTree:
        verifier = context.verifier
        assert verifier is not None
        texts = [prompt + tokens for prompt, tokens in zip(context.prompts, context.generated, strict=True)]
        guesses: list[list[int]] = [[] for _ in texts]
        q = []
        for depth in range(self._settings.k):
            logits = [self._settings.model(torch.tensor([text])).logits[0, -1] for text in texts]
            scores = torch.stack(logits) / self._settings.temperature
            q.append(scores.softmax(dim=-1))
            drawn = verifier.sample_draft(scores, [len(tokens) + depth for tokens in context.generated]).tolist()
            for text, guess, token in zip(texts, guesses, drawn, strict=True):
                text.append(token)
                guess.append(token)
        chains = DraftTree.chains([guess[:n] for guess, n in zip(guesses, context.budget, strict=True)])
        kept = torch.stack(q, dim=1)[:, : chains.nodes] if verifier.wants_q else None
        return DraftTree(chains.tokens, chains.parents, kept)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("do_sample", [False, True])
@torch.no_grad()
def test_a_draft_that_is_the_target_is_accepted(batch: int, verification: str, do_sample: bool) -> None:
    """Would catch: draft noise of another step or row than the target's; a q or a residual off by one node."""
    model, inputs = tiny_model("llama"), prompts(batch)
    common = {"max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": [7, 50], "pad_token_id": 0}
    if do_sample:
        common |= {"temperature": 0.5, "top_k": 0}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **common)
    torch.manual_seed(3)
    draft = Itself(model, temperature=0.5 if do_sample else 1.0)
    output = model.generate(
        **inputs, **common, candidate_generator=draft, verification=verification, return_dict_in_generate=True
    )
    stats = output.speculation
    assert stats.drafted > 5
    if verification == "coupled" or not do_sample:
        assert torch.equal(plain, output.sequences)
    for row, length in enumerate(stats.lengths):  # all accepted: k + 1 tokens a step
        assert len(stats.rows[row]) == -(-length // 4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("verification", ["rejection", "typical"])
@pytest.mark.parametrize("branching", [False, True])
@torch.no_grad()
def test_sampling_stops_and_keeps_its_cache(batch: int, kind: str, verification: str, branching: bool) -> None:
    """Would catch: a rejected guess left in the cache, tokens after the end. The logits of every step are compared
    with those of one pass over the finished text; 1e-4: float32 over 4 layers."""
    model, inputs = tiny_model("llama"), prompts(batch)
    width = inputs["input_ids"].shape[1]
    common = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, **arguments(kind)}
    answers = model.generate(**inputs, **{**common, **arguments(kind)})[:, width:]
    output = model.generate(
        **inputs,
        **{**common, **arguments(kind)},
        eos_token_id=[5, 6],
        candidate_generator=Oracle(answers, 0.7, branching=branching),
        verification=verification,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = output.sequences
    assert output.speculation.drafted > 0
    for row in ids[:, width:].tolist():
        ends = [place for place, token in enumerate(row) if token in (5, 6)]
        if ends:
            assert not any(row[ends[0] + 1 :])
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, width:])], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    whole = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(torch.stack(output.logits, dim=1), whole[:, width - 1 : -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("branching", [False, True])
def test_greedy_rejection_is_plain_generate(kind: str, branching: bool) -> None:
    model, inputs = tiny_model("llama"), prompts(3)
    greedy = {key: value for key, value in PROCESSORS[kind].items() if key not in ("temperature", "top_k", "top_p")}
    make = greedy.pop("make", None)

    def run(**more: Any) -> torch.Tensor:
        return model.generate(
            **inputs,
            **greedy,
            max_new_tokens=16,
            **more,
            logits_processor=LogitsProcessorList([make()] if make else []),
        )

    plain = run()
    oracle = Oracle(plain[:, inputs["input_ids"].shape[1] :], 0.6, branching=branching)
    assert torch.equal(run(candidate_generator=oracle, verification="rejection"), plain)
    assert oracle.speculation is not None and 0 < oracle.speculation.accepted < oracle.speculation.drafted


@pytest.mark.parametrize("verification", ["rejection", "typical"])
def test_a_seed_repeats_the_run(verification: str) -> None:
    """Not the text of plain `generate`, but the same text twice: draft and verifier draw from the seed alone."""
    model, inputs = tiny_model("llama"), prompts(2)
    runs = []
    for _ in range(2):
        torch.manual_seed(9)
        draft = Itself(model, temperature=2.0)
        runs.append(
            model.generate(
                **inputs, do_sample=True, max_new_tokens=16, candidate_generator=draft, verification=verification
            )
        )
    assert torch.equal(*runs)


def test_typical_is_lossy_and_accepts_more() -> None:
    """A tiny random model is unsure of everything, so nearly every guess is plausible to it."""
    model, inputs = tiny_model("llama"), prompts(1)
    plain = model.generate(**inputs, max_new_tokens=16)
    oracle = Oracle(plain[:, inputs["input_ids"].shape[1] :], 0.5)
    coupled = model.generate(**inputs, max_new_tokens=16, candidate_generator=oracle)
    accepted = oracle.speculation.accepted
    typical = model.generate(**inputs, max_new_tokens=16, candidate_generator=oracle, verification="typical")
    assert torch.equal(coupled, plain) and not torch.equal(typical, plain)
    assert oracle.speculation.accepted > accepted
