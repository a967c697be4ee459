"""Drafts of another tokenizer: the tokens of plain `generate`, and as many accepted as the text allows."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_specgen import DraftModelCandidates
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT
from tests.helpers import SAMPLING, assert_same_tokens
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.models import small_llama


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


def load(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def drafts(draft: Path) -> dict[str, Any]:
    """The same draft model with the target's vocabulary and with the permuted one, loaded once for all tests."""
    return {"same": load(EMBEDDED_DRAFT), "permuted": load(draft)}


@pytest.mark.parametrize(("tree", "sampling"), [(None, "sampled"), (12, "greedy")])
def test_permuted_vocabulary_drafts_what_the_same_vocabulary_does(
    reference_model: Any, prompts: Any, drafts: dict[str, Any], tree: int | None, sampling: str
) -> None:
    """Would catch: a wrong map of ids, a text or a cache that is not the row's, noise that is not the target's."""
    steps = []
    for draft in drafts.values():
        candidates = DraftModelCandidates(draft, k=4, tree=tree)
        statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=16, **SAMPLING[sampling])
        steps.append(statistics.rows)
    assert steps[0] == steps[1]
    assert sum(step.accepted for row in steps[1] for step in row) > 10


def test_vocabulary_with_fewer_merges_same_tokens(reference_model: Any, prompts: Any, tmp_path: Path) -> None:
    """Would catch: tokens of the draft taken for tokens of the target where one is several of the other."""
    draft = permuted(tmp_path / "fewer", merges=600)
    candidates = DraftModelCandidates(str(draft), k=6, tree=12, dtype=torch.float32)
    statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=16)
    assert statistics.accepted > 0


# Small models whose tokenizers are written for the test.


def tokenizer_of(characters: Sequence[str], folder: Path) -> Path:
    """A tokenizer with these tokens, in this order; all of them, but for the unknown token, have the same length."""
    length = len(characters[0])
    backend = Tokenizer(WordLevel({character: token for token, character in enumerate(characters)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("." * length), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(folder)
    return folder


def small_model(characters: Sequence[str], folder: Path, seed: int, positions: int = 64) -> Any:
    model = small_llama(len(characters), seed, max_position_embeddings=positions)
    model.name_or_path = str(tokenizer_of(characters, folder))
    return model


@pytest.mark.parametrize("tree", [None, 5])
def test_shared_vocabulary_rejection_sampling_has_the_distribution_of_the_target(tree: Any, tmp_path: Path) -> None:
    """Would catch: q that includes tokens which are never drafted, q in the draft's order.

    Three of six tokens are shared. 2,000 samples of two tokens; fails by chance once in 1,000 runs of another seed.
    """
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("gfxcy?a", tmp_path / "draft", 3)
    candidates = DraftModelCandidates(draft, k=2, tree=tree)
    assert fit_of_two_tokens(target, torch.tensor([[0, 2, 5]]), candidates, calls=4) > 1e-3


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("prompt", ["abcd", "efef"])
def test_few_shared_tokens_same_tokens(prompt: str, sampling: str, tmp_path: Path) -> None:
    """Would catch: a row whose text the draft's vocabulary cannot express, a token drafted that it does not have."""
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?xyba", tmp_path / "draft", 3)
    inputs = {"input_ids": torch.tensor([["abcdef".index(character) for character in prompt]])}
    candidates = DraftModelCandidates(draft, k=2, tree=4)
    statistics = assert_same_tokens(target, inputs, candidates, max_new_tokens=16, **SAMPLING[sampling])
    assert statistics.drafted > 0


def test_prompt_of_one_token_is_read_once(tmp_path: Path) -> None:
    """Would catch: a second pass over the last token of a prompt, whose logits the prefill has returned."""
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?fedcba", tmp_path / "draft", 3)
    read: list[list[int]] = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    candidates = DraftModelCandidates(draft, k=1)
    target.generate(torch.tensor([[0]]), max_new_tokens=2, candidate_generator=candidates)  # checks the draft
    read.clear()
    target.generate(torch.tensor([[0]]), max_new_tokens=2, candidate_generator=candidates)
    assert read == [[6]]


def test_prompt_longer_in_the_tokens_of_the_draft_is_refused(tmp_path: Path) -> None:
    target = small_model("abcdef?", tmp_path / "target", 0)
    draft = small_model("?fedcba", tmp_path / "draft", 3, positions=4)
    with pytest.raises(ValueError, match="at most 4"):
        target.generate(torch.tensor([[0] * 5]), max_new_tokens=2, candidate_generator=DraftModelCandidates(draft, k=2))


def test_prompt_longer_in_the_tokens_of_the_target_same_tokens(tmp_path: Path) -> None:
    """Would catch: a prompt counted in the target's tokens, of which it has twice as many as of the draft's."""
    target = small_model("abcdef?", tmp_path / "target", 0)
    draft = small_model(["ab", "cd", "?"], tmp_path / "draft", 3, positions=12)
    inputs = {"input_ids": torch.tensor([[0, 1, 2, 3] * 4])}
    statistics = assert_same_tokens(target, inputs, DraftModelCandidates(draft, k=2), max_new_tokens=6)
    assert statistics.drafted > 0
