"""Multi-token prediction (MTP) layers, mostly in a target's own checkpoint, where Transformers ignores them.

An MTP layer is one more decoder layer of the target's own kind, with inputs as those of an EAGLE-1 head. Layer k drafts
the token k + 2 places ahead from the output of layer k - 1 (`LayeredDrafter`); a single layer is applied to its own
output again (`EagleDrafter`).

| models | one set of tensors for each layer k | for all layers together |
|---|---|---|
| DeepSeek-V3, GLM-4.x | `model.layers.{L + k}.…` with `enorm`, `hnorm`, `eh_proj`, `shared_head.norm` | |
| Qwen3-Next, Qwen3.5 | `mtp.layers.{k}.…` | `mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}` |
| speculators `mtp`, a checkpoint of its own | `mtp_layers.0.…` with `{token,hidden,final}_layernorm`, `input_proj` | |

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_specgen import compat
from hf_specgen.heads.base import DraftHead, HeadConfig, HeadInputs, HeadOutput, check_target
from hf_specgen.heads.checkpoint import Checkpoint, Fields, TensorInfo, named_errors, open_checkpoint
from hf_specgen.heads.config_keys import MTP, check_keys
from hf_specgen.heads.head_file import check_tensor
from hf_specgen.heads.quantised import dequantised, quantisation
from hf_specgen.heads.source import Source, first_line
from hf_specgen.targets.model_parts import layer_kinds

INPUT_PROJECTION_MODULES = ("enorm", "hnorm", "eh_proj", "final_norm")
"""Norms of embedding and state, projection of both, and final norm."""
RENAMED = {
    "shared_head.norm": "final_norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "final_norm",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "final_norm",
}
"""Their names in the layouts of DeepSeek-V3, Qwen and speculators."""
FURTHER_LAYER = re.compile(r"^(?P<prefix>(?:.+\.)?layers)\.(?P<layer>\d{1,6})\.(?P<part>.+)$")
NAMED_LAYER = re.compile(r"^(?:mtp_|(?:.+\.)?mtp\.)(?:layers\.(?P<layer>\d{1,6})\.)?(?P<part>.+)$")
"""Tensors of layers after those of the target, and of layers that are named MTP; without a number for all of them."""
EXPERT = re.compile(r"^(.+\.experts)\.\d{1,6}\.(gate|up|down)_proj\.weight$")
"""Matrices of one expert."""
UNSUPPORTED_KEYS = ("mtp_hidden_states_first", "chain_hidden_post_norm", "mtp_use_dedicated_embeddings")
"""Keys of a target's config that change what its MTP layers compute, and are refused unless they are false."""
NUM_LAYERS_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of configs with the number of MTP layers."""
TARGET_COPIES = ("embed_tokens", "shared_head.head")
"""Copies of the target's embedding and output matrix, which are not loaded: the target's own are used."""


class MTPHead(DraftHead):
    """The MTP layers of a checkpoint; made by `load_mtp`.

    Each has the modules in `INPUT_PROJECTION_MODULES`, and the target's `block`.
    """

    def __init__(self, config: HeadConfig, layers: list[nn.ModuleDict], rotary: nn.Module) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(layers)
        self.rotary = rotary

    def forward(self, inputs: HeadInputs, cache: Cache | None = None, step: int = 0) -> HeadOutput:
        """One pass of one layer; its output after its final norm is for the next step and for the output matrix."""
        layer = cast(Any, self.layers[step % len(self.layers)])
        states = layer.eh_proj(torch.cat((layer.enorm(inputs.embeddings), layer.hnorm(inputs.hidden)), dim=-1))
        states = layer.block(
            states,
            position_embeddings=self.rotary(states, inputs.positions),
            attention_mask=inputs.mask,
            position_ids=inputs.positions,
            **{compat.CACHE: cache},
        )
        normed = layer.final_norm(states[0] if isinstance(states, tuple) else states)
        return HeadOutput(normed, normed)


Opener = Callable[[Source, Callable[[str], bool]], Checkpoint]


def load_mtp(target: PreTrainedModel, path_or_id: str | None = None, open_with: Opener = open_checkpoint) -> MTPHead:
    """Load the MTP layers of a target from its checkpoint: in its dtype, on the device of its last layer.

    Args:
        target: the model that is drafted for.
        path_or_id: its checkpoint; None takes where it was loaded from.
        open_with: reads its config and its tensors; with those of `without_numbers` the head is on the meta device.
    """
    source = path_or_id or target.config.name_or_path
    if not source:
        raise ValueError(
            'it is not known where the target was loaded from; name its checkpoint: MTPCandidates("org/model")'
        )
    decoder: Any = target.get_decoder()
    _check_class(decoder)
    config = decoder.config
    first = config.num_hidden_layers
    hidden = config.hidden_size
    vocab = config.vocab_size
    checkpoint = open_with(Source(source), lambda name: _is_mtp_name(name, first))
    with named_errors(source):
        _check_options(config, checkpoint)
        checkpoint = dequantised(checkpoint, decoder.norm.weight.dtype)
        layers = _parts(checkpoint, first)
        blocks = _blocks(decoder, checkpoint, layers)
        projections = _input_projections(decoder, layers)
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "draft_vocab_size": vocab, "target_hidden_size": hidden}
    pairs = zip(projections, blocks.layers, strict=True)
    mtp_layers = [nn.ModuleDict({**modules, "block": block}) for modules, block in pairs]
    head = MTPHead(HeadConfig(**sizes, num_target_layers=first), mtp_layers, blocks.rotary_emb)
    head.keep_dtype_of += tuple(f".{name}." for name in blocks._keep_in_fp32_modules_strict or ())
    return head.to(device=next(decoder.layers[-1].parameters()).device).eval().requires_grad_(False)


def _check_class(decoder: Any) -> None:
    """Raise unless the layers of a class can be run one by one, with the same rotation in all of them."""
    rotary = getattr(decoder, "rotary_emb", None)
    by_layer = rotary is None or "layer_type" in inspect.signature(rotary.forward).parameters
    if by_layer or not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise ValueError(
            f"MTP layers of {type(decoder).__name__} are not supported: its layers have no rotation in common, or "
            "other names; use another strategy, such as NgramCandidates()"
        )


def _check_options(config: PretrainedConfig, checkpoint: Checkpoint) -> None:
    """Raise if the config in the checkpoint, or else the target's, has an option of MTP layers that is not read."""
    fields = Fields(checkpoint.config)
    values = {**fields.values, **fields.nested("text_config").values}
    for key in UNSUPPORTED_KEYS:
        if value := values.get(key, getattr(config, key, False)):
            raise ValueError(f"config.json has {key} = {str(value)[:60]!r}, which is not read; use another strategy")


