"""A draft model that reads first-stage nodes, of n-grams and of its own table: the same logits and tokens, fewer
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_specgen import AdaptiveDepth, CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.candidates import autoregressive, draft_model, draft_model_session, read_ahead
from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.draft_model_session import DraftModelSession
from hf_specgen.candidates.read_ahead import MAX_FIRST_STAGE_NODES
from hf_specgen.candidates.read_nodes import ReadNodes
from hf_specgen.candidates.recycling import RecyclingTable
from hf_specgen.state import GenerationState
from hf_specgen.tree import DraftTree
from tests.helpers.captures import graphs_on_cpu
from tests.helpers.comparison import assert_same_tokens
from tests.helpers.models import fresh_model, perturbed_copy, tiny_model

GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7}


def _prompts(rows: int) -> dict[str, torch.Tensor]:
    """Texts that repeat themselves, of different lengths."""
    torch.manual_seed(5)
    repeated = torch.randint(40, 90, (rows, 6)).repeat(1, 4)
    mask = torch.ones_like(repeated)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": repeated * mask, "attention_mask": mask}


def _strategy(draft: Any) -> CombinedCandidates:
    return CombinedCandidates([NgramCandidates(), DraftModelCandidates(draft)], policy=AdaptiveDepth(GPU_LIKE))


def _alone(draft: Any, **settings: Any) -> DraftModelCandidates:
    return DraftModelCandidates(draft, policy=AdaptiveDepth(GPU_LIKE), **settings)


def _remember_proposals(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all calls of the test share one table, and propose all of its tokens: a random model finds none likely."""
    table = RecyclingTable(draft.config.vocab_size)
    monkeypatch.setattr(read_ahead, "MIN_FIRST_STAGE_PROBABILITY", 0.0)
    monkeypatch.setattr(draft_model_session, "_table", lambda draft, remembers: table)


class _Recorder:
    """Records for every row that drafts the text before each result of a draft model, and the result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results: list[tuple[list[int], torch.Tensor]] = []
        self.suggested = self.first_stage = 0
        read, grow = DraftModelSession.read_suggested, DraftModelSession.next_scores
        add = ReadNodes.add_first_stage

        def read_suggested(session: DraftModelSession, suggested: DraftTree) -> torch.Tensor:
            scores = read(session, suggested)
            self.suggested += suggested.nodes
            if scores.shape[1] > 1:
                self._record(session, suggested, -1, scores)
            return scores

        def next_scores(session: DraftModelSession, tree: DraftTree, new: int) -> torch.Tensor:
            scores = grow(session, tree, new)
            self._record(session, tree, tree.nodes - new, scores)
            return scores

        def add_first_stage(nodes: ReadNodes, rows: Sequence[Sequence[tuple[int, int]]]) -> int:
            width = add(nodes, rows)
            self.first_stage += width
            return width

        monkeypatch.setattr(ReadNodes, "add_first_stage", add_first_stage)
        monkeypatch.setattr(DraftModelSession, "read_suggested", read_suggested)
        monkeypatch.setattr(DraftModelSession, "next_scores", next_scores)

    def _record(self, session: DraftModelSession, tree: DraftTree, first: int, scores: torch.Tensor) -> None:
        state: GenerationState = session.call.state
        for row, depth in enumerate(session.budget):
            if not depth or state.has_ended(row):
                continue
            text = [*state.prompts[row], *state.generated[row]]
            for index in range(scores.shape[1]):
                node = first + index
                if node < len(tree.parents[row]):
                    self.results.append(([*text, *_path(tree, row, node)], scores[row, index].clone()))


def _path(tree: DraftTree, row: int, node: int) -> list[int]:
    return [] if node < 0 else [*_path(tree, row, tree.parents[row][node]), int(tree.tokens[row, node])]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", [_strategy, _alone], ids=["with n-grams", "alone"])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_model_that_reads_first_stage_nodes_same_tokens_and_logits_of_whole_texts(
    rows: int, strategy: Callable[[Any], Candidates], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every result of the draft model, over several steps, against one pass over the whole text and path."""
    model = tiny_model("llama")
    draft = perturbed_copy(model, 0.01)
    _remember_proposals(draft, monkeypatch)
    assert_same_tokens(model, _prompts(rows), strategy(draft), **settings)
    recorder = _Recorder(monkeypatch)
    assert_same_tokens(model, _prompts(rows), strategy(draft), **settings)
    assert recorder.suggested > 0 and recorder.first_stage > 0
    texts = [torch.tensor(text) for text, _ in recorder.results]
    for first in range(0, len(texts), 64):
        batch = texts[first : first + 64]
        logits = draft(pad_sequence(batch, batch_first=True)).logits  # no token sees the padding behind its text
        expected = torch.stack([logits[row, len(text) - 1] for row, text in enumerate(batch)])
        results = torch.stack([result for _, result in recorder.results[first : first + 64]])
        torch.testing.assert_close(results, expected, atol=2e-4, rtol=1e-3)


