"""Eight threads for a minute: all strategies and plain calls with one model, every text checked."""

from __future__ import annotations

from tests.helpers.threads import mixed_jobs, run_in_threads


def test_eight_threads_for_a_minute_same_texts() -> None:
    """Would catch: rare races between calls that share a model, a strategy, a verifier or a monitor."""
    model, jobs = mixed_jobs()
    outcome = run_in_threads(model, jobs, threads=8, seconds=60)
    assert outcome.failures == []
    assert set(outcome.calls) == {job.name for job in jobs}, "every strategy must have run"
