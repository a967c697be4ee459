"""Every example of docs/integrations.md runs, where its library is installed."""

import re
from pathlib import Path
from typing import Any

import pytest

import hf_specgen
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^#+ ([^\n]*)\n[^#]*?```python\n(.*?)```", PAGE, flags=re.M | re.S))


def test_every_library_has_an_example() -> None:
    assert len(EXAMPLES) == 9


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_of_the_page_runs(title: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Would catch: an example that a new release of the library has left behind."""
    names = {
        "hf_specgen": hf_specgen,
        "NgramCandidates": hf_specgen.NgramCandidates,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": tokenizer("def add(x, y):", return_tensors="pt"),
        "folder": str(tmp_path),
        "reward": lambda completions, **_: [float(len(text)) for text in completions],
        "settings": {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "bf16": False},
    }
    if title == "TRL":
        datasets = pytest.importorskip("datasets")
        names["prompts"] = datasets.Dataset.from_list([{"prompt": "def add(x, y):"}] * 2)
    try:
        exec(compile(EXAMPLES[title], title, "exec"), names)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
