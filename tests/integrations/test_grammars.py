"""Structured output: outlines, xgrammar, llguidance and lm-format-enforcer, with attached strategies."""

import json
import re
import sys
from typing import Any

import pytest
import torch
import transformers.tokenization_utils_base

import hf_specgen
from hf_specgen import NgramCandidates

PATTERN = r"[a-z]{3,8}(, [a-z]{3,8}){2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


def same_text(model: Any, generate: Any) -> str:
    """What `generate()` returns, with and without a strategy; a grammar in the drafts makes fewer steps."""
    plain, steps = generate(), []
    for grammar_drafts in (False, True):
        with hf_specgen.attached(model, NgramCandidates(k=16, tree=32), grammar_drafts=grammar_drafts) as totals:
            assert generate() == plain
        assert totals.calls >= 1 and totals.drafted > 0
        steps.append(totals.steps)
    assert steps[1] < steps[0]
    return plain


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


@pytest.mark.parametrize("backend", ["regex", "outlines_core", "llguidance", "xgrammar"])
def test_outlines_same_text(model: Any, tokenizer: Any, backend: str) -> None:
    outlines = pytest.importorskip("outlines", exc_type=ImportError)
    wrapped = outlines.from_transformers(model, tokenizer)
    if backend == "regex":
        generator = outlines.Generator(wrapped, outlines.types.Regex(PATTERN))
        prompt, expected = "Three words: red, green, red, green", PATTERN
    else:
        generator = outlines.Generator(wrapped, outlines.types.JsonSchema(json.dumps(SCHEMA)), backend=backend)
        prompt, expected = '{"name": "Ann", "age": 3}\n' * 2, r"\{.*"
    text = same_text(model, lambda: generator(prompt, max_new_tokens=32, do_sample=False))
    assert re.fullmatch(expected, text, re.S)


def test_llguidance_processor_of_ones_own_same_text(model: Any, tokenizer: Any) -> None:
    """A matcher that the processor was given is forked."""
    pytest.importorskip("llguidance", exc_type=ImportError)
    import llguidance.hf
    import llguidance.torch

    size = model.config.vocab_size
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
    inputs = tokenizer(['{"name": "Ann", "age": 3}\n' * 2], return_tensors="pt")

    class Restrict:
        def __init__(self) -> None:
            grammar = llguidance.grammar_from("json_schema", json.dumps(SCHEMA))
            self.matcher, self.is_first = llguidance.LLMatcher(vocabulary, grammar), True

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not self.is_first:
                self.matcher.consume_token(int(ids[0, -1]))
            self.is_first = False
            bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8)).bitwise_and(1).flatten()[:size].bool()
            return scores.masked_fill(~allowed, -float("inf"))

    def generate() -> str:
        torch.manual_seed(0)
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=True, logits_processor=[Restrict()])
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    assert same_text(model, generate).startswith("{")


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
