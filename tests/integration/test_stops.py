"""Rows that end leave the batch, and streamers receive the columns; where texts end is in `test_cases.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, NgramCandidates, speculate
from tests.helpers import Oracle, RecordingStreamer, prompts, tiny_model
from tests.helpers.comparison import plain_output


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("kind", ["oracle", "draft", "skip"])
def test_generate_ended_rows_leave_the_batch(sampling: dict, kind: str) -> None:
    """Would catch: rows that change places once others have left the batch; ended rows that stay in it."""
    model, inputs = tiny_model("llama"), prompts(6)
    arguments = {"max_new_tokens": 30, "eos_token_id": list(range(0, 12)), "pad_token_id": 0, **sampling}
    torch.manual_seed(8)
    plain = model.generate(**inputs, **arguments)
    candidates: Candidates = Oracle(plain[:, 12:], 0.6, branching=True)
    if kind != "oracle":
        candidates = DraftModelCandidates(model, k=2) if kind == "draft" else LayerSkipCandidates(1, k=2)
    rows: list[int] = []
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    torch.manual_seed(8)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates)
    handle.remove()
    assert torch.equal(ours, plain)
    assert len(set((plain[:, 12:] != 0).sum(dim=1).tolist())) > 2, "the rows must end at different lengths"
    assert min(rows) < 6


STREAM_ENTRIES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "keyword": lambda candidates, streamer: {"candidate_generator": candidates, "streamer": streamer},
    "speculate": lambda candidates, streamer: {"custom_generate": speculate(candidates, streamer=streamer)},
    "custom_generate": lambda candidates, streamer: {"custom_generate": speculate(candidates), "streamer": streamer},
}


def test_criterion_is_evaluated_before_the_streamer_receives_a_column() -> None:
    """As in plain `generate`."""
    order: list[str] = []

    class Streamer(RecordingStreamer):
        def put(self, value: torch.Tensor) -> None:
            order.append("streamer")

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            order.append("criterion")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    arguments = {"max_new_tokens": 6, "stopping_criteria": StoppingCriteriaList([Criterion()]), "streamer": Streamer()}
    tiny_model("llama").generate(**prompts(1), **arguments, candidate_generator=NgramCandidates())
    assert order == ["streamer", *("criterion", "streamer") * 6]  # first the prompt


@pytest.mark.parametrize("entry", STREAM_ENTRIES)
def test_text_iterator_streamer_receives_the_text(entry: str, reference_model: Any, tokenizer: Any) -> None:
    """Would catch: the first token dropped where the streamer skips the prompt, a reader that waits for ever."""
    ids = tokenizer("def add(x, y):", return_tensors="pt").input_ids
    plain = plain_output(reference_model, {"input_ids": ids}, max_new_tokens=20)[0]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    reference_model.generate(ids, max_new_tokens=20, **STREAM_ENTRIES[entry](NgramCandidates(k=4), streamer))
    assert "".join(streamer) == tokenizer.decode(plain[0, ids.shape[1] :])
