"""Domains: those that ship can be read, invalid descriptions raise an error that names the problem; measured T(q)."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.workloads.domains import CATALOGUE, DomainError, load_domain, names_of
from hf_specgen.evaluation.cost import measure_cost_curve
from tests.helpers import tiny_model


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
