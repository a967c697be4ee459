"""The frozen target of a training run: its hidden states, computed in each step or read from a folder.

A folder of hidden states (`--features`) has everything of the target that training reads, so that the target itself
need not be in memory: the states of every row, its embeddings and its output matrix.

    index.json                what the states belong to
    rows                      tokens and labels
    shared.safetensors        embeddings, output matrix, final norm, layers that the drafter starts from
    000000.safetensors …      features.ROW [length, layers * hidden], hidden.ROW [predicting positions, hidden]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import set_module_tensor_to_device
from datasets import load_from_disk
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from arguments import Arguments, deferred_signals, differences
from conversations import IGNORED, Batch, Row, collate
from hf_specgen.cli.generate import write_rows
from hf_specgen.heads.source import Source
from hf_specgen.targets.model_parts import decoder, decoder_layers, final_norm, keeps_state, output_logits

ROWS_PER_FILE = 64
INDEX, ROWS, SHARED = "index.json", "rows", "shared.safetensors"
WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt")
SAMPLES, SAMPLE_BYTES = 1024, 4096
"""Parts of a file of weights by which two trainings are distinguished: all of a small one, every few MB of a shard."""


class States(NamedTuple):
    """What one forward pass of the frozen target gives."""

    features: torch.Tensor  # [batch, length, layers * hidden], the hidden states that the drafter reads
    hidden: torch.Tensor  # [positions, hidden], inputs of the output matrix at the predicting positions


def load_target(args: Arguments) -> PreTrainedModel:
    """The frozen target, in the dtype of its checkpoint if this run computes in bf16, otherwise in float32."""
    kwargs = {"dtype": "auto" if args.bf16 else torch.float32, **args.target_kwargs}
    unset_hf_deepspeed_config()  # ZeRO-3 is for the drafter; the target is sharded by `shard_target`
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, **kwargs)
    target.requires_grad_(False).eval()
    if args.shard_target:
        for layer in decoder_layers(target):
            fully_shard(layer)
    is_placed = {"device_map", "quantization_config"} & kwargs.keys()
    return cast(PreTrainedModel, target if is_placed else target.to(args.device))


def load_tokenizer(args: Any) -> PreTrainedTokenizerBase:
    """The target's tokenizer, of the same revision as its weights."""
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(args.target, revision=revision_of(args)))


