"""Heads that read several of the target's hidden states, EAGLE and block heads: arguments, new heads, LoRA, saving."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from arguments import Arguments, Options, option, public
from conversations import IGNORED
from drafter import Drafter, with_lora
from hf_specgen.heads.base import BoundHead, DraftHead
from hf_specgen.heads.export import save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.targets.model_parts import decoder_layers, output_matrix
from target import whole

NEW_WEIGHT_FACTOR = 0.1
"""Factor on the random weights beside copied ones, so that a new head begins close to the copied layer."""
NORM_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
"""Names of the epsilon of norms in configs."""


@dataclass(kw_only=True)
class HeadArguments(Arguments):
    """Arguments of every head that reads several of the target's hidden states."""

    head: str | None = option(default=None, help="folder or Hub id of a head to continue with, instead of a new one")
    lora: Options | None = option(default=None, help="fields of PEFT's LoraConfig: an adapter on `head`")
    aux_hidden_state_layers: list[int] = option(
        default_factory=list, help="hidden_states of the target to read; none: format's default"
    )
    layers: list[int] = option(default_factory=list, help="a new head's layers: copies of these layers of the target")
    anchors: int = option(default=512, help="positions of each row from which drafts start in a step, at random")
    depth: int = option(default=7, help="draft tokens that the head learns to propose from each position")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None and self.head is None:
            raise ValueError("lora trains an adapter on an existing head; give it as --head")


class HeadDrafter(Drafter):
    """A head in training."""

    head_class: ClassVar[type[DraftHead]]
    args: HeadArguments

    def __init__(self, args: HeadArguments, target: PreTrainedModel, rows: Any):
        super().__init__(args, target, rows)
        self.depth = args.depth
        head = self.new_head(target, rows) if args.head is None else self.loaded_head(args.head)
        if not isinstance(head, self.head_class):
            raise ValueError(f"{args.head!r} is a {type(head).__name__}, not a {self.head_class.__name__}")
        head.config = replace(head.config, trained_length=args.max_length)
        head.requires_grad_(True)
        for frozen in (head.lm_head, head.embed_tokens):
            if frozen is not None:
                frozen.requires_grad_(False)
        self.adapted = _with_lora(head, args) if args.lora is not None else None
        self.head: Any = head.to(output_matrix(target).weight.device)
        self.layers = head.bind(target).aux_hidden_state_layers
        self.copied = () if args.head else self.sources(target)

    @classmethod
    def check(cls, args: Any, target: PreTrainedModel) -> None:
        layer, embeddings = new_layer(target), cast(Any, target.get_input_embeddings())
        if {output_matrix(target).weight.shape[1], embeddings.weight.shape[1]} != {layer.hidden_size}:
            raise ValueError(
                f"{type(target).__name__} has embeddings or an output matrix of another width than its hidden states, "
                f"{layer.hidden_size}, which a draft head shares"
            )
        count = len(decoder_layers(target))
        if not all(0 <= source < count for source in args.layers):
            raise ValueError(f"layers must be from 0 to {count - 1}, got {args.layers}")
        if not all(0 <= state <= count for state in args.aux_hidden_state_layers):
            raise ValueError(f"aux_hidden_state_layers must be from 0 to {count}, got {args.aux_hidden_state_layers}")

    @abstractmethod
    def new_config(self, target: PreTrainedModel, rows: Any) -> Any:
        """The config of a new head."""

    def first_state(self, states: Sequence[int], layer: int) -> int:
        """Which of the states a new head reads first; `layer`: of the target, that its first layer is a copy of."""
        return len(states) - 1

    def new_head(self, target: PreTrainedModel, rows: Any) -> Any:
        """A new head in float32, which starts from layers of the target."""
        head: Any = self.head_class(self.new_config(target, rows))
        sources = self.sources(target)
        copy_layers(list(head.layers), target, sources)
        start_from_state(head.fc, self.first_state(head.config.aux_hidden_state_layers, sources[0]))
        return head

    def loaded_head(self, name: str) -> DraftHead:
        """The head to continue with, in float32."""
        return load_head(name, dtype=torch.float32)

    def sources(self, target: PreTrainedModel) -> list[int]:
        """The layers of the target that a new head starts from; without arguments the last one."""
        return self.args.layers or [len(decoder_layers(target)) - 1]

    def common_config(self, target: PreTrainedModel, default: Sequence[int]) -> dict[str, Any]:
        """Fields of the config of every new head; `default`: states to read, as far as the target has as many."""
        vocab, hidden = output_matrix(target).weight.shape
        layers = len(decoder_layers(target))
        states = self.args.aux_hidden_state_layers or dict.fromkeys(min(max(state, 1), layers) for state in default)
        return {
            "hidden_size": hidden,
            "vocab_size": vocab,
            "draft_vocab_size": vocab,
            "target_hidden_size": hidden,
            "num_aux_hidden_states": len(states),
            "aux_hidden_state_layers": tuple(states),
            "speculative_tokens": self.args.depth,
            "base_model": public(self.args.target),
            "num_target_layers": layers,
            "trained_length": self.args.max_length,
        }

    def bound(self) -> BoundHead:
        """The head on the target."""
        return self.head.bind(self.target)

    def save(self, folder: Path) -> None:
        if self.adapted is not None:
            self.adapted.save_pretrained(folder, save_embedding_layers=False)
        else:
            save_head(copy.deepcopy(self.head).to(torch.bfloat16), folder)


