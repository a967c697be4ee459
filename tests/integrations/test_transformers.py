"""Transformers' own clients of `generate`: `pipeline` and `transformers serve`."""

import json
import shutil
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import TextIteratorStreamer, pipeline

import hf_specgen
from hf_specgen.counters import CallTotals
from tests.helpers.paths import REFERENCE_LM

GENERATE = """\
import hf_specgen

def generate(model, **arguments):
    with hf_specgen.attached(model, "auto"):
        return type(model).generate(model, **arguments)
"""


def test_pipeline_batch_of_chats_same_text(model: Any, tokenizer: Any, prompt: str) -> None:
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=16, do_sample=False)
    chats = [[{"role": "user", "content": text}] for text in (prompt, "Hello", "Count: 1, 2, 1, 2")]
    expected = ask(chats, batch_size=3)
    with hf_specgen.attached(model) as totals:
        assert ask(chats, batch_size=3) == expected
    assert totals.calls == 1 and totals.drafted > 0


def test_streamer_in_a_thread_same_text(model: Any, tokenizer: Any, prompt: str) -> None:
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = tokenizer.decode(model.generate(**inputs, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :])
    hf_specgen.attach(model)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 24})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def ask_server(port: int, model: str, content: str) -> str:
    """The answer to an OpenAI-style request."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "stream": False,
        "temperature": 0,
        "max_tokens": 24,
    }
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_serve_same_answer(
    model: Any, tokenizer: Any, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers serve --trust-remote-code` runs the `custom_generate/generate.py` of a model's folder."""
    for library in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(library)
    from transformers.cli.serve import Serve

    folder = tmp_path / "speculative"
    shutil.copytree(REFERENCE_LM, folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(GENERATE)
    calls: list[int] = []
    monkeypatch.setattr(CallTotals, "add", lambda self, call: calls.append(call.drafted))

    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    port = free_port()
    server = Serve(
        force_model=str(folder), trust_remote_code=True, device="cpu", dtype="float32", port=port, non_blocking=True
    )
    try:
        while not server.server.started:
            assert server._thread.is_alive()
        assert ask_server(port, str(folder), prompt) == expected
    finally:
        server.kill_server()
    assert len(calls) == 1 and calls[0] > 0
