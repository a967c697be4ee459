"""Transformers' own clients of `generate`: `pipeline`, streamers, scripts in a model's folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

import hf_specgen
from hf_specgen.counters import CallTotals

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


def test_generate_script_of_a_model_folder_same_text(
    model: Any, tokenizer: Any, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `transformers serve --trust-remote-code` runs for each request: `custom_generate/generate.py`."""
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(GENERATE)
    calls: list[int] = []
    monkeypatch.setattr(CallTotals, "add", lambda self, call: calls.append(call.drafted))
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    arguments = {"max_new_tokens": 24, "do_sample": False, "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, **arguments, custom_generate=str(tmp_path)), expected)
    assert len(calls) == 1 and calls[0] > 0
