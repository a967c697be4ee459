"""Notebooks run cell by cell, with the bundled model in place of the published one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import REFERENCE_LM, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODEL = re.compile(r'^name = "[^"]+"', flags=re.M)
LENGTH = re.compile(r"max_new_tokens=\d\d+")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_cells_of_a_notebook_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch: a cell that the API has left behind, stored outputs, a badge that opens another notebook."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    badge = f"colab.research.google.com/github/OWNER/hf-specgen/blob/main/notebooks/{file.name}"
    assert re.sub("/github/[^/]+/", "/github/OWNER/", "".join(notebook["cells"][0]["source"])).count(badge) == 1
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            code = "".join(line for line in cell["source"] if not line.startswith("%"))
            code = MODEL.sub(f'name = "{REFERENCE_LM.as_posix()}"', LENGTH.sub("max_new_tokens=16", code))
            exec(compile(code, file.name, "exec"), names)
    assert re.search(r"plain [\d.]+ tokens per second, n-grams [\d.]+: [\d.]+x", capsys.readouterr().out)