def weights_version(target: str, revision: str = "main") -> str:
    """What changes with the weights of a target: the commit of a repository of the Hub, or a digest of a folder."""
    folder = Path(target)
    if not folder.is_dir():
        source = Source(target, revision)
        config = source.file("config.json") or source.file("adapter_config.json")
        return config.parent.name if config else ""  # the cache has a folder for each commit
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(size * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def description_of_target(args: Arguments) -> dict[str, Any]:
    """What of a target its hidden states depend on."""
    version = weights_version(args.target, revision_of(args))
    return {"target": args.target, "target_weights": version, "bf16": args.bf16}


def revision_of(args: Any) -> str:
    """The revision of the Hub that the target is loaded from."""
    return str(args.target_kwargs.get("revision") or "main")


@torch.no_grad()
def check_target(target: PreTrainedModel, packing: bool = False) -> None:
    """Refuse a model whose parts do not add up to it, before any data are read."""
    decoder_layers(target)
    embeddings: Any = target.get_input_embeddings()
    ids = torch.arange(1, 9, device=embeddings.weight.device)[None] % len(embeddings.weight)

    def states(some: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return read_target(target, {"input_ids": some, "labels": some, **more}, ()).hidden

    expected = target(input_ids=ids).logits[0]
    tolerance: dict[str, Any] = dict.fromkeys(("atol", "rtol"), 1e-3 if expected.dtype == torch.float32 else 0.1)
    if not torch.allclose(output_logits(target, states(ids)).float(), expected.float(), **tolerance):
        raise ValueError(
            f"the logits of {type(target).__name__} are not those of its output matrix on its last hidden state, which "
            "drafters are trained for; it cannot be a target"
        )
    if packing:
        packed = states(ids, position_ids=torch.arange(4, device=ids.device).repeat(2)[None])
        is_apart = torch.allclose(packed[4:], states(ids[:, 4:]), **tolerance)
        if keeps_state(target.config.get_text_config()) or not is_apart:
            raise ValueError(f"{type(target).__name__} does not keep packed conversations apart; train without packing")


def read_target(target: PreTrainedModel, batch: Batch, layers: Sequence[int]) -> States:
    """One forward pass of a model over whole conversations."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    # Versions before 5.23 count a list of indices without the embedding.
    captured: Any = list(layers) if Version(transformers.__version__) >= Version("5.23") else bool(layers)
    output = cast(Any, decoder(target))(**inputs, use_cache=False, output_hidden_states=captured or False)
    last = output.last_hidden_state
    features = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1) if layers else last[..., :0]
    return States(features, last[batch["labels"] != IGNORED])


class StoredStates(Dataset[Row]):
    """Encoded rows with the target's hidden states, read from a folder."""

    def __init__(self, folder: Path):
        self.rows, self._folder = load_from_disk(folder / ROWS), folder
        self._open = lru_cache(maxsize=16)(partial(safe_open, framework="pt"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        file = self._open(self._folder / _file_name(number))
        return {**self.rows[number], **{name: file.get_tensor(f"{name}.{number}") for name in States._fields}}


def _file_name(number: int) -> str:
    return f"{number // ROWS_PER_FILE:06d}.safetensors"


def is_stored(folder: Path, described: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether the folder has all states."""
    index = folder / INDEX
    if not index.exists():
        return False
    stored = json.loads(index.read_text(encoding="utf-8"))
    if changed := differences(stored, described):
        raise ValueError(f"{folder} has the states of another run: {changed}; give another folder for --features")
    return bool(stored["complete"])


def stored_states(args: Arguments, drafter: Any, name: str, content: Any, make_rows: Callable[[], Any]) -> StoredStates:
    """The encoded rows with their states from the folder `name`, which are computed first where they are missing.

    The rows, which depend on `content`, are divided among the processes; what an interrupted run has stored is kept.
    """
    folder, state = Path(str(args.features)) / name, PartialState()
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    description = description_of_target(args) | {"layers": list(drafter.layers), "tokens": digest}
    if is_stored(folder, description):
        return StoredStates(folder)
    rows, shared = make_rows(), _shared_tensors(drafter.target, drafter.copied)
    folder.mkdir(parents=True, exist_ok=True)
    if state.is_main_process:
        _check_same_weights(folder, shared)
        write_rows(folder / INDEX, [description | {"complete": False}])
        save_file(shared, (folder / SHARED).with_suffix(".part"))
        (folder / SHARED).with_suffix(".part").replace(folder / SHARED)
        with deferred_signals():
            rows.save_to_disk(folder / ROWS)
    starts = list(range(0, len(rows), ROWS_PER_FILE))
    # A sharded target needs all processes in each of its passes: they compute the same rows, and one of them writes.
    mine = starts if args.shard_target else starts[state.process_index :: state.num_processes]
    for start in tqdm(mine, disable=not state.is_main_process, unit="file", desc="hidden states"):
        path, numbers = folder / _file_name(start), range(start, min(start + ROWS_PER_FILE, len(rows)))
        if path.exists():
            continue
        tensors = _states_of(drafter.target, rows, numbers, drafter.layers, args.per_device_train_batch_size)
        if state.is_main_process or not args.shard_target:
            save_file(tensors, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    state.wait_for_everyone()
    if state.is_main_process:
        write_rows(folder / INDEX, [description | {"complete": True}])
    state.wait_for_everyone()
    return StoredStates(folder)


def _check_same_weights(folder: Path, shared: Mapping[str, torch.Tensor]) -> None:
    """Raise a `ValueError` if an interrupted run has stored states of a target with other weights."""
    earlier = load_file(folder / SHARED) if (folder / SHARED).exists() else {}
    pairs = [(tensor, shared[name]) for name, tensor in earlier.items() if name in shared]
    if any(old.dtype != new.dtype or not torch.equal(old, new) for old, new in pairs):
        raise ValueError(
            f"{folder} has states of the target with other weights, from an interrupted run; give another folder for "
            "--features, or delete this one"
        )


@torch.no_grad()
def _states_of(
    target: PreTrainedModel, rows: Any, numbers: range, layers: Sequence[int], size: int
) -> dict[str, torch.Tensor]:
    """The tensors of one file, computed in passes of `size` rows."""
    tensors: dict[str, torch.Tensor] = {}
    device: Any = target.get_input_embeddings().weight.device
    for first in range(numbers.start, numbers.stop, size):
        members = [rows[number] for number in range(first, min(first + size, numbers.stop))]
        batch = {name: tensor.to(device) for name, tensor in collate(members).items()}
        states = read_target(target, batch, layers)
        counts = (batch["labels"] != IGNORED).sum(dim=1).tolist()
        for place, hidden in enumerate(states.hidden.split(counts)):
            length = len(members[place]["input_ids"])
            tensors[f"features.{first + place}"] = states.features[place, :length].cpu().clone()
            tensors[f"hidden.{first + place}"] = hidden.cpu().clone()
    return tensors


def _shared_tensors(target: PreTrainedModel, copied: Sequence[int]) -> dict[str, torch.Tensor]:
    """Embeddings, output matrix, final norm, and the layers that drafters start from, by their names in the target."""
    modules = [target.get_input_embeddings(), target.get_output_embeddings(), final_norm(target)]
    modules += [decoder_layers(target)[layer] for layer in copied]
    kept = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    named = (*target.named_parameters(remove_duplicate=False), *target.named_buffers(remove_duplicate=False))
    return {name: whole(tensor).cpu().clone() for name, tensor in named if id(tensor) in kept}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor; complete, where the target is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def target_without_layers(args: Arguments) -> PreTrainedModel:
    """The target with what a folder of states has of it; its other parameters are on the device "meta"."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.target, revision=revision_of(args)))
    for name, tensor in load_file(Path(str(args.features)) / "train" / SHARED).items():
        set_module_tensor_to_device(target, name, args.device, tensor, dtype=tensor.dtype)
    return cast(PreTrainedModel, target.requires_grad_(False).eval())
