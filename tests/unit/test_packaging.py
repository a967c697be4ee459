"""What a release needs: names, versions, licences and workflows that agree with each other."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.paths import BENCHMARK_ASSETS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEMO = tomllib.loads((BENCHMARK_ASSETS / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = ROOT / ".github" / "workflows"
REPOSITORY = re.compile(r"(?:https://github\.com/|/github/)([\w.-]+/hf-specgen)\b")
NAMING = ("README.md", "CITATION.cff", "benchmarks/assets/pyproject.toml", "zensical.toml", "docs/*.md", "*/*.ipynb")
"""Files that may name the repository."""


def workflow(name: str) -> Any:
    return yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))


def test_repository_has_one_address() -> None:
    """Would catch: a file that still names another owner once the address is filled in."""
    [owner] = REPOSITORY.findall(PROJECT["project"]["urls"]["Repository"])
    files = [file for pattern in NAMING for file in ROOT.glob(pattern)]
    named = {file.name: set(REPOSITORY.findall(file.read_text(encoding="utf-8"))) for file in files}
    assert all(owners <= {owner} for owners in named.values()), named
    assert named["README.md"] and named["CITATION.cff"]


def test_both_packages_take_version_and_authors_from_the_same_place() -> None:
    """Would catch: a demo package that is released with another version than the package that loads it."""
    for name in ("authors", "requires-python"):
        assert PROJECT["project"][name] == DEMO["project"][name]
    assert PROJECT["build-system"] == DEMO["build-system"]
    scm = PROJECT["tool"]["setuptools_scm"]
    assert DEMO["tool"]["setuptools_scm"] == {**scm, "root": "../.."}
    assert "version" in PROJECT["project"]["dynamic"] and "version" in DEMO["project"]["dynamic"]


def test_release_publishes_what_was_checked_without_a_password() -> None:
    """Would catch: a publishing job without its permission, or one that builds again what nobody has checked."""
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"] == {"id-token": "write"}
    commands = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert "twine check --strict" in commands and "benchmarks/assets" in commands
    assert not any("run" in step for step in jobs["publish"]["steps"])


def test_continuous_integration_runs_what_the_package_promises() -> None:
    """Would catch: a version that is promised and run nowhere; a test or an extra that was renamed."""
    text = (WORKFLOWS / "ci.yml").read_text(encoding="utf-8")
    classifiers = PROJECT["project"]["classifiers"]
    for version in re.findall(r":: (3\.\d+)", " ".join(classifiers)):
        assert f'"{version}"' in text
    lowest = dict(re.findall(r"(torch|transformers)>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"])))
    assert f"torch=={lowest['torch']}.*" in text and f"transformers=={lowest['transformers']}.*" in text
    for file in workflow("ci")["env"]["ESSENTIAL"].split():
        assert (ROOT / file).is_file()
    extras = {extra for extras in re.findall(r"\.\[([\w,]+)\]", text) for extra in extras.split(",")}
    assert {"integrations", "quantized"} <= extras <= PROJECT["project"]["optional-dependencies"].keys()
    assert all((ROOT / file).exists() for file in re.findall(r"\btests/[\w/.]+", text))


def test_site_is_built_with_the_same_tools_everywhere() -> None:
    """Would catch: a hosted documentation that is built with older tools than `make docs`."""
    [install, *_] = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))["build"]["commands"]
    assert all(f'"{tool}"' in install for tool in PROJECT["project"]["optional-dependencies"]["docs"])


def test_changelog_is_short() -> None:
    """Would catch: a history of builds that nobody has seen, in place of what a release does."""
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert newest.count("\n") <= 35


TEXTS = [file for file in BENCHMARK_ASSETS.rglob("*.jsonl*") if "build" not in file.relative_to(BENCHMARK_ASSETS).parts]


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_texts_of_others_have_a_notice_and_are_no_news_articles(file: Path) -> None:
    """Would catch: a data file without its licence, articles of newspapers that may not be redistributed."""
    notices = (BENCHMARK_ASSETS / "THIRD_PARTY.md").read_text(encoding="utf-8")
    assert f"`{file.relative_to(BENCHMARK_ASSETS).as_posix()}`" in notices
    assert b"(CNN)" not in file.read_bytes()


@pytest.mark.parametrize(
    ("subject", "is_accepted"),
    [
        ("ngram: reuse the index across calls", True),
        ("draft model, tests/unit: copy", True),
        (f"ngram: {'a' * 65}", True),
        (f"ngram: {'a' * 66}", False),
        ("reuse the index across calls\n\nngram: as its body says", False),
        ("ngram:", False),
        ("Merge branch 'main' into a-branch-with-a-name-that-is-longer-than-72-characters-is", True),
    ],
)
def test_commit_hook_accepts_subjects_with_a_scope(subject: str, is_accepted: bool) -> None:
    """Would catch: a pattern that a line of the body satisfies, or that merges of Git do not."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook["id"] == "commit-subject"]
    assert hook["args"] == ["--multiline", "--negate"] and hook["stages"] == ["commit-msg"]
    pattern = re.compile(hook["entry"].encode(), re.MULTILINE | re.DOTALL)  # as pre-commit compiles it
    assert bool(pattern.search(f"{subject}\n".encode())) == is_accepted
