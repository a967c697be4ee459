"""Which models can run compiled passes, as far as is known before compiling; `CompiledPasses` checks the rest."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Literal

import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.state_layers import has_special_layers

Compile = bool | Literal["graphs"]
"""Whether passes are compiled with `torch.compile`, or on a GPU captured as CUDA graphs without being compiled."""
GRAPH_DEVICES = ("cuda",)
"""Where passes are captured as graphs."""
DEVICES = ("cpu", "cuda")
"""Device types for which compiled passes are implemented."""
IMPLEMENTATIONS = ("sdpa", "eager")
"""Attention implementations for which compiled passes have masks of a fixed shape."""
CPU_COMPILER = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
"""What inductor calls unless the environment variable CXX names another compiler."""


def check_setting(compile: object) -> None:
    """Raise a `ValueError` unless a value of `compile` is one of `Compile`."""
    if not isinstance(compile, bool) and compile != "graphs":
        raise ValueError(f'compile must be True, False or "graphs", got {compile!r}')


def named(compile: Compile) -> str:
    """The setting as it is written.

    Example:
        >>> named(True), named("graphs")
        ('compile=True', 'compile="graphs"')
    """
    return 'compile="graphs"' if compile == "graphs" else f"compile={compile}"


def check_compilable(model: PreTrainedModel, compile: Compile) -> None:
    """Raise unless passes of the model can be compiled, or captured.

    Raises:
        ValueError: what prevents it.
    """
    name, device = type(model).__name__, compat.input_device(model).type
    if reason := _problem(model):
        raise ValueError(f"{name} {reason}; leave {named(compile)} out")
    if compile == "graphs":
        if device not in GRAPH_DEVICES:
            raise ValueError(f'{name} is on {device!r}, and compile="graphs" captures CUDA graphs; use compile=True')
        if torch.is_autocast_enabled(device):
            raise ValueError('compile="graphs" does not work under torch.autocast; load the model in that dtype')
        return
    compiler = os.environ.get("CXX", CPU_COMPILER)
    if device == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"compile=True needs a C++ compiler, and {compiler} was not found; install one, name another in the "
            "environment variable CXX, or leave compile=True out"
        )


def _problem(model: PreTrainedModel) -> str | None:
    device = compat.input_device(model).type
    if compat.has_compiled_parts(model):
        return "is compiled already, and this setting compiles a model itself"
    if compat.has_device_hooks(model):
        return "has weights that are offloaded or on several devices, which are moved in every pass"
    implementation = compat.attention_implementation(model.config.get_text_config())
    if implementation not in IMPLEMENTATIONS:
        return f"uses {implementation!r} attention, and passes are compiled with 'sdpa' or 'eager'"
    if device not in DEVICES:
        return f"is on {device!r}, and passes are compiled on a CPU or a CUDA device"
    if has_special_layers(model.config.get_text_config()):
        return "keeps convolutions, recurrent states or indices in its cache, which compiled passes do not write"
    return None
