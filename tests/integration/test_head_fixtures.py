"""Draft heads against ground truth computed by the original implementations.

`pytest tests --fixtures DIR` runs other fixtures of the same kind; each folder with an `expected.json` is one.
"""

import pytest

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
