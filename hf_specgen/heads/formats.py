"""Reading Medusa heads in every format that is found on the Hub.

| format | file | tensors |
|---|---|---|
| our own | model.safetensors | as in `MedusaHeads` |
| Medusa v1, TGI | medusa_lm_head.pt, .safetensors | `{head}.{layer}.linear.weight`, `.bias`; `{head}.{layers}.weight` |
| Medusa v2, TGI | medusa_lm_head.safetensors | `{head}.{layer}.linear.weight`, `.bias` |
| vLLM | model.safetensors | `blocks.{head}.layers.{layer}.weight`, `.bias`; `lm_heads.{head}.weight` |

In foreign formats the numbers of heads and layers are counted in the tensors: configs in the wild are wrong about them.
Files are untrusted: safetensors, or `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.heads.compatibility import check_heads
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.target.model_parts import output_matrix

Tensors = dict[str, torch.Tensor]
ORIGINAL = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
LAYER = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
OUTPUT = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight$")
VLLM_LAYER = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_OUTPUT = re.compile(r"^lm_heads\.(\d+)\.weight$")


def load_medusa(path_or_id: str | Path, target: PreTrainedModel | None = None) -> MedusaHeads:
    """Load heads from a folder or a repository of the Hub.

    Args:
        path_or_id: where they are.
        target: the model that they draft for; if given, the heads are checked against it before anything else is done.

    Returns:
        the heads, on the CPU, in the dtype of the file.

    Raises:
        FileNotFoundError: if there is nothing that looks like heads.
        ValueError: if a file is damaged, holds something else than tensors, or the heads are another target's.
    """
    source = str(path_or_id)
    config = _config(source)
    heads = _own(source) if config.get("model_type") == MedusaConfig.model_type else _foreign(source, config)
    if target is not None:
        heads.config.vocab_size = heads.config.vocab_size or output_matrix(target).out_features  # v2 does not say
        check_heads(heads.config, target, f"the set of heads {source!r}")
    return heads


def _own(source: str) -> MedusaHeads:
    try:
        loaded: Any = MedusaHeads.from_pretrained(source, dtype="auto", output_loading_info=True)
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise ValueError(f"{source}: the heads cannot be read ({_first_line(error)}); download them again") from None
    heads, information = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in information.items() if names}
    if wrong:
        raise ValueError(f"{source}: its tensors are not those that its config.json describes ({wrong})")
    return cast(MedusaHeads, heads)


def _foreign(source: str, config: dict[str, Any]) -> MedusaHeads:
    tensors = _tensors(source)
    if "token_map" in tensors:
        raise ValueError(f"{source}: heads with a truncated vocabulary (token_map) are not supported; use whole ones")
    state, own = native_names(tensors)
    if not state:
        raise ValueError(f"{source}: no Medusa layers among its tensors {sorted(tensors)[:3]}; use another checkpoint")
    heads, layers = _count(state, 1), _count(state, 3)
    base_name = config.get("base_model_name_or_path")
    try:
        hidden = state["blocks.0.layers.0.weight"].shape[-1]
        vocab = state["lm_heads.0.weight"].shape[0] if own else int(config.get("vocab_size") or 0)
        shape = {"num_heads": heads, "num_layers": layers, "own_outputs": own, "vocab_size": vocab}
        base = {"name_or_path": base_name} if base_name else None
        fresh: Any = MedusaHeads(MedusaConfig(hidden_size=hidden, base=base, **cast(Any, shape)))
        result = cast(MedusaHeads, fresh.to(next(iter(state.values())).dtype))
        if not any(name.endswith(".bias") for name in state):  # vLLM's medusa_fc_bias=False
            state |= {name: value for name, value in result.state_dict().items() if name.endswith(".bias")}
        result.load_state_dict(state)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its tensors do not make a whole set of heads ({_first_line(error)})") from None
    result.config.name_or_path = source
    return result.eval()


def _count(state: Tensors, place: int) -> int:
    """How many heads (place 1) or layers (place 3) the names of the blocks count; at most as many as there are."""
    return len({name.split(".")[place] for name in state if name.startswith("blocks.")})


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("Error(s) in loading")), type(error).__name__)


def native_names(tensors: Tensors) -> tuple[Tensors, bool]:
    """Tensors of a foreign format under the names of `MedusaHeads`, and whether each head has its own output matrix.

    Example:
        >>> native_names({"0.0.linear.weight": torch.zeros(2, 2), "0.1.weight": torch.zeros(5, 2)})[0].keys()
        dict_keys(['blocks.0.layers.0.weight', 'lm_heads.0.weight'])
    """
    state: Tensors = {}
    for name, tensor in tensors.items():
        if found := LAYER.match(name) or VLLM_LAYER.match(name):
            state[f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"] = tensor
        elif found := OUTPUT.match(name) or VLLM_OUTPUT.match(name):
            state[f"lm_heads.{found[1]}.weight"] = tensor
    blocks = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    outputs = {name for name in state if name.startswith("lm_heads.")}
    if outputs == {"lm_heads.0.weight"} and len(blocks) > 1 and "lm_heads.0.weight" in tensors:
        del state["lm_heads.0.weight"]  # vLLM's `original_lm_head`: the one matrix is the target's
        outputs = set()
    return state, bool(outputs)


def _tensors(source: str) -> Tensors:
    for name in (*ORIGINAL, "model.safetensors"):
        path = _file(source, name)
        if path is None:
            continue
        try:
            if name.endswith(".pt"):
                tensors = torch.load(path, map_location="cpu", weights_only=True)
                if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
                    raise ValueError("not a dictionary of tensors")
                return cast(Tensors, tensors)
            return load_file(path)
        except Exception as error:
            reason = _first_line(error)
            raise ValueError(f"{source}: {name} cannot be read as tensors ({reason}); download it again") from None
    raise FileNotFoundError(
        f"{source} has no Medusa heads: none of {', '.join((*ORIGINAL, 'model.safetensors'))} is there"
    )


def _config(source: str) -> dict[str, Any]:
    path = _file(source, "config.json")
    if path is None:
        return {}
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{source}: config.json is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{source}: config.json holds {type(config).__name__}, not an object")
    return config


def _file(source: str, name: str) -> str | None:
    """Where a file is, or None if the folder or repository has none of that name.

    Raises:
        OSError: Transformers' own sentence, if the repository cannot be reached or does not exist.
    """
    if Path(source).is_dir():
        path = Path(source) / name
        return str(path) if path.exists() else None
    return compat.cached_file_or_none(source, name)
