"""The random tester: 160 cases from a fixed seed, and proof that it can fail."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz import models
from tests.fuzz.__main__ import main, run_safely, shrink
from tests.fuzz.cases import COMBINED, ENTRIES, STRATEGIES, Case
from tests.fuzz.draw import draw
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.report import Report

SEED = "tests"
CASES_PER_CHUNK, CHUNKS = 16, 10
# Few, so that models are built once: attention full, in windows and in chunks, positions in a table or rotary, experts.
ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt2", "gptj", "qwen3_moe", "llama4_text", "deepseek_v3")
MAX_CASES_PER_MUTATION = 60

# What a mutation needs to show, where cases drawn at random seldom have it.
NEEDED: dict[str, dict[str, Any]] = {
    "accept one token too many": {"strategy": "oracle", "verification": "exact", "accuracy": 0.5},
    "noise of the next step": {"do_sample": True, "top_k": 0, "verification": "exact"},
    "position off by one": {"architecture": "llama", "strategy": "oracle", "accuracy": 0.9},
    "noise of the first row": {"do_sample": True, "top_k": 0, "verification": "exact", "lengths": (3, 5)},
    "model not restored after an exception": {"architecture": "llama", "strategy": "skip", "fault": "model"},
    "noise not given back": {
        "strategy": "oracle",
        "do_sample": True,
        "top_k": 0,
        "eos_columns": (6,),
        "max_new_tokens": 14,
    },
    "accepted nodes not moved": {"strategy": "oracle_tree", "branches": 4},
    "scores of another token": {"strategy": "oracle_tree", "return_dict": True, "output_logits": True},
    "given cache not restored after an exception": {"return_dict": True, "turns": 2, "fault": "drafter"},
}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases_equal_plain_generate(chunk: int) -> None:
    """Would catch: anything that a caller can see of a speculative call and that differs from plain `generate`."""
    report = Report()
    for number in range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK):
        outcome = run_safely(draw(f"{SEED}:{number}", ARCHITECTURES))
        status = report.add(outcome)
        assert status != "different", f"{outcome.differences}\npython -m tests.fuzz --case '{outcome.case.to_json()}'"
    total = report.total
    assert total["drafting"] >= CASES_PER_CHUNK // 2, "it tests too little"
    assert total["accepted"] > 20 and total["rejected"] > 20, "it tests too little"
    assert total["same"] >= 0.7 * CASES_PER_CHUNK, f"too few comparisons: {report.markdown()}"


@pytest.fixture
def forgotten_models() -> None:
    """Drops the cached models: under a mutation the self-check may have refused one, which it remembers."""
    for build in (models.tiny_model, models.disturbed_copy, models.with_other_tokenizer):
        build.cache_clear()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_random_cases_with_a_mutation_fail(mutation: str) -> None:
    """Would catch: a comparison that cannot fail."""
    for number in range(MAX_CASES_PER_MUTATION):
        case = replace(draw(f"mutations:{number}", ARCHITECTURES), **NEEDED.get(mutation, {}))
        with MUTATIONS[mutation]():
            outcome = run_safely(case)
        if outcome.status == "different":
            return
    pytest.fail(f"{MAX_CASES_PER_MUTATION} cases do not show it: {mutation}")


def test_draw_has_every_strategy_and_entry_point() -> None:
    """Would catch: a strategy that is never drawn, so that nothing is known of it."""
    cases = [draw(seed) for seed in range(600)]
    assert {case.strategy for case in cases} == set(STRATEGIES)
    assert {member for case in cases for member in case.members} == set(COMBINED)
    assert {case.entry for case in cases} == set(ENTRIES)


@pytest.mark.parametrize("seed", range(20))
def test_case_in_json_is_the_case_again(seed: int) -> None:
    case = draw(seed)
    assert Case.from_json(case.to_json()) == case


def test_shrink_keeps_only_what_the_failure_needs() -> None:
    """Would catch: a field that is never simplified, or a simplification that loses the failure."""

    def fails(case: Case) -> bool:
        return case.k >= 3 and case.do_sample and len(case.lengths) > 1 and max(case.lengths) >= 4

    case = next(case for case in map(draw, range(1000)) if fails(case) and case.k > 3 and len(case.lengths) > 2)
    smallest = shrink(case, fails)
    assert fails(smallest)
    assert smallest == Case(seed=case.seed, do_sample=True, lengths=smallest.lengths)
    assert sorted(smallest.lengths) == [1, 4]


@pytest.mark.usefixtures("forgotten_models")
def test_main_counts_cases_and_repeats_failures(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: failures that are not printed, or do not change the exit code; records that are not summed up."""
    monkeypatch.setattr("tests.fuzz.__main__.SHRUNK_FAILURES", 0)
    record = tmp_path / "record.json"
    arguments = ["--cases", "4", "--seed", "1", "--architectures", "llama", "--strategies", "random"]
    assert main([*arguments, "--record", str(record)]) == 0
    assert json.loads(record.read_text())["total"]["cases"] == 4
    assert main(["--merge", str(record), str(record)]) == 0
    assert "| random | 8 |" in capsys.readouterr().out
    assert main(["--case", Case(strategy="oracle", max_new_tokens=6).to_json()]) == 0
    with MUTATIONS["accept one token too many"]():
        assert main(arguments) == 1
        assert main(["--case", Case(accuracy=0.0).to_json()]) == 1
    printed = capsys.readouterr().out
    assert "python -m tests.fuzz --case '{" in printed and "tokens: row 0" in printed
