"""The reference implementation in `docs/how_it_works.md` generates the tokens of plain `generate`, and so do we."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specgen import DraftModelCandidates, NgramCandidates
from tests.helpers.paths import DRAFT_LM, REFERENCE_LM, ROOT

PROMPT = "def add(x, y):\n    return x + y\n\ndef add(x, y):"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50}
TOKENS = 20


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The names that the document's first block defines."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", page, flags=re.S)[0]
    assert block.count("\n") <= 62, "a reference that is no longer short"
    names: dict[str, Any] = {}
    exec(block, names)
    return names


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, Any]:
    """The bundled target and draft model in float32, and their tokenizer."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (REFERENCE_LM, DRAFT_LM)
    )
    return target, draft, AutoTokenizer.from_pretrained(REFERENCE_LM)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", ["n-grams", "draft model"])
def test_reference_loop_gives_the_tokens_of_generate(
    reference: dict[str, Any], models: tuple[Any, Any, Any], strategy: str, sampled: bool
) -> None:
    """Would catch: a published algorithm that is not lossless, or a loop of ours that differs from it."""
    target, draft, tokenizer = models
    inputs = tokenizer(PROMPT, return_tensors="pt")
    settings = SAMPLING if sampled else {}
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(50)] if sampled else [])
    if strategy == "n-grams":
        propose, candidates = reference["prompt_lookup"], NgramCandidates(k=5)
    else:
        propose, candidates = reference["draft_with"](draft), DraftModelCandidates(draft, k=5)
    passes: list[int] = []
    hook = target.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[1]))

    torch.manual_seed(3)
    ours = reference["reference_loop"](
        target,
        inputs["input_ids"],
        propose,
        TOKENS,
        do_sample=sampled,
        processors=processors,
        end_tokens=(target.generation_config.eos_token_id,),
    )
    hook.remove()
    state = torch.get_rng_state()

    for options in ({}, {"candidate_generator": candidates}):
        torch.manual_seed(3)
        assert torch.equal(ours, target.generate(**inputs, max_new_tokens=TOKENS, **settings, **options))
        assert torch.equal(state, torch.get_rng_state())
    assert len(passes) < ours.shape[1] - inputs["input_ids"].shape[1], "no draft token was accepted"
