"""The formulas, against simulation and against each other; the cost curve, by shape and by file."""

import json
import random
from pathlib import Path

import datasets
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.analysis import estimated_alpha, expected_accepted, expected_speedup, optimal_k
from benchmarks.workloads.domains import CATALOGUE, DomainError, load_domain, names_of
from hf_specgen.counters import RowStep, Statistics
from hf_specgen.depth import CostCurve
from hf_specgen.evaluation.cost import measure_cost_curve
from tests.helpers import tiny_model

ALPHAS = st.floats(0, 1)
LENGTHS = st.integers(0, 20)
CURVES = st.lists(st.floats(0.001, 1), min_size=6, max_size=6).map(
    lambda seconds: CostCurve((1, 2, 4, 8, 16, 32), tuple(sorted(seconds)), context=1, batch=1)
)


def simulate(alpha: float, k: int, steps: int) -> Statistics:
    """Drafts of k tokens, each accepted with probability alpha until one is not."""
    generator = random.Random(0)
    made = []
    for _ in range(steps):
        accepted = next((i for i in range(k) if generator.random() >= alpha), k)
        made.append(RowStep(k, k, accepted, accepted + 1))
    return Statistics([made])


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 4), (0.7, 8), (0.95, 5)])
def test_formulas_match_a_simulation(alpha: float, k: int) -> None:
    """40,000 steps: the standard error of the mean is under 0.02 tokens, of alpha under 0.003; 5 of them allowed."""
    drawn = simulate(alpha, k, 40_000)
    assert drawn.tokens_per_step == pytest.approx(1 + expected_accepted(alpha, k), abs=0.1)
    assert estimated_alpha(drawn) == pytest.approx(alpha, abs=0.015)
    shares = drawn.acceptance_rate_per_position
    assert expected_accepted(shares, k) == pytest.approx(drawn.accepted / drawn.drafts)


def test_a_draft_cut_off_by_a_stop_is_no_rejection() -> None:
    cut = Statistics([[RowStep(4, 4, 4, 5), RowStep(4, 4, 2, 2)]])
    assert estimated_alpha(cut) == 1.0
    assert estimated_alpha(Statistics([[RowStep(0, 0, 0, 1)]])) == 0.0


@given(ALPHAS, LENGTHS)
def test_closed_form(alpha: float, k: int) -> None:
    closed = k if alpha == 1 else alpha * (1 - alpha**k) / (1 - alpha)
    assert expected_accepted(alpha, k) == pytest.approx(closed, abs=1e-9, rel=1e-6)
    assert expected_accepted([alpha**i for i in range(1, k + 1)], k) == pytest.approx(expected_accepted(alpha, k))


@given(ALPHAS, CURVES, st.floats(0, 0.1), st.floats(0, 0.1))
def test_best_k_is_at_least_as_good_as_every_other(
    alpha: float, curve: CostCurve, draft_cost: float, overhead: float
) -> None:
    best = optimal_k(alpha, curve, draft_cost, overhead, max_k=20)

    def speed(k: int) -> float:
        return expected_speedup(alpha, k, curve, draft_cost, overhead if k else 0)

    assert speed(best) >= 1  # k = 0 is plain decoding
    assert all(speed(best) >= speed(k) for k in range(21))