def test_draft_model_with_suggested_nodes_makes_fewer_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In about as many steps as with a draft model that ignores what n-grams propose."""
    model = tiny_model("llama")
    draft, passes, steps = perturbed_copy(model, 0.01), [], []
    for ignores in (True, False):
        with monkeypatch.context() as patched:
            if ignores:
                patched.setattr(DraftModelSession, "suggest", lambda session, draft, sources: None)
            found = assert_same_tokens(model, _prompts(1), _strategy(draft), **GREEDY)
        passes.append(sum(len(step.drafter or ()) for step in found.passes))
        steps.append(found.steps)
    assert passes[1] < passes[0] and steps[1] <= steps[0] + 1


@pytest.mark.parametrize("strategy", [_strategy, _alone], ids=["with n-grams", "alone"])
def test_draft_model_that_reads_first_stage_nodes_makes_fewer_passes(
    strategy: Callable[[Any], Candidates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In about as many steps as with one that reads a level of its tree in each pass."""
    model = tiny_model("llama")
    draft, passes, steps = perturbed_copy(model, 0.01), [], []
    _remember_proposals(draft, monkeypatch)
    assert_same_tokens(model, _prompts(1), strategy(draft), **GREEDY)
    for most in (0, MAX_FIRST_STAGE_NODES):
        with monkeypatch.context() as patched:
            patched.setattr(autoregressive, "MAX_FIRST_STAGE_NODES", most)
            found = assert_same_tokens(model, _prompts(1), strategy(draft), **GREEDY)
        passes.append(sum(len(step.drafter or ()) for step in found.passes))
        steps.append(found.steps)
    assert passes[1] < passes[0] and steps[1] <= steps[0] + 1


def test_first_stage_tokens_that_the_draft_model_lacks_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a target with a larger vocabulary has tokens that the draft model cannot read."""
    monkeypatch.setattr(draft_model, "have_same_vocabulary", lambda draft, target: True)
    model, draft = tiny_model("llama", vocab_size=128), tiny_model("llama", vocab_size=120)
    inputs = _prompts(1)
    inputs["input_ids"][inputs["input_ids"] < 60] = 125
    assert_same_tokens(model, inputs, _strategy(draft), **GREEDY)
    assert_same_tokens(model, inputs, _alone(draft), **SAMPLED)


def test_calls_that_have_to_draft_alike_use_no_table_of_earlier_calls() -> None:
    """With a policy that measures nothing equal calls make equal passes."""
    model = tiny_model("llama")
    draft = perturbed_copy(model, 0.01)
    passes = [assert_same_tokens(model, _prompts(1), _strategy(draft), **GREEDY).passes for _ in range(2)]
    assert passes[0] == passes[1]
    assert draft not in draft_model_session._tables


@pytest.mark.parametrize("strategy", [_strategy, _alone], ids=["with n-grams", "alone"])
def test_first_stage_nodes_stay_within_the_positions_of_the_draft_model(
    strategy: Callable[[Any], Candidates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: nodes deeper than the draft, read beyond the end of a table of positions."""
    model = tiny_model("gpt2", n_positions=64)
    draft = perturbed_copy(model, 0.01)
    _remember_proposals(draft, monkeypatch)
    for _ in range(2):
        assert_same_tokens(model, _prompts(1), strategy(draft), **GREEDY)


