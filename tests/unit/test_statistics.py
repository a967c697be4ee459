"""The figures of `.speculation`, on cases that can be checked by hand."""

import json

import pytest

from hf_specgen.counters import RowStep, Statistics
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


def steps(*pairs: tuple[int, int]) -> list[RowStep]:
    """Chains: from (drafted, accepted), each followed by the bonus token."""
    return [RowStep(drafted, drafted, accepted, accepted + 1) for drafted, accepted in pairs]


def of_one_row(*pairs: tuple[int, int]) -> Statistics:
    row = steps(*pairs)
    return Statistics([row], [1 + sum(step.emitted for step in row)])


def test_statistics_of_three_drafts() -> None:
    """Would catch: positions counted from the end of a draft, or a draft cut short counted as rejected there.

    3 of 3 accepted, then 1 of 3, then 0 of 2.
    """
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
    """Would catch: padding nodes counted, a tree's nodes taken for its depth, a finished row counted.

    Row 0 drafts two branches of depth 2 and accepts nodes 0 and 2; row 1 drafts one token, which is rejected; row 2
    is finished.
    """
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
def test_finish_removes_what_lies_behind_the_end(
    length: int, emitted: list[int], accepted: list[int], origins: str
) -> None:
    """Would catch: tokens counted that a stopping criterion cut off, or the bonus token cut before a draft token."""
    stats = Statistics([steps((3, 3), (3, 1), (2, 0))])
    stats.finish([length], [1])
    assert [step.emitted for step in stats.rows[0]] == emitted
    assert [step.accepted for step in stats.rows[0]] == accepted
    assert "".join("-+"[drafted] for drafted in stats.origins()) == origins
    assert stats.emitted == length


def test_record_of_the_prefill_counts_only_rows_with_a_draft() -> None:
    """Would catch: the first token counted as a step of rows without a draft, or a drafted one as the target's own."""
    stats = Statistics([[], []])
    tree = DraftTree.chains([[5, 6], []])
    recorded = stats.record(tree, VerificationResult([[0], []], [[5, 7], [8]], [1, 0]), is_prefill=True)
    assert recorded == [RowStep(2, 2, 1, 2), None]
    stats.record(DraftTree.chains([[1], [1]]), VerificationResult([[0], []], [[1, 2], [3]], [1, 0]))
    stats.finish([4, 2], [0, 1])
    assert stats.rows == [[RowStep(2, 2, 1, 2), RowStep(1, 1, 1, 2)], [RowStep(1, 1, 0, 1)]]
    assert stats.origins(0) == [True, False, True, False] and stats.origins(1) == [False, False]


def test_to_dict_survives_json() -> None:
    """Would catch: a tensor or numpy number among the values; rows that are missing, or nested in a row."""
    stats = Statistics([steps((3, 3), (3, 0)), steps((2, 1))], [6, 3], {"draft": 0.5})
    data = json.loads(json.dumps(stats.to_dict()))
    assert data == stats.to_dict() == json.loads(stats.to_json())
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
