"""Generation ends exactly where plain `generate` ends it, and streams what plain `generate` streams."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, NgramCandidates, speculate
from tests.helpers import Oracle, RecordingStreamer, assert_same_tokens, prompt_length, prompts, tiny_model
from tests.helpers.comparison import plain_output

ALWAYS = partial(Oracle, accuracy=1.0)
ORACLES = {"sometimes": partial(Oracle, accuracy=0.7), "always": ALWAYS}


class StopAfter(StoppingCriteria):
    """Stops row b after `1 + 3 * b` new tokens."""

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        new = input_ids.shape[1] - self.prompt_length
        return torch.tensor([new >= 1 + 3 * row for row in range(len(input_ids))])


class StopOnAnyRow(StoppingCriteria):
    """Stops all rows as soon as one of them contains two tokens above 60 in a row."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        found = bool(((input_ids[:, -1] > 60) & (input_ids[:, -2] > 60)).any())
        return torch.full((len(input_ids),), found)


class StopOnScores(StoppingCriteria):
    """Reads the scores of the last column."""

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: object):
        assert scores is not None and len(scores) > 0
        return scores[-1].argmax(dim=-1) % 7 == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 0}])
@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("column", range(0, 16, 5))
def test_generate_eos_at_any_column_stops_there(batch: int, arguments: dict, oracle: str, column: int) -> None:
    """Would catch: tokens after EOS inside an accepted draft, or wrong padding after it."""
    model, inputs = tiny_model("llama"), prompts(batch)
    text = plain_output(model, inputs, max_new_tokens=16, **arguments)[0][:, prompt_length(inputs) :]
    end = {"eos_token_id": int(text[0, column]), "pad_token_id": 0}
    assert_same_tokens(model, inputs, ORACLES[oracle], max_new_tokens=16, **end, **arguments)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 98, "pad_token_id": 0}], ids=["without-eos", "with-eos"])
@pytest.mark.parametrize("criterion", [StopAfter(12), StopOnAnyRow(), StopOnScores()], ids=lambda c: type(c).__name__)
def test_generate_custom_criterion_stops_where_plain_generate_does(
    batch: int, ends: dict, criterion: StoppingCriteria
) -> None:
    """Would catch: a criterion that is evaluated per draft instead of per column.

    Transformers' own assisted decoding emits up to 40 tokens where this criterion allows one. Without EOS plain
    `generate` does not pad rows that a criterion stopped: they continue until the last row stops.
    """
    model, inputs = tiny_model("llama"), prompts(batch)
    arguments: dict[str, Any] = {"max_new_tokens": 24, "stopping_criteria": StoppingCriteriaList([criterion]), **ends}
    if isinstance(criterion, StopOnScores):
        arguments |= {"return_dict_in_generate": True, "output_scores": True}
    plain = model.generate(**inputs, **arguments)
    plain = plain if isinstance(plain, torch.Tensor) else plain.sequences
    ours = model.generate(**inputs, **arguments, candidate_generator=ALWAYS(plain[:, 12:]))
    assert torch.equal(plain, ours if isinstance(ours, torch.Tensor) else ours.sequences)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stop", ["self", "return", ":\n"])
def test_generate_stop_string_inside_draft_stops_there(
    reference_model: Any, tokenizer: Any, edit_prompts: list[str], batch: int, stop: str
) -> None:
    """Would catch: a stop string that ends inside an accepted draft; a tokenizer that is not passed on."""
    messages = [[{"role": "user", "content": prompt}] for prompt in edit_prompts[:batch]]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    arguments = {"max_new_tokens": 31, "stop_strings": [stop], "tokenizer": tokenizer}  # the last stop is at token 30
    plain = reference_model.generate(**inputs, **arguments)
    ours = reference_model.generate(**inputs, **arguments, candidate_generator=NgramCandidates(k=10))
    assert torch.equal(plain, ours)


def test_generate_max_time_of_zero_stops_after_one_token() -> None:
    """Would catch: a time limit that is checked once per step, after a whole accepted draft."""
    model, inputs = tiny_model("llama"), prompts(1)
    answers = model.generate(**inputs, max_new_tokens=50)[:, 12:]
    output = model.generate(**inputs, max_new_tokens=50, max_time=0.0, candidate_generator=ALWAYS(answers))
    assert output.shape[1] == 13


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


# Streamers


STREAM_ENTRIES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "keyword": lambda candidates, streamer: {"candidate_generator": candidates, "streamer": streamer},
    "speculate": lambda candidates, streamer: {"custom_generate": speculate(candidates, streamer=streamer)},
    "custom_generate": lambda candidates, streamer: {"custom_generate": speculate(candidates), "streamer": streamer},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("entry", STREAM_ENTRIES)
def test_streamer_receives_the_columns_of_plain_generate(batch: int, entry: str) -> None:
    """Would catch: columns behind the stop, several columns in one chunk, a stream without its prompt or end."""
    model, inputs = tiny_model("llama"), prompts(batch)
    arguments = {"max_new_tokens": 16, "eos_token_id": list(range(0, 40)), "pad_token_id": 0}
    expected, seen = RecordingStreamer(), RecordingStreamer()
    plain = model.generate(**inputs, **arguments, streamer=expected)
    model.generate(**inputs, **arguments, **STREAM_ENTRIES[entry](Oracle(plain[:, 12:], 0.8), seen))
    assert seen.chunks == expected.chunks
    assert seen.ended == expected.ended == 1


@pytest.mark.parametrize("entry", STREAM_ENTRIES)
def test_text_iterator_streamer_receives_the_text(entry: str, reference_model: Any, tokenizer: Any) -> None:
    """Would catch: the first token dropped where the streamer skips the prompt, a reader that waits for ever."""
    ids = tokenizer("def add(x, y):", return_tensors="pt").input_ids
    plain = plain_output(reference_model, {"input_ids": ids}, max_new_tokens=20)[0]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    reference_model.generate(ids, max_new_tokens=20, **STREAM_ENTRIES[entry](NgramCandidates(k=4), streamer))
    assert "".join(streamer) == tokenizer.decode(plain[0, ids.shape[1] :])


def test_stopping_criteria_are_evaluated_before_the_streamer() -> None:
    """As in plain `generate`: a criterion receives a column before the streamer does."""
    order: list[str] = []

    class RecordingCriterion(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            order.append("criterion")
            return torch.tensor([False])

    class OrderedStreamer(RecordingStreamer):
        def put(self, value: torch.Tensor) -> None:
            order.append("streamer")

    model, inputs = tiny_model("llama"), prompts(1)
    seen = []
    for extra in ({}, {"candidate_generator": NgramCandidates()}):
        order.clear()
        criteria = StoppingCriteriaList([RecordingCriterion()])
        model.generate(**inputs, max_new_tokens=6, stopping_criteria=criteria, streamer=OrderedStreamer(), **extra)
        seen.append(list(order))
    assert seen[0] == seen[1]
