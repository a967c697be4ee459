"""Structured output: outlines, xgrammar and lm-format-enforcer restrict the tokens while a strategy is attached."""

import json
import re
import sys
from typing import Any

import pytest
import torch
import transformers.tokenization_utils_base

import hf_specgen

PATTERN = r"[a-z]{3,8}(, [a-z]{3,8}){2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


def same_text(model: Any, generate: Any) -> str:
    """What `generate()` returns, with and without a strategy."""
    plain = generate()
    with hf_specgen.attached(model) as totals:
        assert generate() == plain
    assert totals.calls >= 1 and totals.drafted > 0
    return plain


def test_outlines_regex_same_text(model: Any, tokenizer: Any) -> None:
    outlines = pytest.importorskip("outlines", exc_type=ImportError)
    wrapped = outlines.from_transformers(model, tokenizer)
    generator = outlines.Generator(wrapped, outlines.types.Regex(PATTERN))
    text = same_text(
        model, lambda: generator("Three words: red, green, red, green", max_new_tokens=32, do_sample=False)
    )
    assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("batch", [1, 3])
def test_xgrammar_json_schema_same_text(model: Any, tokenizer: Any, batch: int) -> None:
    xgr = pytest.importorskip("xgrammar", exc_type=ImportError)
    from xgrammar.contrib.hf import LogitsProcessor

    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgr.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    inputs = tokenizer(['{"name": "Ann", "age": 3}\n' * 2] * batch, return_tensors="pt")

    def generate() -> list[str]:
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, logits_processor=[LogitsProcessor(grammar)])
        return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    for text in same_text(model, generate):
        assert text.startswith("{")


def test_lm_format_enforcer_regex_same_text(model: Any, tokenizer: Any) -> None:
    enforcer = pytest.importorskip("lmformatenforcer", exc_type=ImportError)
    sys.modules.setdefault("transformers.tokenization_utils", transformers.tokenization_utils_base)
    from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn

    inputs = tokenizer("Three words: red, green, red, green", return_tensors="pt")

    def generate() -> str:
        allowed = build_transformers_prefix_allowed_tokens_fn(tokenizer, enforcer.RegexParser(PATTERN))
        torch.manual_seed(0)
        ids = model.generate(**inputs, max_new_tokens=32, do_sample=True, prefix_allowed_tokens_fn=allowed)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    assert re.fullmatch(PATTERN, same_text(model, generate))
