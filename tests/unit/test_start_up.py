"""Start-up: `import hf_specgen` and `hf-specgen --help` load neither PyTorch nor anything else that takes seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_specgen

HEAVY = ("torch", "transformers", "peft", "torchao", "accelerate", "numpy", "rich.progress")
SLOW = "transformers.cache_utils, transformers.distributed.fsdp, transformers.masking_utils"
"""Nearly all of the time that importing `transformers.generation.utils` takes is spent on what these import."""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own; its last line of output is its answer."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)


def run_forks(*parts: tuple[str, str]) -> list[list[str]]:
    """The words that each code prints in a process of its own.

    Args:
        parts: code for the one new interpreter, which imports what takes long, and code for a fork of it.
    """
    code = """if True:
        import os, sys
        for shared, own in PARTS:
            exec(shared)
            if os.fork() == 0:
                exec(own, {})
                sys.stdout.flush()
                os._exit(0)
            assert os.wait()[1] == 0
    """
    return [line.split() for line in run_python(code.replace("PARTS", repr(parts))).stdout.splitlines()]


def test_import_alone_loads_nothing_and_prints_nothing() -> None:
    """Would catch: an eager import in `hf_specgen/__init__.py`; it took 2 s to 8 s with torchao's warnings."""
    run = run_python(f"import hf_specgen, sys, json; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))")
    assert json.loads(run.stdout) == [] and run.stderr == ""


def test_help_takes_less_than_half_a_second_of_cpu_and_loads_no_torch() -> None:
    code = (
        "import sys, time, json; from hf_specgen.cli import main; sys.argv = ['hf-specgen', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print(json.dumps([time.process_time(), [n for n in {HEAVY} if n in sys.modules]]))"
    )
    run = run_python(code)
    seconds, loaded = json.loads(run.stdout.splitlines()[-1])
    assert seconds < 0.5 and loaded == [] and run.stderr == ""
    for command in ("demo", "chat", "generate", "doctor", "find", "tune", "export"):
        assert f" {command} " in run.stdout


def test_every_public_name_can_be_imported() -> None:
    """Would catch: a name of `__all__` without a module, or the reverse."""
    homes = set(hf_specgen._HOMES) | {"__version__", "install", "uninstall"}
    assert homes == set(hf_specgen.__all__)
    assert all(getattr(hf_specgen, name) is not None for name in hf_specgen.__all__)
    assert set(hf_specgen.__all__) <= set(dir(hf_specgen))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hf_specgen.nothing  # noqa: B018


BESIDE = "import time; t = time.process_time(); import hf_specgen; print(time.process_time() - t)"
FIRST = """
import sys
assert "transformers.generation.utils" not in sys.modules and "hf_specgen" not in sys.modules
import {first}, hf_specgen
from transformers import GenerationMixin
hooks = [f for f in sys.meta_path if type(f).__module__ == "hf_specgen.patch"]
print(GenerationMixin.generate._hf_specgen_enabled, len(hooks), "hf_specgen.generate" in sys.modules)
"""
UNINSTALLED = """
import hf_specgen; hf_specgen.uninstall()
from transformers import GenerationMixin; print(hasattr(GenerationMixin.generate, "_hf_specgen_original"))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """What programs print that import hf_specgen in different places."""
    programs = {
        "beside transformers": ("import transformers", BESIDE),
        "hf_specgen": (f"import {SLOW}", FIRST.format(first="hf_specgen")),
        "transformers.generation.utils": ("", FIRST.format(first="transformers.generation.utils")),
        "uninstalled": ("", UNINSTALLED),
    }
    return dict(zip(programs, run_forks(*programs.values()), strict=True))


def test_import_beside_transformers_adds_less_than_a_tenth_of_a_second(answers: dict[str, list[str]]) -> None:
    assert float(answers["beside transformers"][0]) < 0.1


@pytest.mark.parametrize("first", ["hf_specgen", "transformers.generation.utils"])
def test_keyword_is_installed_whichever_module_is_imported_first(first: str, answers: dict[str, list[str]]) -> None:
    assert answers[first] == ["True", "0", "False"]


def test_keyword_is_not_installed_after_uninstall_before_transformers_is_loaded(answers: dict[str, list[str]]) -> None:
    assert answers["uninstalled"] == ["False"]


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
