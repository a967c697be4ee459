"""Draft heads against ground truth computed by the original implementations.

`pytest tests --fixtures DIR` runs other fixtures of the same kind; each folder with an `expected.json` is one.
"""

from typing import Any

import pytest

from hf_specgen import DFlashCandidates, DraftSession, EagleCandidates, MTPCandidates, PEagleCandidates
from hf_specgen.tree import DraftTree
from tests.helpers.head_fixtures import Comparison, Fixture
from tests.helpers.head_runs import run_autoregressive, run_block, run_parallel
from tests.helpers.head_runs_native import run_assistant, run_medusa, run_mtp, run_mtp_recursive
from tests.helpers.parallel_drafts import run_parallel_draft

RUNS = {
    "autoregressive": run_autoregressive,
    "parallel": run_parallel,
    "block": run_block,
    "path": run_block,
    "mtp": run_mtp,
    "mtp_recursive": run_mtp_recursive,
    "assistant": run_assistant,
    "medusa": run_medusa,
    "parallel_draft": run_parallel_draft,
}


@pytest.mark.parametrize("rows", ["alone", "batch"])
def test_head_fixture_computed_by_original_is_reproduced(head_fixture: Fixture, rows: str) -> None:
    run = RUNS[head_fixture.family]
    for prompts in [[prompt] for prompt in head_fixture.prompts] if rows == "alone" else [head_fixture.prompts]:
        comparison = Comparison(head_fixture)
        run(head_fixture, prompts, comparison)
        comparison.assert_complete(prompts)


DRAFTS: dict[str, tuple[Any, str]] = {
    "autoregressive": (EagleCandidates, "chain.tokens"),
    "parallel": (PEagleCandidates, "block.tokens"),
    "block": (DFlashCandidates, "block.tokens"),
    "path": (DFlashCandidates, "greedy.tokens"),
    "mtp": (MTPCandidates, "tokens"),
    "mtp_recursive": (MTPCandidates, "chain.tokens"),
}
"""By family: the strategy, and the name of the recorded draft tokens."""


def test_strategy_drafts_in_generate_what_the_original_drafts(head_fixture: Fixture) -> None:
    """Would catch: a session that reads other states, leaves out a correction, or runs another layer."""
    strategy, name = DRAFTS.get(head_fixture.family, (None, ""))
    if strategy is None:
        return
    drafts: list[DraftTree] = []

    class Recording(strategy):  # type: ignore[misc, valid-type]
        def begin(self, *arguments: Any) -> DraftSession:
            session = super().begin(*arguments)
            draft = session.draft
            session.draft = lambda depths: drafts.append(draft(depths)) or drafts[-1]
            return session

    for prompt in head_fixture.prompts:
        expected = head_fixture.get(f"{prompt}.round1.{name}").flatten().tolist()
        text = head_fixture.get(f"{prompt}.round1.input_ids")
        text = text[:, :-1] if head_fixture.family == "mtp" else text  # it ends with the target's next token
        candidates = Recording(head_fixture.checkpoint_folder, k=len(expected))
        head_fixture.target.generate(text, max_new_tokens=20, do_sample=False, candidate_generator=candidates)
        assert next(draft for draft in drafts if draft.nodes).tokens[0].tolist() == expected
        drafts.clear()