def _with_lora(head: DraftHead, args: HeadArguments) -> Any:
    """The `PeftModel` around a head, with LoRA matrices on its linear layers."""
    names = [name for name, module in head.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    adapted = with_lora(head, cast(Options, args.lora), target_modules=names)
    others = [name for name, one in adapted.named_parameters() if one.requires_grad and ".lora_" not in name]
    if others:
        raise ValueError(f"lora of a head cannot train {others[0]}; leave out modules_to_save and bias")
    adapted.peft_config["default"].base_model_name_or_path = args.head
    return adapted


def new_layer(target: PreTrainedModel, *, qk_norm: bool = False) -> LayerConfig:
    """A layer of the sizes of the target's own, whatever its architecture; the kind of layer is Llama's.

    Its activation is SiLU for every target, the only one that other programs have for such layers.
    """
    config = target.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads, width = getattr(config, "num_key_value_heads", None), getattr(config, "intermediate_size", None)
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=width if isinstance(width, int) else 64 * -(-8 * hidden // (3 * 64)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads if isinstance(kv_heads, int) and kv_heads else heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        rms_norm_eps=next((value for name in NORM_EPS if (value := getattr(config, name, None))), 1e-6),
        qk_norm=qk_norm,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
        rope_parameters=_rope(getattr(config, "rope_parameters", None) or {}),
    )


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a target for whole heads; base 10,000 where it has none."""
    if nested := [value for value in parameters.values() if isinstance(value, dict)]:
        parameters = parameters.get("full_attention") or nested[0]
    kind = parameters.get("rope_type", "default")
    known = kind in ROPE_INIT_FUNCTIONS and kind != "proportional"
    rope = {name: value for name, value in parameters.items() if known and value is not None}
    return {**rope, "rope_type": kind if known else "default", "rope_theta": parameters.get("rope_theta") or 10000.0}


@torch.no_grad()
def copy_layers(layers: Sequence[nn.Module], target: PreTrainedModel, sources: Sequence[int]) -> None:
    """Start the head's layers as copies of layers of the target, as far as names and shapes are the same.

    In the first layer of EAGLE-3, whose attention reads the token beside the state, the queries' copy reads the token
    and that of keys and values the states; the other halves start small. So a layer that finds where the current token
    stood before (an induction head) does the same in the head.
    """
    for layer, source in zip(layers, sources, strict=True):
        known = _weights_of(decoder_layers(target)[source])
        if any(tensor.is_meta for tensor in known.values()):
            raise ValueError(
                f"the folder of states does not have layer {source}; train without --features, or with another"
            )
        for name, parameter in layer.named_parameters():
            copied = known.get(name)
            if copied is None or copied.shape[0] != parameter.shape[0]:
                continue
            copied = copied.to(parameter)
            if copied.shape == parameter.shape:
                parameter.copy_(copied)
            elif "self_attn" in name:
                parameter.mul_(NEW_WEIGHT_FACTOR)
                half = slice(None, copied.shape[1]) if "q_proj" in name else slice(-copied.shape[1], None)
                parameter[:, half] = copied


def _weights_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a layer by their names in heads; norms are RMS norms by their factors, others are left out.

    A norm has the factors that it applies to ones, also where its weight is their difference from one (Gemma).
    """
    known = {name: whole(tensor) for name, tensor in layer.state_dict().items()}
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"):
        weight, norm = known.pop(f"{name}.weight", None), getattr(layer, name, None)
        if weight is not None and norm is not None and not isinstance(norm, nn.LayerNorm):
            weights = {"weight": weight}
            known[f"{name}.weight"] = torch.func.functional_call(norm, weights, torch.ones_like(weight))
    # Where there is a norm before the MLP of its own, the one of this name is applied to the attention's output.
    renamed = {"hidden_norm": "input_layernorm", "post_attention_layernorm": "pre_feedforward_layernorm"}
    found = {f"{new}.weight": known[f"{old}.weight"] for new, old in renamed.items() if f"{old}.weight" in known}
    return known | found


@torch.no_grad()
def start_from_state(fc: nn.Linear, place: int) -> None:
    """Start the projection of the features as one of the concatenated states, with little of the others."""
    width = fc.out_features
    fc.weight.mul_(NEW_WEIGHT_FACTOR)
    fc.weight[:, place * width : (place + 1) * width] += torch.eye(width, device=fc.weight.device)


def frequent_tokens(rows: Any, count: int, vocab: int) -> torch.Tensor:
    """`[count]` ids of the most frequent tokens of the answers, in ascending order."""
    if count >= vocab:
        return torch.arange(vocab)
    seen = Counter(dict.fromkeys(range(vocab), 0))
    for row in rows:
        seen.update(token for token in row["labels"] if token != IGNORED)
    return torch.tensor(sorted(token for token, _ in seen.most_common(count)))
