"""`import hf_specgen` and `hf-specgen --help` load neither PyTorch nor anything else that takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hf_specgen

HEAVY = ("torch", "transformers", "peft", "torchao", "accelerate", "numpy", "rich.progress")
SLOW = "transformers.cache_utils, transformers.distributed.fsdp, transformers.masking_utils"
"""Nearly all of the time that importing `transformers.generation.utils` takes is spent on what these import."""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own; its last line of output is its answer."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run


def run_forks(*parts: tuple[str, str]) -> list[list[str]]:
    """The words that each code prints in a fork of one new interpreter, which first runs the code before it."""
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
    """Would catch: an import of PyTorch before the command line is read, or a command that is not listed."""
    code = (
        "import sys, time, json; from hf_specgen.cli import main; sys.argv = ['hf-specgen', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print(json.dumps([time.process_time(), [n for n in {HEAVY} if n in sys.modules]]))"
    )
    run = run_python(code)
    seconds, loaded = json.loads(run.stdout.splitlines()[-1])
    assert seconds < 0.5 and loaded == [] and run.stderr == ""
    for command in ("demo", "chat", "generate", "doctor", "find", "tune", "export", "lm-eval"):
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


FIRST_CALLS = """
import threading
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_specgen

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=None, **sizes)).eval()
ids, barrier = torch.tensor([[3, 4, 5, 3, 4]]), threading.Barrier(8)
arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
ways = ({}, {"candidate_generator": "auto"}, {"custom_generate": lambda model, input_ids, **_: input_ids})
texts, failures = {0: set(), 1: set(), 2: set()}, []

def work(number):
    barrier.wait()
    for _ in range(4):
        try:
            text = model.generate(ids, **arguments, **ways[number % 3])
            texts[number % 3].add(str(text.tolist()))
        except Exception as error:
            failures.append(repr(error))

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, (len(failures), failures[0])
assert texts[0] == texts[1] and len(texts[0]) == 1 and texts[2] == {str(ids.tolist())}
print("as expected")
"""


def test_keyword_is_installed_whichever_module_is_imported_first_and_costs_little() -> None:
    """Would catch: a keyword that depends on the order of imports; an import that takes a tenth of a second.

    Also a plain call that fails while another thread's first call imports the package.
    """
    beside, ours, transformers_first, uninstalled, _ = run_forks(
        ("import transformers", BESIDE),
        (f"import {SLOW}", FIRST.format(first="hf_specgen")),
        ("", FIRST.format(first="transformers.generation.utils")),
        ("", UNINSTALLED),
        ("import torch", FIRST_CALLS),
    )
    assert float(beside[0]) < 0.1 and ours == transformers_first == ["True", "0", "False"]
    assert uninstalled == ["False"], "uninstalled before transformers is loaded"
