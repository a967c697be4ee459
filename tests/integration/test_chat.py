"""`hf-specgen chat`: the same answers with every strategy, coloured as they were drafted, over several turns."""

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_specgen import NgramCandidates
from hf_specgen.cli.chat import AnswerWriter, Chat, Conversation

EDIT = "Rename `x` to `total`: def add(x, y): return x + y"


@pytest.fixture
def conversation(reference_model: Any, tokenizer: Any) -> Conversation:
    return Conversation(reference_model, tokenizer, {"max_new_tokens": 24, "do_sample": False})


def ask(conversation: Conversation, question: str, candidates: Any) -> tuple[str, str, list[tuple[str, bool]]]:
    """The answer, the line about it, and the pieces that were written."""
    pieces: list[tuple[str, bool]] = []
    conversation.messages.append({"role": "user", "content": question})
    status = conversation.answer("name", candidates, lambda *piece: pieces.append(piece))
    return conversation.messages[-1]["content"], status, pieces


def test_answers_over_two_turns_same_text_as_plain_and_cache_is_kept(conversation: Conversation) -> None:
    """Would catch: a cache that does not belong to the text, and a conversation that is read anew in every turn."""
    texts = []
    for strategy in (None, NgramCandidates(k=4)):
        conversation.clear()
        first, *_ = ask(conversation, EDIT, strategy)
        assert conversation.cache.get_seq_length() >= conversation.text.shape[1] - 1
        texts.append((first, ask(conversation, "And now rename `y`.", strategy)[0]))
    assert texts[0] == texts[1] and all(texts[0])


def test_streamed_pieces_are_the_answer_and_mark_accepted_draft_tokens(conversation: Conversation) -> None:
    candidates = NgramCandidates(k=4)
    answer, status, pieces = ask(conversation, EDIT, candidates)
    assert "".join(text for text, _ in pieces) == answer
    accepted = sum(is_accepted for _, is_accepted in pieces)
    assert 0 < accepted <= candidates.speculation.accepted
    assert "tokens/s" in status and "% accepted" in status


def test_streamer_waits_for_the_last_byte_of_a_character(tokenizer: Any) -> None:
    """Would catch: replacement characters on the terminal."""
    text = "naïve 日本 🙂\nnext"
    pieces: list[tuple[str, bool]] = []
    streamer = AnswerWriter(tokenizer, lambda *piece: pieces.append(piece))
    streamer.put(torch.tensor([[0]]))
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(piece for piece, _ in pieces) == text


def dialogue(conversation: Conversation, *lines: str) -> str:
    """What the chat prints for these lines."""
    output = io.StringIO()
    console = Console(file=output, width=80)
    waiting = iter(lines)

    def read() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    Chat(conversation, {"plain": None, "n-grams": NgramCandidates(k=4)}, console).run(read)
    return output.getvalue()


def test_again_with_another_strategy_gives_the_same_answer(conversation: Conversation) -> None:
    output = dialogue(conversation, EDIT, "/plain", "/again", "/strategy n-grams", "/again")
    status = re.findall(r"^(.*) · (\d+) tokens · .*/s", output, flags=re.M)
    assert [name for name, _ in status] == ["n-grams", "plain", "n-grams"] and len({count for _, count in status}) == 1
    answers = re.findall(r"^(def .*)$", output, flags=re.M)
    assert len(answers) == 3 and len(set(answers)) == 1
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/strategy", "strategies: plain, n-grams; now: n-grams"),
        ("/strategy medusa", "there is no strategy 'medusa'; strategies: plain, n-grams"),
        ("/again", "there is no answer to repeat"),
        ("/help", "answer the last question again"),
        ("/nonsense", "/strategy [NAME]"),
        ("/", "/strategy [NAME]"),
    ],
)
def test_command_prints_one_answer(conversation: Conversation, line: str, message: str) -> None:
    assert message in dialogue(conversation, line)


def test_new_forgets_the_conversation_but_not_the_system_prompt(reference_model: Any, tokenizer: Any) -> None:
    conversation = Conversation(
        reference_model, tokenizer, {"max_new_tokens": 2, "do_sample": False}, system="Be brief."
    )
    dialogue(conversation, "Hello", "/new", "/quit", "never read")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}] and conversation.cache is None
