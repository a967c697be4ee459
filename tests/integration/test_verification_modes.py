"""The verification modes inside `generate`: stops, scores, batches, processors, and a draft that equals the target."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

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
