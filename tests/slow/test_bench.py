"""Benchmark runs: choice of settings, verdicts, tables."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.loading import build
from benchmarks.harness.plan import Plan
from benchmarks.harness.runner import choose
from benchmarks.harness.units import tuning_units
from benchmarks.harness.variants import Family
from benchmarks.micro.known_acceptance import known_acceptance
from benchmarks.report import summary
from benchmarks.suites import SUITES
from benchmarks.workloads.domains import Domain
from hf_specgen.depth import CostCurve
from tests.helpers.bench_run import SMALL


def test_settings_are_chosen_by_sums_over_all_tuning_prompts() -> None:
    """Setting b is faster on the short prompt, a over both together."""
    family = Family("x", {"a": dict, "b": dict}, ours=True)
    measured = [("a", 100, 10.0), ("a", 10, 2.0), ("b", 100, 20.0), ("b", 10, 0.1)]
    records = [{"section": "tuning", "variant": f"x {s}", "tokens": t, "seconds": d} for s, t, d in measured]
    assert choose([family], records) == {"x": "a"}


def test_settings_are_chosen_on_other_prompts_than_are_measured(tokenizer) -> None:
    """One after the other from each domain; a domain without further prompts gives those it has."""
    many, few = (Domain(name, [[f"{name} {i}"] for i in range(count)], {}) for name, count in (("m", 4), ("f", 1)))
    plan = replace(SMALL, prompts=2, tuning_prompts=3)
    prompts = [tokenizer.decode(unit.inputs["input_ids"][0]) for unit in tuning_units(plan, [many, few], tokenizer, [])]
    assert [text.split("\n")[1] for text in prompts] == ["m 2", "f 0", "m 3"]


def test_the_plan_holds_every_strategy_and_the_same_effort_for_both_sides(reference_model) -> None:
    families = {family.name: family for family in build(Plan().strategies, Plan().peers, reference_model)}
    for mine, theirs in {"n-grams": "prompt lookup", "draft model": "assistant_model"}.items():
        assert len(families[mine].settings) == len(families[theirs].settings)
    assert len(families["layer skip"].settings) == len(families["assistant_early_exit"].settings)
    assert families["Medusa"].ours


def test_default_settings_keep_one_setting_of_ours_and_all_of_peers(reference_model) -> None:
    """Would catch: a strategy whose default setting is left out, or a peer that gets fewer tries."""
    for family in build(("ngram", "auto", "draft", "medusa", "ngram+draft"), ("transformers",), reference_model):
        kept = family.with_defaults().settings
        assert [name.partition("=")[2] for name in kept] == ["auto"] if family.ours else kept == family.settings


def test_peers_read_their_setting(reference_model) -> None:
    """Transformers ignores k as an argument; it reads the drafting model's generation config."""
    (_, theirs) = build(["draft"], ["transformers"], reference_model)
    for setting, k, threshold in (("k=2", 2, 0.0), ("k=20 p>0.4", 20, 0.4)):
        draft = theirs.settings[setting]()["assistant_model"]
        config = draft.generation_config
        assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (k, threshold)
        assert config.num_assistant_tokens_schedule == "constant"


def cell_of(**columns: Any) -> summary.Cell:
    count = len(columns["seconds"])
    made = [
        {"cell": "c", "number": n, "tokens": 10, "identical": True, "sampled": False, "seconds": columns["seconds"][n]}
        for n in range(count)
    ]
    plain = [{**record, "seconds": columns["plain"][record["number"]]} for record in made]
    return summary.Cell("c", "ours", made, plain)


def test_verdicts() -> None:
    (faster,) = summary.speed([cell_of(seconds=[1.0, 1.1, 0.9, 1.0], plain=[2.0, 2.1, 1.9, 2.0])], "domain")
    assert faster["verdict"] == "faster" and faster["speedup"] == pytest.approx(2.0) and faster["low"] > 1.9
    (unsure,) = summary.speed([cell_of(seconds=[1.0, 3.0, 1.0, 3.0], plain=[1.5, 2.0, 2.0, 2.0])], "domain")
    assert unsure["verdict"] == "no difference" and unsure["low"] < 1 < unsure["high"]
    (few,) = summary.speed([cell_of(seconds=[1.0, 1.0], plain=[2.0, 2.0])], "domain")
    assert few["verdict"] == "too few requests" and "low" not in few


def test_projected_speedup_is_a_ratio_of_sums_beside_the_measured_one() -> None:
    cell = cell_of(seconds=[1.0, 1.0, 1.0], plain=[2.0, 2.0, 2.0])
    for record, seconds in zip(cell.records, (1.0, 2.0, 5.0), strict=True):
        record["projected"] = {"seconds": seconds, "plain_seconds": 4.0}
    (row,) = summary.speed([cell], "domain")
    assert row["speedup"] == pytest.approx(2.0) and row["projected speedup"] == pytest.approx(12 / 8)
    (unprojected,) = summary.speed([cell_of(seconds=[1.0], plain=[2.0])], "domain")
    assert "projected speedup" not in unprojected


@pytest.mark.parametrize("name", sorted(SUITES))
def test_suite_names_tables_that_exist(name: str) -> None:
    known = {"by domain", "speed", "acceptance", "limits", "batch", "memory"}
    known |= {f"projected by {column}" for column in ("domain", "batch", "temperature")}
    assert {SUITES[name].table, *SUITES[name].tables} <= known and SUITES[name].plan.quick()


def test_repeats_of_a_prompt_are_one_request() -> None:
    """Ten repeats of the same two prompts say no more about other prompts than two do."""
    once = cell_of(seconds=[1.0, 2.0], plain=[2.0, 2.0])
    often = summary.Cell("c", "ours", once.records * 10, once.plain * 10)
    assert often.requests == 2
    assert often.speedup.low == pytest.approx(once.speedup.low)


def test_limits_follow_the_formulas() -> None:
    """Of two pairs of drafts of 4 one is accepted, one is rejected at its first token: alpha = 8 / (8 + 2)."""
    steps = [[4, 4, 4, 5], [4, 4, 0, 1], [4, 4, 4, 5], [4, 4, 0, 1]]
    times = {"forward": 0.04, "draft": 0.016}
    base = {"cell": "c", "number": 0, "tokens": 12, "identical": True, "sampled": False}
    ours = {**base, "seconds": 0.08, "steps": steps, "times": times}
    curve = CostCurve((1, 8), (0.01, 0.01), context=1, batch=1)
    (row,) = summary.limits([summary.Cell("c", "ours", [ours], [{**base, "seconds": 0.12}])], curve)
    assert row["alpha"] == pytest.approx(0.8) and row["tokens/step"] == 3.0
    assert row["expected"] == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert row["limit"] == pytest.approx(3 * 0.01 / 0.014)
    assert row["of limit"] == pytest.approx(1.5 / row["limit"])


@pytest.mark.parametrize(("alpha", "texts"), [(0.0, 1), (0.8, 40), (1.0, 1)])
def test_synthetic_acceptance_comes_out_as_it_went_in(alpha: float, texts: int) -> None:
    """40 texts of 200 tokens: about 2,500 drafts at alpha 0.8, a standard error of 0.03 tokens a step."""
    for row in known_acceptance(1, texts=texts, alphas=(alpha,), batches=(1,)):
        assert row["tokens/step"] == pytest.approx(row["expected"], abs=0.2)
        assert row["estimated alpha"] == pytest.approx(row["alpha"], abs=0.03)
        assert row["loop, ms a step"] > 0
