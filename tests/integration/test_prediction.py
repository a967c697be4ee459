"""Expected outputs: drafted from their beginning, and again after edits; the output is that of plain `generate`."""

import random
import re
from typing import Any

import pytest
import torch

from hf_specgen import CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.candidates.ngram import MatchOdds, RowText, outcomes
from hf_specgen.candidates.tree_search import SearchLimits
from hf_specgen.verification.result import accepted_path
from tests.helpers import prompts, tiny_model

EDITS = {"replaced": lambda token: [7_000], "inserted": lambda token: [7_000, token], "left out": lambda token: []}


def steps_of(answer: list[int], prediction: list[int], *, nodes: int = 64) -> int:
    """Steps in which an answer is generated after a prompt that has nothing in common with it."""
    odds, done, steps = MatchOdds(), 0, 0
    text = RowText([8_000, 8_001], odds, prediction=prediction)
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


def candidates_of(answers: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` that give expected outputs."""
    rows = answers.tolist()
    changed = [[(token + 1) % 90 if index % 7 == 3 else token for index, token in enumerate(row)] for row in rows]
    return {
        "strategy": {"candidate_generator": NgramCandidates(k=16, tree=32, prediction=changed)},
        "chain": {"candidate_generator": NgramCandidates(k=4, prediction=changed)},
        "some rows": {"candidate_generator": NgramCandidates(k=8, prediction=[None, *changed[1:]])},
        "one for all": {"candidate_generator": NgramCandidates(k=8, min_ngram=2, prediction=torch.tensor(rows[0]))},
        "combined": {"candidate_generator": CombinedCandidates(tree=16, prediction=changed)},
        "call": {"candidate_generator": "auto", "prediction": answers},
    }


@pytest.mark.parametrize("name", ["strategy", "chain", "some rows", "one for all", "combined", "call"])
@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"]
)
def test_prediction_same_tokens_in_batches(name: str, sampling: dict[str, Any]) -> None:
    model = tiny_model("llama")
    inputs = prompts(3)
    torch.manual_seed(0)
    plain = model.generate(**inputs, max_new_tokens=24, **sampling)
    arguments = candidates_of(plain[:, inputs["input_ids"].shape[1] :])[name]
    torch.manual_seed(0)
    assert torch.equal(model.generate(**inputs, max_new_tokens=24, **sampling, **arguments), plain)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([[1], [2]], "prediction has 2 entries for 3 rows; give one for each row"),
        ([10**6], "prediction has token 1000000, but the target's vocabulary ends at"),
        ([[1], [-1], [2]], "prediction has token -1"),
    ],
)
def test_prediction_that_does_not_fit_raises(prediction: Any, message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(**prompts(3), max_new_tokens=4, candidate_generator=NgramCandidates(prediction=prediction))


def test_prediction_without_ngrams_raises() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="prediction= needs n-grams"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=DraftModelCandidates(model), prediction=[1])
    with pytest.raises(ValueError, match="prediction= needs n-grams among the strategies"):
        CombinedCandidates([DraftModelCandidates(model)], prediction=[1])
