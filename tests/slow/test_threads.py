"""Eight threads: all strategies and plain calls with one model, every text checked.

For 5 seconds; `pytest tests/slow/test_threads.py --thread-seconds 60` runs them for a minute.
"""

import pytest

from tests.helpers.threads import mixed_jobs, run_in_threads


def test_eight_threads_with_one_model_same_texts(pytestconfig: pytest.Config) -> None:
    """Would catch: rare races between calls that share a model, a strategy, a verifier or a monitor."""
    model, jobs = mixed_jobs()
    outcome = run_in_threads(model, jobs, threads=8, seconds=pytestconfig.getoption("thread_seconds"))
    assert outcome.failures == []
    assert set(outcome.calls) == {job.name for job in jobs}, "every strategy must have run"