def has_mtp_layers(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is that of a target with MTP layers: it has a projection of embedding and state."""
    named = any((match := NAMED_LAYER.match(name)) and match["part"] == "fc.weight" for name in checkpoint.tensors)
    return "speculators_model_type" not in checkpoint.config and (named or _further_layers(checkpoint) is not None)


def _further_layers(checkpoint: Checkpoint) -> str | None:
    """The beginning of the names of layers with a projection of embedding and state, such as "model.layers"."""
    matches = map(FURTHER_LAYER.match, checkpoint.tensors)
    return next((match["prefix"] for match in matches if match and match["part"] == "eh_proj.weight"), None)


def _is_mtp_name(name: str, first: int) -> bool:
    if name.endswith("inv_freq"):  # derived from the config
        return False
    further = FURTHER_LAYER.match(name)
    return NAMED_LAYER.match(name) is not None or (further is not None and int(further["layer"]) >= first)


def _parts(checkpoint: Checkpoint, first: int) -> list[dict[str, TensorInfo]]:
    """The tensors of each MTP layer, by their names within a layer of the first layout."""
    layers: dict[int, dict[str, TensorInfo]] = {}
    shared: dict[str, TensorInfo] = {}
    prefix = _further_layers(checkpoint)
    for name, info in checkpoint.tensors.items():
        match = NAMED_LAYER.match(name) if prefix is None else FURTHER_LAYER.match(name)
        if match is None or match.groupdict().get("prefix") != prefix:
            continue
        module, _, kind = match["part"].rpartition(".")
        part = f"{RENAMED.get(module, module)}.{kind}"
        if part.startswith(TARGET_COPIES):
            continue
        if match["layer"] is not None:
            layers.setdefault(int(match["layer"]) - (0 if prefix is None else first), {})[part] = info
        elif module in RENAMED:
            shared[part] = info
    if not layers:
        raise ValueError(
            "no MTP layers: neither model.layers.{number of layers}.eh_proj.weight nor mtp.fc.weight with mtp.layers.0 "
            f"is among its tensors (found {sorted(checkpoint.tensors)[:3]}); name a checkpoint that has them, or use "
            "another strategy, such as NgramCandidates()"
        )
    _check_layers(checkpoint, sorted(layers))
    return [layers[index] | shared for index in range(len(layers))]


def _check_layers(checkpoint: Checkpoint, indices: list[int]) -> None:
    """Raise unless the layers of these indices are as many as the config names, without a gap."""
    remedy = "name a checkpoint with all of its MTP layers, or use another strategy, such as NgramCandidates()"
    fields = Fields(checkpoint.config)
    for values, key in product((fields, fields.nested("text_config")), NUM_LAYERS_KEYS):
        count = values.optional_integer(key)
        if count is not None and count != len(indices):
            raise ValueError(f"config.json has {key} = {count}, but the file has {len(indices)} MTP layers; {remedy}")
    if indices != list(range(len(indices))):
        raise ValueError(f"the file has MTP layers {indices}, counted from 0, so that some are missing; {remedy}")


def _input_projections(decoder: Any, layers: list[dict[str, TensorInfo]]) -> list[dict[str, nn.Module]]:
    """The norms, of the target's kind, and the projection of each layer, which layers may share."""
    hidden = decoder.config.hidden_size
    modules = dict[str, nn.Module]()
    for parts, name in product(layers, INPUT_PROJECTION_MODULES):
        info = parts.get(f"{name}.weight")
        if info is None:
            raise ValueError(f"the MTP layer has no {name}.weight")
        if info.name not in modules:
            with torch.device("meta"):
                module = nn.Linear(2 * hidden, hidden, bias=False) if name == "eh_proj" else copy.deepcopy(decoder.norm)
            check_tensor(info.name, info.shape, info.dtype, module.weight)
            weight = info.read().to(decoder.norm.weight.dtype).reshape(module.weight.shape)
            module.load_state_dict({"weight": weight}, assign=True)
            modules[info.name] = module
    return [{name: modules[parts[f"{name}.weight"].name] for name in INPUT_PROJECTION_MODULES} for parts in layers]


def _blocks(decoder: Any, checkpoint: Checkpoint, layers: list[dict[str, TensorInfo]]) -> Any:
    """The decoder layers of the MTP layers, as a model of the target's class that has these layers only."""
    state = {
        f"layers.{index}.{part}": info.read()
        for index, parts in enumerate(layers)
        for part, info in parts.items()
        if not part.startswith(INPUT_PROJECTION_MODULES)
    }
    method = quantisation(checkpoint).get("quant_method")
    for name, tensor in state.items():
        if tensor.dtype.itemsize < 2:
            raise ValueError(
                f"quantised MTP layers such as {name} are not supported (quant_method {str(method)[:40]!r})"
            )
    sparse = any(".experts." in name for name in state)
    if checkpoint.config.get("transformer_layer_config") is None:
        config: Any = layer_config(decoder.config, len(layers), sparse)
    else:
        config = _own_config(decoder, checkpoint, len(layers), sparse, sum(tensor.numel() for tensor in state.values()))
    state |= {"embed_tokens.weight": torch.zeros(1, config.hidden_size), "norm.weight": torch.zeros(config.hidden_size)}
    blocks, report = _load(decoder, config, state)
    if any(name.endswith(".experts.gate_up_proj") for name in report["missing_keys"]):
        blocks, report = _load(decoder, config, _stacked(state))
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            how = f", quantised by {str(method)[:40]!r}" if method else ""
            names = sorted(map(str, report[kind]))[:3]
            raise ValueError(f"its MTP layers{how} do not fit this target ({kind}: {names})")
    return blocks


def _load(decoder: Any, config: PretrainedConfig, state: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """A model of the target's class with this state, and what Transformers reports of its names."""
    try:
        return cast(
            "tuple[Any, dict[str, Any]]",
            type(decoder).from_pretrained(
                None,
                config=config,
                state_dict=dict(state),
                dtype=decoder.norm.weight.dtype,
                attn_implementation="sdpa",
                device_map={"": "meta"} if any(tensor.is_meta for tensor in state.values()) else None,
                output_loading_info=True,
            ),
        )
    except RuntimeError as error:
        raise ValueError(f"its MTP layers do not fit this target ({first_line(error)})") from None


def _stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with one tensor for all experts, which Transformers makes itself of most models' files."""
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    result = dict(state)
    for name in sorted(state, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if match := EXPERT.match(name):
            experts.setdefault(match[1], {}).setdefault(match[2], []).append(result.pop(name))
    for prefix, parts in experts.items():
        if parts.keys() != {"gate", "up", "down"} or len(set(map(len, parts.values()))) > 1:
            raise ValueError(
                f"{prefix} has { ({part: len(found) for part, found in parts.items()}) } matrices of experts"
            )
        gate, up, down = (torch.stack(parts[part]) for part in ("gate", "up", "down"))
        result |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    return result


def _own_config(decoder: Any, checkpoint: Checkpoint, num_layers: int, sparse: bool, held: int) -> PretrainedConfig:
    """The config of layers in the format of speculators: of the target's kind, and of numbers that the file holds."""
    own = checkpoint.config["transformer_layer_config"]
    fields = Fields(own if isinstance(own, dict) else {})
    further = type(decoder.config)().to_dict().keys()
    check_keys(checkpoint.config, MTP, further)
    check_target((name, fields.get(name), getattr(decoder.config, name)) for name in ("model_type", "hidden_size"))
    sizes = {"target_hidden_size": decoder.config.hidden_size, "draft_vocab_size": decoder.config.vocab_size}
    check_target((name, checkpoint.config.get(name), size) for name, size in sizes.items())
    try:
        config = layer_config(_of_first_layer(type(decoder.config)(**fields.values)), num_layers, sparse)
        with torch.device("meta"):
            needed = sum(parameter.numel() for parameter in type(decoder)(config).layers.parameters())
    except Exception as error:  # whatever Transformers raises for values that it cannot work with
        raise ValueError(f"transformer_layer_config cannot be used ({first_line(error)})") from None
    if needed > held:
        raise ValueError(f"config.json makes MTP layers of {needed:,} numbers, but the file holds {held:,}")
    return config


def _of_first_layer(config: PretrainedConfig) -> PretrainedConfig:
    """The config with the type of its first layer for the MTP layer, as in speculators.

    Of a hybrid model speculators takes a layer with full attention. Where the use of the window is off there is none.
    """
    first = (getattr(config, "layer_types", None) or [""])[0]
    if first == "sliding_attention" and getattr(config, "sliding_window", None) is not None:
        config.mtp_layer_types = [first]
    return config


def layer_config(config: PretrainedConfig, num_layers: int, sparse: bool) -> PretrainedConfig:
    """A target's config for its MTP layers only: experts in all of them or in none.

    Raises a `ValueError` for other layers than those with full attention, whose mask is the only one that is made.
    """
    result: Any = copy.deepcopy(config)
    result.num_hidden_layers = num_layers
    result.vocab_size = 1
    result.pad_token_id = None
    if getattr(result, "quantization_config", None) is not None:
        del result.quantization_config
    if getattr(config, "layer_types", None):
        result.layer_types = getattr(config, "mtp_layer_types", None) or ["full_attention"] * num_layers
    if layer_kinds(result) != {"full_attention"}:
        types = ", ".join(sorted(set(getattr(result, "layer_types", None) or layer_kinds(result))))
        raise ValueError(f"MTP layers of type {types} are not supported; use another strategy")
    changes = {
        "mlp_layer_types": ["sparse" if sparse else "dense"] * num_layers,
        "first_k_dense_replace": 0 if sparse else num_layers,
        "mlp_only_layers": [] if sparse else list(range(num_layers)),
        "decoder_sparse_step": 1,
        "per_layer_config": getattr(config, "mtp_per_layer_config", None),
    }
    for name, value in changes.items():
        if getattr(result, name, None) is not None:
            setattr(result, name, value)
    return cast(PretrainedConfig, result)
