"""The draft models of `python -m benchmarks micro other-tokenizer`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.micro.other_tokenizer import Tokenizer, with_tokenizer
from hf_specgen.candidates.cross_tokenizer import shared_ids
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT

TEXT = "The quick brown fox jumps over 13 lazy dogs."


@pytest.mark.parametrize("tokenizer", [Tokenizer(), Tokenizer(first=600), Tokenizer(removed=0.4)], ids=str)
def test_with_tokenizer_keeps_texts_and_moves_the_weights_with_the_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Would catch: weights in another order than the tokens, which no draft token would survive."""
    folder = with_tokenizer(tokenizer, tmp_path / "draft")
    own, other = (AutoTokenizer.from_pretrained(name) for name in (EMBEDDED_DRAFT, folder))
    ids = other(TEXT, add_special_tokens=False)["input_ids"]
    assert other.decode(ids) == TEXT and ids != own(TEXT, add_special_tokens=False)["input_ids"]
    shared = shared_ids(str(EMBEDDED_DRAFT), str(folder))
    by_draft = {index: token for token, index in enumerate(shared) if index >= 0}
    model, moved = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval() for name in (EMBEDDED_DRAFT, folder)
    )
    with torch.no_grad():
        expected = model(torch.tensor([[by_draft[index] for index in ids]])).logits[0, -1]
        logits = moved(torch.tensor([ids])).logits[0, -1]
    common = [token for token, index in enumerate(shared) if index >= 0]
    torch.testing.assert_close(logits[[shared[token] for token in common]], expected[common])
    assert (len(common) == len(own)) == (tokenizer == Tokenizer())
