"""Promise 5: generation ends exactly where plain `generate` would end it."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from tests.helpers import Oracle, plain_and_speculative, prompts, tiny_model

SOMETIMES, ALWAYS = {"accuracy": 0.7}, {"accuracy": 1.0}


class StopAfter(StoppingCriteria):
    """Stops row b after `1 + 3 * b` new tokens."""

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        new = input_ids.shape[1] - self.prompt_length
        return torch.tensor([new >= 1 + 3 * row for row in range(len(input_ids))])


class StopOnAnyRow(StoppingCriteria):
    """Looks across rows: stops all of them as soon as one contains two tokens over 60 in a row."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        found = bool(((input_ids[:, -1] > 60) & (input_ids[:, -2] > 60)).any())
        return torch.full((len(input_ids),), found)


class StopOnScores(StoppingCriteria):
    """Reads the scores of the last step."""

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: object):
        assert scores is not None and len(scores) > 0
        return scores[-1].argmax(dim=-1) % 7 == 0


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.chunks: list[list] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.chunks.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 0}])
def test_each_token_in_turn_is_the_end(batch: int, arguments: dict) -> None:
    """Would catch: tokens after an end token inside an accepted block, or padding that goes wrong after it."""
    model, inputs = tiny_model("llama"), prompts(batch)
    torch.manual_seed(11)
    text = model.generate(**inputs, max_new_tokens=16, **arguments)[:, inputs["input_ids"].shape[1] :]
    for end in sorted(set(text[0].tolist())):
        for oracle in (SOMETIMES, ALWAYS):
            plain, output = plain_and_speculative(
                model, inputs, oracle, max_new_tokens=16, eos_token_id=end, pad_token_id=0, **arguments
            )
            assert torch.equal(plain, output.sequences), end


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_end_token", [False, True])
@pytest.mark.parametrize("criterion", [StopAfter(12), StopOnAnyRow(), StopOnScores()])
def test_custom_criteria(batch: int, with_end_token: bool, criterion: StoppingCriteria) -> None:
    """Transformers' own assisted decoding emits up to 40 tokens where this criterion allows one.

    Without an end token plain `generate` does not pad finished rows: they go on until the last one is finished.
    """
    ends = {"eos_token_id": 98, "pad_token_id": 0} if with_end_token else {}
    plain, output = (
        plain_and_speculative(
            tiny_model("llama"),
            prompts(batch),
            ALWAYS,
            max_new_tokens=24,
            stopping_criteria=StoppingCriteriaList([criterion]),
            **ends,
        )
        if not isinstance(criterion, StopOnScores)
        else _with_scores(batch, criterion, ends)
    )
    assert torch.equal(plain, output.sequences)


def _with_scores(batch: int, criterion: StoppingCriteria, ends: dict):
    model, inputs = tiny_model("llama"), prompts(batch)
    arguments = dict(
        max_new_tokens=24,
        stopping_criteria=StoppingCriteriaList([criterion]),
        return_dict_in_generate=True,
        output_scores=True,
        **ends,
    )
    plain = model.generate(**inputs, **arguments).sequences
    oracle = Oracle(plain[:, inputs["input_ids"].shape[1] :], accuracy=1.0)
    return plain, model.generate(**inputs, **arguments, candidate_generator=oracle)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 6])
def test_length(max_new_tokens: int) -> None:
    """k may exceed what remains."""
    plain, output = plain_and_speculative(
        tiny_model("llama"), prompts(3), {"accuracy": 1.0, "k": 9}, max_new_tokens=max_new_tokens
    )
    assert torch.equal(plain, output.sequences)


def test_text_longer_than_the_position_table() -> None:
    """GPT-2 has a table of positions: a draft must not reach behind it although the text may not."""
    model = tiny_model("gpt2", n_positions=20)
    plain, output = plain_and_speculative(model, prompts(1), {"accuracy": 1.0, "k": 9}, max_length=20)
    assert torch.equal(plain, output.sequences)
    end = int(plain[0, 17])
    plain, output = plain_and_speculative(
        model, prompts(1), {"accuracy": 0.0, "k": 9}, max_length=40, eos_token_id=end, pad_token_id=0
    )
    assert torch.equal(plain, output.sequences)


@pytest.mark.parametrize("batch", [1, 3])
def test_stop_strings(reference_model, tokenizer, edit_prompts: list[str], batch: int) -> None:
    """Would catch: a stop string that ends inside an accepted block; the tokenizer lost on the way."""
    messages = [[{"role": "user", "content": prompt}] for prompt in edit_prompts[:batch]]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    for stop in ("self", "return", ":\n"):
        arguments = {"max_new_tokens": 60, "stop_strings": [stop], "tokenizer": tokenizer}
        plain = reference_model.generate(**inputs, **arguments)
        ours = reference_model.generate(**inputs, **arguments, candidate_generator=NgramCandidates(k=10))
        assert torch.equal(plain, ours)


def test_max_time_stops_within_a_block() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    answers = model.generate(**inputs, max_new_tokens=50)[:, 12:]
    output = model.generate(**inputs, max_new_tokens=50, max_time=0.0, candidate_generator=Oracle(answers, 1.0))
    assert output.shape[1] == 13


@pytest.mark.parametrize("batch", [1, 3])
def test_streamer_gets_what_plain_generate_gives_it(batch: int) -> None:
    """Would catch: a streamer that sees tokens behind the stop, blocks instead of columns, or no end."""
    model, inputs = tiny_model("llama"), prompts(batch)
    arguments = {"max_new_tokens": 16, "eos_token_id": list(range(0, 40)), "pad_token_id": 0}
    expected, seen = Recorder(), Recorder()
    plain = model.generate(**inputs, **arguments, streamer=expected)
    model.generate(**inputs, **arguments, streamer=seen, candidate_generator=Oracle(plain[:, 12:], 0.8))
    assert seen.chunks == expected.chunks
    assert seen.ended == expected.ended == 1


def test_text_streamers(reference_model, tokenizer, edit_prompts: list[str], capsys) -> None:
    inputs = tokenizer(edit_prompts[0], return_tensors="pt")
    arguments = {"max_new_tokens": 40}
    plain = tokenizer.decode(reference_model.generate(**inputs, **arguments)[0, inputs["input_ids"].shape[1] :])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    reference_model.generate(**inputs, **arguments, streamer=streamer, candidate_generator=NgramCandidates())
    assert "".join(streamer) == plain
    reference_model.generate(
        **inputs,
        **arguments,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        candidate_generator=NgramCandidates(),
    )
    assert capsys.readouterr().out.strip() == plain.strip()


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("kind", ["oracle", "draft", "skip"])
def test_ended_rows_are_computed_no_longer(sampling: dict, kind: str) -> None:
    """Would catch: rows mixed up once some have left the batch; rows that stay in it for nothing."""
    model, inputs = tiny_model("llama"), prompts(6)
    arguments = {"max_new_tokens": 30, "eos_token_id": list(range(0, 12)), "pad_token_id": 0, **sampling}
    torch.manual_seed(8)
    plain = model.generate(**inputs, **arguments)
    candidates: Candidates = Oracle(plain[:, 12:], 0.6, branching=True)
    if kind != "oracle":
        candidates = DraftModelCandidates(model, k=2) if kind == "draft" else LayerSkipCandidates(3, k=2)
    rows: list[int] = []
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    torch.manual_seed(8)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates)
    handle.remove()
    assert torch.equal(ours, plain)
    assert len(set((plain[:, 12:] != 0).sum(dim=1).tolist())) > 2, "the rows must end at different lengths"
    assert min(rows) < 6
