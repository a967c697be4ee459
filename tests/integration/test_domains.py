"""Domains: those that ship can be read, invalid descriptions raise an error that names the problem."""

import json
from pathlib import Path

import datasets
import pytest
import yaml

from benchmarks.workloads.domains import CATALOGUE, DomainError, load_domain, names_of

LOCAL = [name for name, spec in yaml.safe_load(CATALOGUE.read_text())["domains"].items() if "data" in spec]


@pytest.mark.parametrize("name", LOCAL)
def test_local_domains(name: str) -> None:
    domain = load_domain(name)
    assert len(domain.conversations) >= 40
    assert {len(turns) for turns in domain.conversations} == {2 if name == "chat" else 1}
    assert all(turn.strip() and "{" + "prompt}" not in turn for turns in domain.conversations for turn in turns)
    assert domain.about


def test_settings_are_part_of_the_definition() -> None:
    greedy = {name for name in LOCAL if not load_domain(name).generation["do_sample"]}
    assert greedy == {"edit", "json"}
    assert load_domain("prose").generation["temperature"] == 0.8


def test_hub_domains_cannot_move() -> None:
    """Pinned to a commit, with their like among the local ones."""
    specs = yaml.safe_load(CATALOGUE.read_text())["domains"]
    assert set(names_of(["hub"])) == {name for name, spec in specs.items() if "hub" in spec}
    for name in names_of(["hub"]):
        assert len(specs[name]["revision"]) == 40 and name.removesuffix("-hub") in LOCAL


def test_sets_and_names() -> None:
    assert names_of(["embedded"]) == ["math", "code", "edit", "json", "prose"]
    assert names_of(["spec-bench", "edit", "chat"]) == [
        "chat", "translation", "summarization", "qa", "math-reasoning", "rag", "edit",
    ]  # fmt: skip
    with pytest.raises(DomainError, match="no domain 'poetry'; there are embedded, spec-bench"):
        names_of(["poetry"])


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


def test_unreadable_catalogue(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("domains: [")
    with pytest.raises(DomainError, match="cannot read domains"):
        names_of(["own"], tmp_path / "own.yaml")
