"""Drafts of another tokenizer: the tokens of plain `generate`, and as many accepted as the text allows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specgen import DraftModelCandidates
from hf_specgen.candidates.reencoding import Codec, Reencoder
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT
from tests.helpers import SAMPLING, assert_same_tokens


def permuted(folder: Path, merges: int | None = None) -> Path:
    """The embedded draft model with its vocabulary in another order, and with its first merges only."""
    shutil.copytree(EMBEDDED_DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ids = sorted(index for index in vocabulary.values() if index not in special)
    new = dict(zip(ids, reversed(ids), strict=True))
    tokenizer["model"]["vocab"] = {token: new.get(index, index) for token, index in vocabulary.items()}
    if merges is not None:
        del tokenizer["model"]["merges"][merges:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32)
    order = torch.arange(model.config.vocab_size)
    for old, index in new.items():
        order[index] = old
    with torch.no_grad():
        tables = {id(table.weight): table.weight for table in (model.get_input_embeddings(), model.lm_head)}
        for weight in tables.values():
            weight.copy_(weight[order].clone())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tokenizer: Any, edit_prompts: list[str]) -> Any:
    texts = [edit_prompts[0], edit_prompts[1][:120], "def fib(n):\n"]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield permuted(tmp_path_factory.mktemp("drafts") / "permuted")


def test_permuted_vocabulary_is_accepted_as_often_as_the_same_one(
    reference_model: Any, prompts: Any, draft: Path
) -> None:
    """Would catch: text that is lost or doubled in translation, a draft cache that goes on from other tokens."""
    same = DraftModelCandidates(str(EMBEDDED_DRAFT), k=4, dtype=torch.float32)
    other = DraftModelCandidates(str(draft), k=4, dtype=torch.float32)
    expected = assert_same_tokens(reference_model, prompts, same, max_new_tokens=24)
    statistics = assert_same_tokens(reference_model, prompts, other, max_new_tokens=24)
    assert statistics.accepted >= 0.8 * expected.accepted > 0


def test_sampled_batch_with_another_tokenizer_same_tokens(reference_model: Any, prompts: Any, draft: Path) -> None:
    """Would catch: proposals that change the text."""
    candidates = DraftModelCandidates(str(draft), k=4, dtype=torch.float32, confidence_threshold=0.2)
    statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=24, **SAMPLING["sampled"])
    assert statistics.accepted > 0


def test_vocabulary_with_fewer_merges_same_tokens(reference_model: Any, prompts: Any, tmp_path: Path) -> None:
    """Would catch: tokens of the draft taken for tokens of the target where one is several of the other."""
    candidates = DraftModelCandidates(str(permuted(tmp_path / "fewer", merges=600)), k=6, dtype=torch.float32)
    statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=16)
    assert statistics.accepted > 0


def test_reencoder_follows_a_text_token_by_token(tokenizer: Any, draft: Path) -> None:
    """Would catch: characters of several tokens, and text that is divided otherwise once it grows."""
    text = "for each naïve café: print(“ok”) 🙂 done\n    return values[index]"
    tokens = tokenizer.encode(text)
    other = AutoTokenizer.from_pretrained(draft)
    row = Reencoder(Codec(tokenizer, other), Codec(other, tokenizer), tokens[:3])
    for token in tokens[3:]:
        row.extend([token])
    assert other.decode(row.tokens) == text
    continuation = other.encode(" and more", add_special_tokens=False)
    assert tokenizer.decode(row.translate(continuation)) == " and more"