@pytest.mark.parametrize("depth", [1, 2])
def test_first_stage_nodes_are_not_deeper_than_what_could_be_expanded(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    draft = perturbed_copy(model, 0.01)
    _remember_proposals(draft, monkeypatch)
    strategy = DraftModelCandidates(draft, k=depth, tree="auto", policy=AdaptiveDepth(GPU_LIKE))
    assert_same_tokens(model, _prompts(1), strategy, **GREEDY)
    recorder = _Recorder(monkeypatch)
    assert_same_tokens(model, _prompts(1), strategy, **GREEDY)
    assert max((len(text) for text, _ in recorder.results), default=0) <= 24 + 40 + depth - 1
    assert (recorder.suggested == 0) == (depth == 1)


def test_first_draft_after_a_prompt_read_in_chunks_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: nodes counted as read in the pass that reads the prompt alone."""
    model = fresh_model("llama")
    model.model.norm.weight.data *= 20  # a confident model drafts deep
    draft = perturbed_copy(model, 0.01)
    _remember_proposals(draft, monkeypatch)
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = {"input_ids": torch.randint(40, 90, (1, 6)).repeat(1, 4)}
        for strategy in (_strategy(draft), _alone(draft)):
            assert_same_tokens(model, inputs, strategy, prefill_chunk_size=8, **GREEDY)


def test_calls_use_a_table_of_what_the_draft_model_proposed_in_earlier_ones() -> None:
    """With the default policy; and a fixed tree has no table, as it reads no first-stage nodes."""
    model = tiny_model("llama")
    draft = perturbed_copy(model, 0.01)
    assert_same_tokens(model, _prompts(1), DraftModelCandidates(draft, tree=4), **GREEDY)
    assert draft not in draft_model_session._tables
    assert_same_tokens(model, _prompts(1), DraftModelCandidates(draft), **GREEDY)
    table = draft_model_session._tables[draft]
    assert_same_tokens(model, _prompts(1), DraftModelCandidates(draft), **GREEDY)
    assert draft_model_session._tables[draft] is table
    assert any(table.row(token)[0] for token in range(table.vocab_size))


def test_rejection_sampling_reads_no_first_stage_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text depends on the draft."""
    model = tiny_model("llama")
    recorder = _Recorder(monkeypatch)
    draft = perturbed_copy(model, 0.01)
    model.generate(**_prompts(1), candidate_generator=_strategy(draft), verification="rejection", **SAMPLED)
    assert recorder.suggested == recorder.first_stage == 0 and draft not in draft_model_session._tables


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options", [{"compile": "graphs"}, {"confidence_threshold": 0.02}], ids=["captured", "threshold"]
)
def test_first_stage_nodes_with_other_options_same_tokens(
    rows: int, settings: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes over any number of first-stage nodes are captured; nothing is expanded below an unlikely token."""
    model = tiny_model("llama")
    draft = perturbed_copy(model, 0.01)
    if "compile" in options:
        graphs_on_cpu(monkeypatch)
    _remember_proposals(draft, monkeypatch)
    assert_same_tokens(model, _prompts(rows), _alone(draft, **options), **settings)
    recorder = _Recorder(monkeypatch)
    assert_same_tokens(model, _prompts(rows), _alone(draft, **options), **settings)
    assert recorder.suggested + recorder.first_stage > 0
