"""Rules of CONTRIBUTING that tests keep, and its table of modules."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

TESTS = sorted((ROOT / "tests").glob("*/*.py"))
KEPT = {"tests/helpers/fixtures.py: attention.grouped_sdpa"}
"""What of the package a test replaces all the same: the kernel, to see which thread calls it."""


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_every_test_has_a_docstring() -> None:
    """Would catch: a test of which nobody knows whether it may fail, and what is broken then."""
    missing = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in TESTS
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not missing, f"say which bug they would catch: {', '.join(missing)}"


def test_no_refusal_asks_to_leave_out_the_strategy() -> None:
    """Would catch: a remedy for calls of `generate` alone, read by users of `attach` or `generate_many`."""
    texts = [
        f"{file.name}: {node.value}"
        for file in (ROOT / "hf_specgen").rglob("*.py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    wrong = [text for text in texts if re.search(r"(leave|without|with) candidate_generator\b", text)]
    assert not wrong, f"say what each caller can do, as use plain generate(candidate_generator=None): {wrong}"


def replaced(file: Path) -> Iterator[str]:
    """What a file replaces of the package, by `setattr` and `delattr` of a monkeypatch, or by `patch` of `mock`."""
    tree = parsed(file)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    own = {
        alias.asname or alias.name.partition(".")[0]
        for node in imports
        for alias in node.names
        if f"{getattr(node, 'module', None) or alias.name}.".startswith("hf_specgen.")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        first, *others = node.args
        is_path = isinstance(first, ast.Constant) and str(first.value).startswith("hf_specgen.")
        is_own = not isinstance(first, ast.Constant) and ast.unparse(first).partition(".")[0] in own
        if node.func.attr in ("setattr", "delattr", "patch", "object") and (is_path or is_own):
            name = f".{ast.literal_eval(others[0])}" if is_own else ""
            yield f"{file.relative_to(ROOT).as_posix()}: {ast.unparse(first)}{name}"


def test_no_test_replaces_parts_of_the_package() -> None:
    """Would catch: a test that fails when a module moves although nothing behaves otherwise, or passes if all does."""
    assert {found for file in TESTS for found in replaced(file)} == KEPT


def test_replaced_parts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before has power: each way to replace something is found, and replaced parts of PyTorch are left out."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "test.py"
    file.write_text(
        "import torch\nimport hf_specgen.call as call\nfrom hf_specgen.depth import policy\n"
        "monkeypatch.setattr(call, 'memory', 1)\nmonkeypatch.setattr('hf_specgen.tree.depths', 1)\n"
        "mock.patch.object(policy.Schedule, 'start')\nmonkeypatch.setattr(torch, 'zeros', 1)\n"
    )
    assert [found.partition(": ")[2] for found in replaced(file)] == [
        "call.memory",
        "'hf_specgen.tree.depths'",
        "policy.Schedule.start",
    ]


def test_every_module_is_in_the_table_of_tests_and_pages() -> None:
    """Would catch: a new module whose tests nobody finds, a file or page that was renamed, a module that is gone."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in text.split("page in `docs/`")[1].split("\n\n")[0].splitlines()[2:]]
    named = []
    for modules, tests, page in rows:
        folder, *_ = [name for name in re.findall("`(.*?)`", modules) if name.endswith("/")] or [""]
        named += [folder + name for name in re.findall("`(.*?)`", modules) if not name.endswith("/")]
        files = [ROOT / "tests" / f"{name}.py" for name in re.findall("`(.*?)`", tests)]
        files += [ROOT / "docs" / f"{name}.md" for name in re.findall("`(.*?)`", page)]
        assert len(files) > 1 and all(file.is_file() for file in files), modules
    package = ROOT / "hf_specgen"
    found = [file.relative_to(package).with_suffix("").as_posix() for file in package.rglob("*.py")]
    found = [name for name in found if name == "__init__" or not name.endswith("__init__")]
    assert len(named) == len(set(named)), "a module has two lines"
    assert not set(found) - set(named), "modules without a line"
    assert not set(named) - set(found), "lines without a module"
