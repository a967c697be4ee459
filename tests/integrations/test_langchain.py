"""LangChain: `HuggingFacePipeline`."""

from time import monotonic, sleep
from typing import Any

import pytest
from transformers import pipeline

import hf_specgen

langchain_huggingface = pytest.importorskip("langchain_huggingface", exc_type=ImportError)


def test_huggingface_pipeline_same_text_invoked_and_streamed(model: Any, tokenizer: Any, prompt: str) -> None:
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=24, do_sample=False)
    llm = langchain_huggingface.HuggingFacePipeline(pipeline=generate)
    plain, streamed = llm.invoke(prompt), "".join(llm.stream(prompt))
    with hf_specgen.attached(model) as totals:
        assert llm.invoke(prompt) == plain
        assert "".join(llm.stream(prompt)) == streamed
    deadline = monotonic() + 10
    while totals.calls < 2 and monotonic() < deadline:  # the stream ends shortly before the call in its thread does
        sleep(0.01)
    assert totals.calls == 2 and totals.accepted > 0
