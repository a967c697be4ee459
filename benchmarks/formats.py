"""Whether published draft heads load: their configs and the headers of their files, through the checks of the reader.

No weights are downloaded: of a file on the Hub the names and shapes of its tensors are read, in one request of a few
kilobytes for each file, and the head is built without numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError

from hf_specgen.cli.checkpoints import without_weights
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.checkpoint import (
    CONFIG,
    INDEX,
    MEDUSA_FILES,
    PICKLED,
    SINGLE,
    Checkpoint,
    TensorInfo,
    open_checkpoint,
    read_json,
    without_numbers,
)
from hf_specgen.heads.head_formats import head_format, read_head
from hf_specgen.heads.mtp import load_mtp
from hf_specgen.heads.source import Source, first_line

PUBLISHED = Path(__file__).parent / "assets" / "published_heads.json"
"""Repositories of heads, each with the target that it drafts for; of MTP layers both are the same."""
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of dtypes in headers of safetensors files."""


class Row(NamedTuple):
    """What became of a head: "loads", "refused", "absent" (no such file), or "fails" (a fault of the reader)."""

    head: str
    result: str
    found: str

    def __str__(self) -> str:
        return f"{self.result:8} {self.head}: {self.found}"


def published() -> dict[str, str]:
    """The heads of the table, each with its target."""
    names: dict[str, str] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return names


def check(head: str, target: str | None = None) -> Row:
    """Whether a head, in a folder or on the Hub, loads and fits its target, of which the config alone is read.

    Without a target it is not compared, and MTP layers have to be in the head's own checkpoint.
    """
    try:
        if head == target:  # of a target only the files that hold MTP layers are looked at
            return _layers(head, target)
        checkpoint = headers(Source(head))
        found = head_format(checkpoint)
        if found.load is None:
            return _layers(head, target or head)
        built = read_head(checkpoint)
        return Row(head, "loads", f"{found.name} ({type(built).__name__}){_fit(built, target)}")
    except ValueError as error:
        return Row(head, "refused", first_line(error))
    except OSError as error:
        return Row(head, "absent", first_line(error))
    except Exception as error:  # a published file must get an answer
        return Row(head, "fails", f"{type(error).__name__}: {first_line(error)}")


def _layers(head: str, target: str) -> Row:
    """MTP layers, which are read together with their target."""
    layers = load_mtp(without_weights(Source(target)), head, headers).layers
    return Row(head, "loads", f"{len(layers)} MTP layers of {type(layers[0].block).__name__}")


def _fit(head: DraftHead, target: str | None) -> str:
    """What is to be added about the target: nothing, or that it cannot be read; raises if the head is not for it."""
    if target is None:
        return ""
    try:
        model = without_weights(Source(target))
    except (OSError, ValueError) as error:  # it is gated, or newer than the Transformers that is installed
        return f"; not compared with its target ({first_line(error)})"
    head.bind(model)
    return f" for {target}"


def headers(source: Source, wanted: Callable[[str], bool] = lambda name: True) -> Checkpoint:
    """A checkpoint without its numbers; of one on the Hub the weights are not downloaded."""
    if Path(source.path_or_id).is_dir():
        return without_numbers(open_checkpoint(source, wanted))
    path = source.file(CONFIG)
    config = {} if path is None else read_json(path)  # some Medusa heads have none
    files = [SINGLE, MEDUSA_FILES[0]]
    if (index := source.file(INDEX)) is not None:
        files = sorted({str(file) for name, file in read_json(index)["weight_map"].items() if wanted(name)})
    infos: dict[str, TensorInfo] = {}
    for file in files:
        try:
            header = huggingface_hub.parse_safetensors_file_metadata(source.path_or_id, file, revision=source.revision)
        except EntryNotFoundError:
            continue
        for name, info in header.tensors.items():
            shape, dtype = tuple(info.shape), DTYPES.get(info.dtype, torch.uint8)
            infos[name] = TensorInfo(name, shape, dtype, Path(file), lambda: torch.empty(0))
    if not infos:
        raise ValueError(
            f"none of {', '.join(files)} is there; {PICKLED} and other pickles are read whole or not at all"
        )
    return without_numbers(Checkpoint(source, config, {name: info for name, info in infos.items() if wanted(name)}))
