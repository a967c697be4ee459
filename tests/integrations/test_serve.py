"""`transformers serve` with continuous batching: OpenAI clients see the texts of plain generation."""

import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any

import pytest

from hf_specgen import NgramCandidates
from tests.helpers.paths import REFERENCE_LM

openai = pytest.importorskip("openai", exc_type=ImportError)
pytest.importorskip("fastapi", exc_type=ImportError)

NEW = 20
QUESTIONS = [f"Repeat: {number}, {number + 1}, {number}, {number + 1}, {number}" for number in range(16)]


@pytest.fixture(scope="module")
def server() -> Any:
    """The port of a server whose models speculate, and what counts their requests."""
    from transformers.cli.serve import Serve

    from hf_specgen.attachment import attached_to_every_model

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"cb_num_blocks": 16, "cb_max_batch_tokens": 256, "device": "cpu", "dtype": "float32"}
    options |= {"host": "127.0.0.1", "port": port, "non_blocking": True}
    with attached_to_every_model(NgramCandidates(k=5)) as attachment:
        running = Serve(str(REFERENCE_LM), continuous_batching=True, **options)
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                sleep(0.1)
        yield port, attachment
        running.kill_server()


def test_sixteen_streaming_clients_receive_the_texts_of_plain_generation(
    server: Any, reference_model: Any, tokenizer: Any, pytestconfig: pytest.Config
) -> None:
    """Would catch: tokens lost or repeated in a stream, a request that ends with another, a text of another request."""
    port, attachment = server
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(question: str, stream: bool) -> str:
        messages: Any = [{"role": "user", "content": question}]
        arguments = {"model": str(REFERENCE_LM), "messages": messages, "temperature": 0, "max_tokens": NEW}
        answer: Any = client.chat.completions.create(**arguments, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join(part.choices[0].delta.content or "" for part in answer if part.choices)

    def plain(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
        ids = reference_model.generate(**inputs, max_new_tokens=NEW, do_sample=False, candidate_generator=None)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    expected = [plain(question) for question in QUESTIONS]
    end = monotonic() + pytestconfig.getoption("--thread-seconds") - 5

    def stream(client: int) -> int:
        answers = 0
        while answers < 2 or monotonic() < end:
            number = (client + answers) % len(QUESTIONS)
            assert ask(QUESTIONS[number], True) == expected[number]
            answers += 1
        return answers

    with ThreadPoolExecutor(16) as clients:
        answers = sum(clients.map(stream, range(16)))
    assert ask(QUESTIONS[3], False) == expected[3]
    assert attachment.totals.calls == answers + 1
    assert attachment.totals.accepted > 0 and attachment.totals.plain_calls == {}