def test_best_k_known_cases() -> None:
    assert optimal_k(1.0, max_k=7) == 7
    assert optimal_k(0.0, draft_cost=0.1) == 0
    assert optimal_k(0.9, lambda q: float(q)) == 0  # verification that costs as much as decoding
    assert optimal_k([0.9, 0.8, 0.0, 0.0], lambda q: 1 + 0.05 * q) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 3), "between 0 and 1, got 1.5"),
        ((0.5, -1), "k must be at least 0, got -1"),
        (([0.5, 0.6], 2), "must not increase"),
        (([0.5], 2), "given for 1 positions, but k is 2"),
    ],
)
def test_bad_acceptance(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_accepted(*arguments)


def test_measured_curve_runs_the_passes_it_says() -> None:
    """One prefill, then a warm-up and `repeats` turns, each a pass over 1, 2 and 8 tokens behind 12 cached ones."""
    model = tiny_model("llama")
    shapes = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
    try:
        curve = measure_cost_curve(model, queries=(1, 2, 8), context=12, batch=3, repeats=2)
    finally:
        handle.remove()
    assert shapes == [(3, 12)] + 3 * [(3, 1), (3, 2), (3, 8)]
    assert (curve.queries, curve.context, curve.batch) == ((1, 2, 8), 12, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": (2,)}, "increase from 1"),
        ({"context": 0}, "context and batch be positive"),
        ({"batch": 0}, "context and batch be positive"),
        ({"context": 10**6}, "positions"),
    ],
)
def test_bad_measurement(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_cost_curve(tiny_model("llama"), **arguments)


# Domains: those that ship can be read, invalid descriptions raise an error that names the problem


LOCAL = [name for name, spec in yaml.safe_load(CATALOGUE.read_text())["domains"].items() if "data" in spec]


@pytest.mark.parametrize("name", LOCAL)
def test_local_domains(name: str) -> None:
    domain = load_domain(name)
    assert len(domain.conversations) >= 40
    assert {len(turns) for turns in domain.conversations} == {2 if name == "chat" else 1}
    assert all(turn.strip() and "{" + "prompt}" not in turn for turns in domain.conversations for turn in turns)
    assert domain.about


def test_hub_domains_cannot_move() -> None:
    """Pinned to a commit, with their like among the local ones."""
    specs = yaml.safe_load(CATALOGUE.read_text())["domains"]
    assert set(names_of(["hub"])) == {name for name, spec in specs.items() if "hub" in spec}
    for name in names_of(["hub"]):
        assert len(specs[name]["revision"]) == 40 and name.removesuffix("-hub") in LOCAL


def write(folder: Path, spec: dict, rows: list[dict] | None = None) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"generation": {"greedy": {"do_sample": False}}, "domains": {"own": spec}}))
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_own_domain_in_a_few_lines(tmp_path: Path) -> None:
    rows = [{"a": "one", "b": 1}, {"a": "two", "b": 2}]
    spec = {"data": "rows.jsonl", "where": {"b": 2}, "prompt": "Say {a}.", "generation": {"do_sample": False}}
    domain = load_domain("own", write(tmp_path, spec, rows))
    assert domain.conversations == [["Say two."]] and domain.generation == {"do_sample": False}


def test_hub_domain_is_loaded_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def load_dataset(*arguments, **options):
        asked.update(arguments=arguments, **options)
        return datasets.Dataset.from_list([{"q": "why?"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = {"hub": "org/set", "config": "main", "split": "test", "revision": "abc", "prompt": "{q}"}
    assert load_domain("own", write(tmp_path, spec)).conversations == [["why?"]]
    assert asked == {"arguments": ("org/set", "main"), "split": "test", "revision": "abc"}


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        ({"data": "rows.jsonl", "prompt": "{a}"}, [], "has no prompts"),
        ({"data": "rows.jsonl", "prompt": "{a}", "where": {"a": "z"}}, [{"a": "b"}], "no row matches `where`"),
        ({"data": "rows.jsonl", "prompt": "{c}"}, [{"a": "b"}], "no column 'c'; there are a"),
        ({"data": "gone.jsonl", "prompt": "{a}"}, None, "there is no file"),
        ({"data": "rows.jsonl", "promt": "{a}"}, None, r"has unknown fields \['promt'\]"),
        ({"prompt": "{a}"}, None, "needs data or hub"),
        ({"hub": "org/set", "prompt": "{a}"}, None, "must name its split and revision"),
        ({"hub": "org/set", "split": "s", "revision": "r", "prompt": "{a}"}, None, "no network"),
    ],
)
def test_bad_domains(spec: dict, rows: list | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=message):
        load_domain("own", write(tmp_path, spec, rows))
