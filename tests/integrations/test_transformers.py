"""Transformers' own clients of `generate`: `pipeline` and streamers; for `transformers serve` see `test_serve`."""

import threading
from typing import Any

from transformers import TextIteratorStreamer, pipeline

import hf_specgen


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
