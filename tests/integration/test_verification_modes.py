"""The verification modes inside `generate`: stops, scores, batches, processors, and a draft that equals the target."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from hf_specgen import Call, Candidates, DraftSession, DraftTree
from tests.helpers import Oracle, PrefixReader, RowWisePrefixReader, prompts, tiny_model
from tests.helpers.comparison import plain_output

PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "score-only": {"temperature": 0.7, "top_k": 30, "top_p": 0.95},
    "row-wise": {"repetition_penalty": 1.2, "processor": RowWisePrefixReader},
    "lockstep": {"processor": PrefixReader},
}


def arguments_of(kind: str) -> dict[str, Any]:
    """Arguments of `generate`, with new processors."""
    arguments = dict(PROCESSORS[kind])
    processor = arguments.pop("processor", None)
    return {**arguments, "logits_processor": LogitsProcessorList([processor()])} if processor else arguments


class TargetAsDraft(Candidates):
    """Drafts with the target itself, read from the start in every step: sampled as the verification mode asks.

    Args:
        model: the target.
        temperature: of the draft.
    """

    def __init__(self, model: Any, temperature: float = 1.0, k: int = 3):
        super().__init__(k)
        self.model, self.temperature = model, temperature

    def start(self, call: Call) -> DraftSession:
        return _TargetAsDraftSession(self, call)


class _TargetAsDraftSession(DraftSession):
    def __init__(self, settings: TargetAsDraft, call: Call):
        super().__init__(call)
        self._settings = settings

    def draft(self, budget: Sequence[int]) -> DraftTree:
        state, verification = self.call.state, self.call.verification
        assert verification is not None
        texts = [prompt + tokens for prompt, tokens in zip(state.prompts, state.generated, strict=True)]
        drafts: list[list[int]] = [[] for _ in texts]
        q = []
        for depth in range(self._settings.k):
            logits = [self._settings.model(torch.tensor([text])).logits[0, -1] for text in texts]
            scores = torch.stack(logits) / self._settings.temperature
            q.append(scores.softmax(dim=-1))
            steps = [len(tokens) + depth for tokens in state.generated]
            drawn = verification.sample_draft(scores, steps).tolist()
            for text, draft, token in zip(texts, drafts, drawn, strict=True):
                text.append(token)
                draft.append(token)
        chains = DraftTree.chains([draft[:depth] for draft, depth in zip(drafts, budget, strict=True)])
        kept = torch.stack(q, dim=1)[:, : chains.nodes] if verification.wants_q else None
        return DraftTree(chains.tokens, chains.parents, kept)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("do_sample", [False, True])
@torch.no_grad()
def test_draft_equal_to_target_is_accepted(batch: int, verification: str, do_sample: bool) -> None:
    """Would catch: draft noise of another step or row than the target's; q or residual of a neighbouring node."""
    model, inputs = tiny_model("llama"), prompts(batch)
    common = {"max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": [7, 50], "pad_token_id": 0}
    if do_sample:
        common |= {"temperature": 0.5, "top_k": 0}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **common)
    torch.manual_seed(3)
    draft = TargetAsDraft(model, temperature=0.5 if do_sample else 1.0)
    output = model.generate(
        **inputs, **common, candidate_generator=draft, verification=verification, return_dict_in_generate=True
    )
    statistics = output.speculation
    assert statistics.drafted > 5
    if verification == "exact" or not do_sample:
        assert torch.equal(plain, output.sequences)
    for row, length in enumerate(statistics.lengths):  # all accepted: k + 1 tokens a step
        assert len(statistics.rows[row]) == -(-length // 4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("verification", ["rejection", "typical"])
@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
@torch.no_grad()
def test_sampled_output_logits_are_those_of_its_text(batch: int, kind: str, verification: str, branching: bool) -> None:
    """Would catch: a rejected token left in the cache, tokens after EOS.

    The logits of every step are compared with one pass over the output; 1e-4: float32 over 4 layers.
    """
    model, inputs = tiny_model("llama"), prompts(batch)
    width = inputs["input_ids"].shape[1]
    common = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    answers = plain_output(model, inputs, **common, **arguments_of(kind))[0][:, width:]
    output = model.generate(
        **inputs,
        **common,
        **arguments_of(kind),
        eos_token_id=[5, 6],
        candidate_generator=Oracle(answers, 0.7, branching=branching),
        verification=verification,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = output.sequences
    assert output.speculation.drafted > 0
    for row in ids[:, width:].tolist():
        ends = [column for column, token in enumerate(row) if token in (5, 6)]
        if ends:
            assert not any(row[ends[0] + 1 :])
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, width:])], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    whole = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(torch.stack(output.logits, dim=1), whole[:, width - 1 : -1], atol=1e-4, rtol=1e-4)


def test_typical_acceptance_is_lossy_and_accepts_more() -> None:
    """A tiny random model has high entropy everywhere, so it finds nearly every draft token plausible."""
    model, inputs = tiny_model("llama"), prompts(1)
    plain = model.generate(**inputs, max_new_tokens=16)
    oracle = Oracle(plain[:, inputs["input_ids"].shape[1] :], 0.5)
    exact = model.generate(**inputs, max_new_tokens=16, candidate_generator=oracle)
    assert oracle.speculation is not None
    accepted = oracle.speculation.accepted
    typical = model.generate(**inputs, max_new_tokens=16, candidate_generator=oracle, verification="typical")
    assert torch.equal(exact, plain) and not torch.equal(typical, plain)
    assert oracle.speculation.accepted > accepted
