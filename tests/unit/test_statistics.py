"""The figures of `.speculation`, on cases that can be checked by hand."""

import json
import time
from typing import Any

import pytest

from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
)
from hf_specgen.call_statistics import RowStep, Statistics
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from tests.helpers import prompts, tiny_model
from tests.helpers.medusa import random_heads
from tests.helpers.models import recorded_inputs
from tests.helpers.policies import AfterPlainSteps


def steps(*pairs: tuple[int, int]) -> list[RowStep]:
    """Chains: from (drafted, accepted), each followed by the bonus token."""
    return [RowStep(drafted, drafted, accepted, accepted + 1) for drafted, accepted in pairs]


def of_one_row(*pairs: tuple[int, int]) -> Statistics:
    row = steps(*pairs)
    return Statistics([row], [1 + sum(step.emitted for step in row)])


def test_statistics_of_three_drafts() -> None:
    """Would catch: positions counted from the end of a draft, or a draft cut short counted as rejected there."""
    stats = of_one_row((3, 3), (3, 1), (2, 0))
    assert (stats.steps, stats.drafts, stats.drafted, stats.accepted, stats.emitted) == (3, 3, 8, 4, 8)
    assert stats.acceptance_rate == 0.5
    assert stats.drafted_per_position == [3, 3, 2]
    assert stats.accepted_per_position == [2, 1, 1]
    assert stats.acceptance_rate_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert stats.tokens_per_step == pytest.approx(7 / 3)  # the first token comes from prefill, not from a step


def test_statistics_of_no_step_are_zero() -> None:
    """Would catch: a division by zero after a call that ends with its first token."""
    stats = Statistics([[]], [1])
    assert (stats.acceptance_rate, stats.tokens_per_step, stats.mean_acceptance_length) == (0.0, 0.0, 1.0)
    assert stats.drafted_per_position == stats.accepted_per_position == stats.acceptance_rate_per_position == []
    assert stats.emitted == 1 and stats.origins() == [False]


def test_record_counts_nodes_depths_and_rows() -> None:
    """Would catch: padding nodes counted, a tree's nodes taken for its depth, a finished row counted."""
    tree = DraftTree.from_nodes([([5, 6, 7], (-1, -1, 0)), ([5], (-1,)), ([], ())])
    stats = Statistics([[], [], []])
    stats.record(tree, VerificationResult([[0, 2], [], None], [[5, 7, 9], [8], []], [2, 0, 0]))
    assert stats.rows == [[RowStep(3, 2, 2, 3)], [RowStep(1, 1, 0, 1)], []]
    assert stats.drafted_per_position == [2, 1] and stats.accepted_per_position == [1, 1]


@pytest.mark.parametrize(
    ("length", "emitted", "accepted", "origins"),
    [
        (8, [4, 2, 1], [3, 1, 0], "-+++-+--"),
        (7, [4, 2], [3, 1], "-+++-+-"),
        (6, [4, 1], [3, 1], "-+++-+"),
        (5, [4], [3], "-+++-"),
        (4, [3], [3], "-+++"),
        (3, [2], [2], "-++"),
        (1, [], [], "-"),
    ],
)
def test_finish_removes_what_lies_behind_the_end(length: int, emitted: Any, accepted: Any, origins: str) -> None:
    """Would catch: tokens counted that a stopping criterion cut off, or the bonus token cut before a draft token."""
    stats = Statistics([steps((3, 3), (3, 1), (2, 0))])
    stats.finish([length])
    assert [step.emitted for step in stats.rows[0]] == emitted
    assert [step.accepted for step in stats.rows[0]] == accepted
    assert "".join("-+"[drafted] for drafted in stats.origins()) == origins
    assert stats.emitted == length


def test_to_dict_survives_json() -> None:
    """Would catch: a tensor or numpy number among the values; rows that are missing, or nested in a row."""
    stats = Statistics([steps((3, 3), (3, 0)), steps((2, 1))], [6, 3], {"draft": 0.5})
    data = json.loads(json.dumps(stats.to_dict()))
    assert data == stats.to_dict()
    assert (data["drafts"], data["drafted"], data["accepted"], data["emitted"]) == (3, 8, 4, 9)
    assert data["accepted_per_position"] == [2, 1, 1] and data["seconds"] == {"draft": 0.5}
    assert [row["drafted"] for row in data["rows"]] == [6, 2]
    assert "rows" not in data["rows"][0] and "rows" not in of_one_row((3, 3)).to_dict()


