"""Start-up: `import hf_specgen` and `hf-specgen --help` load neither PyTorch nor anything else that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_specgen

HEAVY = ("torch", "transformers", "peft", "torchao", "accelerate", "numpy", "rich.progress")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own; its last line of output is its answer."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)


def test_import_alone_loads_nothing_and_prints_nothing() -> None:
    """Would catch: an eager import in `hf_specgen/__init__.py`; it took 2 s to 8 s with torchao's warnings."""
    run = run_python(f"import hf_specgen, sys, json; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))")
    assert json.loads(run.stdout) == [] and run.stderr == ""


def test_import_beside_transformers_adds_less_than_a_tenth_of_a_second() -> None:
    code = "import transformers, time; t = time.process_time(); import hf_specgen; print(time.process_time() - t)"
    assert float(run_python(code).stdout) < 0.1


def test_help_takes_less_than_half_a_second_of_cpu_and_loads_no_torch() -> None:
    code = (
        "import sys, time, json; from hf_specgen.cli import main; sys.argv = ['hf-specgen', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print(json.dumps([time.process_time(), [n for n in {HEAVY} if n in sys.modules]]))"
    )
    run = run_python(code)
    seconds, loaded = json.loads(run.stdout.splitlines()[-1])
    assert seconds < 0.5 and loaded == [] and run.stderr == ""
    for command in ("demo", "chat", "generate", "doctor", "tune", "profile", "export", "bench"):
        assert f" {command} " in run.stdout


def test_every_public_name_can_be_imported() -> None:
    """Would catch: a name of `__all__` without a module, or the reverse."""
    homes = set(hf_specgen._HOMES) | {"__version__", "install", "uninstall"}
    assert homes == set(hf_specgen.__all__)
    assert all(getattr(hf_specgen, name) is not None for name in hf_specgen.__all__)
    assert set(hf_specgen.__all__) <= set(dir(hf_specgen))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hf_specgen.nothing  # noqa: B018


@pytest.mark.parametrize("first", ["hf_specgen", "transformers.generation.utils"])
def test_keyword_is_installed_whichever_module_is_imported_first(first: str) -> None:
    code = (
        f"import {first}, hf_specgen, sys\n"
        "from transformers import GenerationMixin\n"
        "hooks = [f for f in sys.meta_path if type(f).__module__ == 'hf_specgen.patch']\n"
        "print(GenerationMixin.generate._hf_specgen_enabled, len(hooks), 'hf_specgen.generate' in sys.modules)"
    )
    assert run_python(code).stdout.split() == ["True", "0", "False"]


def test_keyword_is_not_installed_after_uninstall_before_transformers_is_loaded() -> None:
    code = (
        "import hf_specgen; hf_specgen.uninstall()\n"
        "from transformers import GenerationMixin; print(hasattr(GenerationMixin.generate, '_hf_specgen_original'))"
    )
    assert run_python(code).stdout.split() == ["False"]


def test_uninstall_keeps_the_wrapper_of_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: restoring the original over a tracer that was put around our function later (defect B16)."""
    import functools

    from transformers import GenerationMixin

    traced: list[str] = []

    def original(self: Any, *args: Any, **kwargs: Any) -> str:
        return f"plain {sorted(kwargs)}"

    monkeypatch.setattr(GenerationMixin, "generate", original)
    hf_specgen.install()
    inner: Any = GenerationMixin.generate

    @functools.wraps(inner)
    def tracer(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append("call")
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", tracer)
    hf_specgen.uninstall()
    assert GenerationMixin.generate is tracer
    assert tracer(None, candidate_generator=1) == "plain ['candidate_generator']" and traced == ["call"]
    hf_specgen.install()
    assert GenerationMixin.generate is tracer, "our function inside is enabled again, not wrapped twice"
    assert tracer(None, candidate_generator=None) == "plain []"
