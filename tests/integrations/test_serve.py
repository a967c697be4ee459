"""`hf-specgen serve`: OpenAI clients receive the texts of plain generation, whatever each of them asks for."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from hf_specgen import NgramCandidates
from tests.helpers.paths import REFERENCE_LM

openai = pytest.importorskip("openai", exc_type=ImportError)
pytest.importorskip("fastapi", exc_type=ImportError)

NEW = 20
QUESTIONS = [f"Repeat: {number}, {number + 1}, {number}, {number + 1}, {number}" for number in range(16)]
BATCHING = {"continuous_batching": True, "cb_num_blocks": 16, "cb_max_batch_tokens": 256}


@contextmanager
def serving(**options: Any) -> Iterator[tuple[Any, int, Any]]:
    """A client, the port of a server whose model speculates, and what counts its requests."""
    from hf_specgen.cli.serve import speculating_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options |= {"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "port": port}
    with speculating_server(str(REFERENCE_LM), NgramCandidates(k=5), **options) as (server, attachment):
        thread = threading.Thread(target=server.run)
        thread.start()
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                sleep(0.1)
        address = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120), port, attachment
        server.stop()
        thread.join(5)
        assert not thread.is_alive(), "a server that is not stopped by Ctrl-C"


def text_of(client: Any, question: str, **arguments: Any) -> str:
    """The answer to a question, read from its stream."""
    messages: Any = [{"role": "user", "content": question}]
    parts = client.chat.completions.create(model=str(REFERENCE_LM), messages=messages, stream=True, **arguments)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"do_sample": False}),
    ({"temperature": 0.8, "seed": 3}, {"do_sample": True, "temperature": 0.8}),
    ({"temperature": 1.0, "seed": 4, "top_p": 0.5}, {"do_sample": True, "top_p": 0.5}),
    ({"temperature": 0, "stop": ["_"]}, {"do_sample": False, "stop_strings": ["_"]}),
    (
        {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.3},
        {"do_sample": True, "temperature": 0.9, "repetition_penalty": 1.3},
    ),
    ({"temperature": 0, "frequency_penalty": 0.5}, {"do_sample": False, "repetition_penalty": 1.5}),
]
"""What requests ask for, and the arguments of `generate` that give the same text."""


def test_concurrent_streams_receive_the_text_of_the_same_request_alone(reference_model: Any, tokenizer: Any) -> None:
    """Would catch: stop strings, seeds, temperatures or penalties that are ignored, or those of another request.

    Among the streams some are cancelled, which changes no other one.
    """

    def alone(question: str, arguments: dict[str, Any], seed: int) -> str:
        messages = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
        torch.manual_seed(seed)
        ids = reference_model.generate(
            **inputs, **arguments, max_new_tokens=NEW, tokenizer=tokenizer, candidate_generator=None
        )
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    cases = [(question, *asked) for question in QUESTIONS[1:2] for asked in ASKED]
    expected = [alone(question, arguments, asked.get("seed", 0)) for question, asked, arguments in cases]
    with serving() as (client, port, attachment), ThreadPoolExecutor(8) as threads:

        def cancel(question: str) -> None:
            messages: Any = [{"role": "user", "content": question}]
            settings: Any = {"model": str(REFERENCE_LM), "messages": messages, "max_tokens": 500, "stream": True}
            stream = client.chat.completions.create(**settings, temperature=1.0, seed=9)
            next(iter(stream))
            stream.close()

        cancelled = [threads.submit(cancel, question) for question in QUESTIONS[:2]]
        texts = threads.map(lambda case: text_of(client, case[0], **case[1], max_tokens=NEW), cases)
        for case, text, own in zip(cases, texts, expected, strict=True):
            assert text == own, case
        assert [one.result() for one in cancelled] == [None, None]
        assert attachment.totals.drafted > 0 and attachment.totals.plain_calls == {}
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert "spec_decode_num_accepted_tokens_total" in metrics
        with pytest.raises(openai.BadRequestError, match="seed must be an integer"):
            text_of(client, "a", seed=2**70)


CHAT = {"model": str(REFERENCE_LM), "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
QUOTED = {"generation_config": json.dumps({"max_new_tokens": 2, "sequence_bias": [[['"'], 1.0]]})}
WRONG = [
    *({"messages": value} for value in (None, "a", [], [1], [None], [{"content": "a"}])),
    *({"messages": [{"role": "user", "content": "a\ud800"}], "stream": stream} for stream in (False, True)),
    *({"temperature": value} for value in (-1, float("nan"), "x", [])),
    *({"max_tokens": value} for value in (0, -1, "x", float("inf"))),
    *({"stop": value} for value in ([3], 3, [None], ["a"] * 17, "a" * 257)),
    *({"logit_bias": value} for value in ({"x": 5.0}, {"-1": 5.0}, [])),
    {"model": "\ud800"},
    {"tools": "x"},
    QUOTED,
]


def test_wrong_request_is_answered_with_a_reason_and_the_server_goes_on() -> None:
    """Would catch: "Internal Server Error" without a word; the error of a stream that is no JSON."""

    def answer(body: dict[str, Any]) -> tuple[int, str]:
        data, headers = json.dumps(CHAT | body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with serving() as (_, port, _):
        for body in WRONG:
            status, text = answer(body)
            assert status == 400, (body, text)
            assert json.loads(text)["error"]["message"].startswith("the request cannot be answered ("), (body, text)
        status, text = answer(QUOTED | {"stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        assert status == 200 and "sequence_bias" in chunks[-1]["error"], text
        assert answer({})[0] == 200


@pytest.fixture(scope="module")
def server() -> Any:
    """A server with continuous batching."""
    with serving(**BATCHING) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": 0, "stop": ["a"], "seed": 1}, "does not obey seed, stop"),
        ({"temperature": 0, "frequency_penalty": 0.5}, "does not obey frequency_penalty"),
        ({"temperature": 0.7}, "do_sample=False of the first request, not True; leave it out, or start the server"),
        ({"temperature": 0, "top_p": 0.3}, "top_p=.* of the first request, not 0.3"),
    ],
)
def test_continuous_batching_refuses_what_it_does_not_obey(server: Any, asked: Any, message: str) -> None:
    """Would catch: settings of a request that are ignored, or those of the first one."""
    text_of(server[0], "a", temperature=0, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match=message):
        text_of(server[0], "a", max_tokens=2, **asked)


def test_sixteen_streaming_clients_receive_the_texts_of_plain_generation(
    server: Any, reference_model: Any, tokenizer: Any, pytestconfig: pytest.Config
) -> None:
    """Would catch: tokens lost or repeated in a stream, a request that ends with another, a text of another request."""
    openai_client, _, attachment = server
    before = attachment.totals.calls

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
            assert text_of(openai_client, QUESTIONS[number], temperature=0, max_tokens=NEW) == expected[number]
            answers += 1
        return answers

    with ThreadPoolExecutor(16) as clients:
        answers = sum(clients.map(stream, range(16)))
    messages: Any = [{"role": "user", "content": QUESTIONS[3]}]
    settings: Any = {"model": str(REFERENCE_LM), "messages": messages, "temperature": 0, "max_tokens": NEW}
    assert openai_client.chat.completions.create(**settings).choices[0].message.content == expected[3]
    assert attachment.totals.calls == before + answers + 1
    assert attachment.totals.accepted > 0 and attachment.totals.plain_calls == {}