def test_summary_lists_the_figures_under_their_names() -> None:
    """Would catch: a number under another number's name."""
    stats = of_one_row((3, 3), (3, 1), (2, 0), (0, 0))
    stats.seconds = {"draft": 0.0204, "forward": 1.5}
    assert stats.summary() == str(stats)
    assert stats.summary().splitlines() == [
        "9 tokens, 4 verification steps: 2.00 tokens per step",
        "drafted 8, accepted 4 (50%); mean acceptance length 2.33 over 3 drafts",
        "acceptance by position: 0.67 0.33 0.50",
        "time: draft 20 ms, forward 1500 ms",
    ]


# The forward passes of each step, against the tokens that forward hooks see


def speculate(model: Any, candidates: Candidates, rows: int = 1, **arguments: Any) -> Statistics:
    model.generate(**prompts(rows), max_new_tokens=24, candidate_generator=candidates, **arguments)
    return candidates.speculation


@pytest.mark.parametrize("rows", [1, 3])
def test_target_passes_match_the_tokens_read_by_the_target(rows: int) -> None:
    """Without an EOS token all rows take part in every step until the slowest ends."""
    model = tiny_model("llama")
    candidates = NgramCandidates(k=4)
    with recorded_inputs(model) as sizes:
        speculate(model, candidates, rows)  # the self-check of the model, which has a hook now, runs in its first call
        sizes.clear()
        steps = speculate(model, candidates, rows, eos_token_id=None).batch_steps
    decoding = steps[-len(sizes) + 1 :]  # the first pass reads the prompt
    if rows == 1:
        assert [step.tokens_per_row for step in decoding] == sizes[1:]
    assert all(step.batch * step.tokens_per_row <= size for step, size in zip(decoding, sizes[1:], strict=True))
    assert all(not step.tokens_per_pass for step in steps)
    assert candidates.speculation is not None and len(steps) == max(map(len, candidates.speculation.rows))


def test_draft_model_passes_match_the_tokens_read_by_the_draft() -> None:
    """Would catch: passes that are not counted, or tokens of the text that are read twice."""
    model, draft = tiny_model("llama"), tiny_model("mistral")
    candidates = DraftModelCandidates(draft, k=3)
    with recorded_inputs(draft) as sizes:
        speculate(model, candidates)
        sizes.clear()
        reported = [tokens for step in speculate(model, candidates).batch_steps for tokens in step.tokens_per_pass]
    assert reported == sizes[1:], "all passes but the one that reads the prompt"
    assert sizes[0] == 12 and max(reported) <= 2, "each token is read once"


def test_layer_skip_passes_count_the_early_passes() -> None:
    """Would catch: the target's pass counted for the drafter, or one pass for a whole draft."""
    statistics = speculate(tiny_model("llama"), LayerSkipCandidates(exit_layer=1, k=2))
    steps = statistics.rows[0]
    assert [len(step.tokens_per_pass) for step in statistics.batch_steps[1:]] == [step.depth for step in steps[1:]]


@pytest.mark.parametrize("is_combined", [False, True])
def test_medusa_heads_are_one_pass_of_a_draft_and_pause_where_it_takes_long(is_combined: bool) -> None:
    """Would catch: heads that count as free, so that they draft in every step though hardly any token is accepted."""
    model = tiny_model("llama")
    heads = random_heads(model)
    calls = 0

    def slow(*_: Any) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.03)

    for block in heads.blocks:
        block.register_forward_hook(slow)
    medusa = MedusaCandidates(heads)
    candidates = CombinedCandidates([NgramCandidates(), medusa]) if is_combined else medusa
    model.generate(**prompts(1), max_new_tokens=60, eos_token_id=None, candidate_generator=candidates)
    assert candidates.speculation is not None
    assert {len(step.tokens_per_pass) for step in candidates.speculation.batch_steps} == {0, 1}
    assert calls <= 12 * len(heads.blocks), "in up to 60 steps"


def test_plain_step_has_no_drafter_passes() -> None:
    """The policy makes the first steps plain."""
    candidates = DraftModelCandidates(tiny_model("mistral"), k=3, policy=AfterPlainSteps(4))
    statistics = speculate(tiny_model("llama"), candidates)
    drafted = [step.drafted for step in statistics.rows[0]]
    assert 0 in drafted and max(drafted) > 0
    assert [not step.has_draft for step in statistics.batch_steps] == [count == 0 for count in drafted]
