"""Drafts of another tokenizer: the tokens of plain `generate`, and as many accepted as the text allows."""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_specgen import CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.candidates.best_first import SearchLimits
from hf_specgen.candidates.ngram import MatchOdds, RowText, outcomes
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT
from hf_specgen.verification.result import accepted_path
from tests.fuzz.models import word_level
from tests.helpers import SAMPLING, assert_same_tokens, prompts, tiny_model
from tests.helpers.comparison import plain_output
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.models import recorded_inputs, small_llama


def permuted(folder: Path, merges: int | None = None) -> Path:
    """The embedded draft model with its vocabulary in another order, and with its first merges only."""
    shutil.copytree(BUNDLED_DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ids = sorted(index for index in vocabulary.values() if index not in special)
    new = dict(zip(ids, reversed(ids), strict=True))
    tokenizer["model"]["vocab"] = {token: new.get(index, index) for token, index in vocabulary.items()}
    if merges is not None:
        del tokenizer["model"]["merges"][merges:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_DRAFT, dtype=torch.float32)
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
def edits(tokenizer: Any, edit_prompts: list[str]) -> Any:
    texts = [edit_prompts[3], edit_prompts[1][:120], "def fib(n):\n"]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield permuted(tmp_path_factory.mktemp("drafts") / "permuted")


def load(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def drafts(draft: Path) -> dict[str, Any]:
    """The same draft model with the target's vocabulary and with the permuted one, loaded once for all tests."""
    return {"same": load(BUNDLED_DRAFT), "permuted": load(draft)}


@pytest.mark.parametrize(("tree", "sampling"), [(None, "sampled"), (12, "greedy")])
def test_permuted_vocabulary_drafts_what_the_same_vocabulary_does(
    reference_model: Any, edits: Any, drafts: dict[str, Any], tree: int | None, sampling: str
) -> None:
    """Would catch: a wrong map of ids, a text or a cache that is not the row's, noise that is not the target's."""
    steps = []
    for draft in drafts.values():
        candidates = DraftModelCandidates(draft, k=4, tree=tree)
        statistics = assert_same_tokens(reference_model, edits, candidates, max_new_tokens=16, **SAMPLING[sampling])
        steps.append(statistics.rows)
    assert steps[0] == steps[1]
    assert sum(step.accepted for row in steps[1] for step in row) > 10


def test_vocabulary_with_fewer_merges_same_tokens(reference_model: Any, edits: Any, tmp_path: Path) -> None:
    """Would catch: tokens of the draft taken for tokens of the target where one is several of the other."""
    draft = permuted(tmp_path / "fewer", merges=600)
    candidates = DraftModelCandidates(str(draft), k=6, tree=12, dtype=torch.float32)
    statistics = assert_same_tokens(reference_model, edits, candidates, max_new_tokens=16)
    assert statistics.accepted > 0


# Small models whose tokenizers are written for the test.


def small_model(characters: Sequence[str], folder: Path, seed: int, positions: int = 64) -> Any:
    """A model whose tokenizer has these tokens: it splits texts by the length of the first one."""
    model = small_llama(len(characters), seed, max_position_embeddings=positions)
    vocabulary = {character: token for token, character in enumerate(characters)}
    backend = word_level(vocabulary, "?", len(characters[0]))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


@pytest.mark.parametrize("tree", [None, 5])
def test_shared_vocabulary_rejection_sampling_has_the_distribution_of_the_target(tree: Any, tmp_path: Path) -> None:
    """Three of six tokens are shared. Would catch: q of tokens which are never drafted, q in the draft's order."""
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("gfxcy?a", tmp_path / "draft", 3)
    candidates = DraftModelCandidates(draft, k=2, tree=tree)
    assert fit_of_two_tokens(target, torch.tensor([[0, 2, 5]]), candidates, calls=4) > 1e-3


def test_prompt_of_one_token_is_read_once(tmp_path: Path) -> None:
    """Would catch: a second pass over the prompt, or over its last token."""
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?fedcba", tmp_path / "draft", 3)
    call = {"max_new_tokens": 3, "candidate_generator": DraftModelCandidates(draft, k=1)}
    with recorded_inputs(draft, torch.Tensor.tolist) as read:
        target.generate(torch.tensor([[0]]), **call)  # checks the draft, which has a hook now
        read.clear()
        [[_, first, *_]] = target.generate(torch.tensor([[0]]), **call)
    assert read == [[[6]], [[6 - int(first)]]]


def test_prompt_longer_in_the_tokens_of_the_draft_is_refused(tmp_path: Path) -> None:
    """Would catch: a draft behind the draft model's last position, whose text has more tokens than the target's."""
    target = small_model("abcdef?", tmp_path / "target", 0)
    draft = small_model("?fedcba", tmp_path / "draft", 3, positions=4)
    with pytest.raises(ValueError, match="at most 4"):
        target.generate(torch.tensor([[0] * 5]), max_new_tokens=2, candidate_generator=DraftModelCandidates(draft, k=2))


def test_prompt_longer_in_the_tokens_of_the_target_same_tokens(tmp_path: Path) -> None:
    """Would catch: a prompt counted in the target's tokens, of which it has twice as many as of the draft's."""
    target = small_model("abcdef?", tmp_path / "target", 0)
    draft = small_model(["ab", "cd", *"abcdef?"], tmp_path / "draft", 3, positions=12)
    inputs = {"input_ids": torch.tensor([[0, 1, 2, 3] * 4])}
    statistics = assert_same_tokens(target, inputs, DraftModelCandidates(draft, k=2), max_new_tokens=6)
    assert statistics.drafted > 0


# Expected outputs: drafted from their beginning, and again after edits; the output is that of plain `generate`

EDITS = {"replaced": lambda token: [7_000], "inserted": lambda token: [7_000, token], "left out": lambda token: []}


def steps_of(answer: list[int], prediction: list[int], *, nodes: int = 64) -> int:
    """Steps in which an answer is generated after a prompt that has nothing in common with it."""
    odds, done, steps = MatchOdds(), 0, 0
    text = RowText([8_000, 8_001], odds, expected=[prediction] if prediction else [])
    while done < len(answer):
        tree = text.propose(64, SearchLimits(nodes, is_chain=steps == 0))
        following = [*answer[done:], -2]
        depth = {-1: 0}
        for node, parent in enumerate(tree.parents):
            depth[node] = depth[parent] + 1
        chosen = [following[0], *(following[min(depth[node], len(following) - 1)] for node in range(len(tree.tokens)))]
        emitted = accepted_path(tree.tokens, tuple(tree.parents), chosen)[1]
        text.extend(emitted)
        odds.observe(outcomes(tree, emitted, odds))
        done, steps = done + len(emitted), steps + 1
    return steps


@pytest.mark.parametrize("edit", EDITS)
def test_prediction_with_one_token_in_twenty_edited_takes_twelve_tokens_a_step(edit: str) -> None:
    """Would catch: copying that does not resume after an edit, or resumes at the wrong place."""
    chance, steps = random.Random(0), 0
    for _ in range(4):
        answer = [chance.randrange(500) for _ in range(300)]
        expected = [new for token in answer for new in (EDITS[edit](token) if chance.random() < 0.05 else [token])]
        steps += steps_of(answer, expected)
    assert 4 * 300 / steps >= 12


def test_prediction_of_unrelated_text_is_not_slower() -> None:
    """Would catch: an expected output that is tried again and again. The answer repeats itself."""
    chance = random.Random(1)
    answer = [chance.randrange(40) for _ in range(60)] * 3
    unrelated = [chance.randrange(100, 200) for _ in range(200)]
    assert steps_of(answer, unrelated) <= steps_of(answer, [])


def candidates_of(answers: torch.Tensor) -> dict[str, tuple[Any, Any]]:
    """Strategies with expected outputs, and one that receives them by the call."""
    rows = answers.tolist()
    changed = [[(token + 1) % 90 if index % 7 == 3 else token for index, token in enumerate(row)] for row in rows]
    return {
        "strategy": (NgramCandidates(k=16, tree=32, prediction=changed), None),
        "chain": (NgramCandidates(k=4, prediction=changed), None),
        "some rows": (NgramCandidates(k=8, prediction=[None, *changed[1:]]), None),
        "tensors": (NgramCandidates(k=8, prediction=[torch.tensor(row) for row in changed]), None),
        "array": (NgramCandidates(k=8, prediction=np.array(rows[0])), None),
        "one for all": (NgramCandidates(k=8, min_ngram=2, prediction=torch.tensor(rows[0])), None),
        "combined": (CombinedCandidates(tree=16, prediction=changed), None),
        "call": ("auto", answers),
    }


@pytest.mark.parametrize(
    "name", ["strategy", "chain", "some rows", "tensors", "array", "one for all", "combined", "call"]
)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_prediction_same_tokens_in_batches(name: str, sampling: str) -> None:
    """Would catch: the prediction of another row, or one that is used in the call alone and not by the strategy."""
    model, arguments = tiny_model("llama"), {"max_new_tokens": 24, **SAMPLING[sampling]}
    answers = plain_output(model, prompts(3), **arguments)[0][:, 12:]
    candidates, prediction = candidates_of(answers)[name]
    assert assert_same_tokens(model, prompts(3), candidates, prediction=prediction, **arguments).accepted > 0
