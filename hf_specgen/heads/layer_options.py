"""Options of layers that change no tensor's shape: how much of a head is rotated, in which pairs, norms, values.

Options that a weight can express are folded into it when it is read, so that all layers compute the same:

| option | folded |
|---|---|
| channels (2i, 2i + 1) are a pair, in place of (i, i + r / 2) | queries, keys and their norms: order of rows |
| norms multiply by 1 + weight | 1 + weight |
| values are multiplied by a number | the output projection times that number |
"""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen.heads.checkpoint import Fields

PAIR_FLAGS = ("rope_is_neox_style", "is_neox_style")
QUERIES_KEYS = re.compile(r"\.self_attn\.[qk]_(proj\.(weight|bias)|norm\.weight)$")
NORM = re.compile(r"norm(\.\d+)?\.weight$")


@dataclass(frozen=True)
class FoldedOptions:
    """What is changed in the weights of a file for layers that know none of these options."""

    head_dim: int  # channels of an attention head
    rotated: int  # how many of the first ones are rotated
    neighbouring_pairs: bool = False  # channels (2i, 2i + 1) are rotated as a pair; else i and i + rotated / 2
    norms_add_one: bool = False  # the factor of a norm is 1 + weight
    value_scale: float = 1.0  # factor of the values

    def fold(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the layers need it; `name` is that in our modules."""
        if self.neighbouring_pairs and QUERIES_KEYS.search(name):
            heads = weight.unflatten(0, (-1, self.head_dim))
            even, odd = (heads[:, first : self.rotated : 2] for first in (0, 1))
            weight = torch.cat((even, odd, heads[:, self.rotated :]), dim=1).flatten(0, 1)
        if self.norms_add_one and NORM.search(name):
            weight = 1 + weight.float()
        if self.value_scale != 1.0 and name.endswith(".self_attn.o_proj.weight"):
            weight = weight.float() * self.value_scale
        return weight


def has_neighbouring_pairs(fields: Fields) -> bool:
    """Whether channels (2i, 2i + 1) are rotated as a pair, by the first of `PAIR_FLAGS` that the config has."""
    name = next((name for name in PAIR_FLAGS if fields.get(name) is not None), None)
    return name is not None and not fields.flag(name)


def with_neighbouring_pairs(head: Any) -> Any:
    """A copy of a head that rotates channels (2i, 2i + 1) as a pair; all other weights are shared."""
    size = head.config.layer.head_dim
    folded = FoldedOptions(size, 2 * len(head.rotary.inv_freq), neighbouring_pairs=True)
    parameters = dict(head.named_parameters())
    shared = {id(weight): weight for name, weight in parameters.items() if not QUERIES_KEYS.search(name)}
    other = copy.deepcopy(head, shared)
    for name, weight in other.named_parameters():
        weight.data = folded.fold(name, weight.data)
    return other


def rotates_neighbours(target: PreTrainedModel) -> bool:
    """Whether a target rotates channels (2i, 2i + 1) as a pair, by its config or the function of its module."""
    configured = getattr(target.config.get_text_config(), "rope_interleave", None)
    if configured is not None:
        return bool(configured)
    rotate: Any = getattr(sys.modules[type(target.get_decoder()).__module__], "rotate_half", None)
    return rotate is not None and rotate(torch.arange(4.0)).tolist() == [-1.0, 0.0, -3.0, 2.0]


def rotary_parameters(layers: Fields, head: Fields, head_dim: int) -> dict[str, Any]:
    """Rotary parameters in the form of Transformers 5, from the configs of the layers and of the head.

    By default the base is 10,000, as in EAGLE. They have `rope_dim` if fewer channels than `head_dim` are rotated.
    """
    rope = {name: value for part in ("rope_scaling", "rope_parameters") for name, value in _of_one_kind(layers, part)}
    rope_type = rope.pop("type", None)
    rope_type = rope.get("rope_type") or rope_type or "default"
    # The axes of "mrope" agree wherever there is only text.
    rope["rope_type"] = rope_type = "default" if rope_type == "mrope" else rope_type
    rope["rope_theta"] = Fields({**layers.values, **rope}, {"rope_theta": 10000.0}).number("rope_theta")
    if rope_type != "proportional":
        width = _rotated_channels(Fields(rope), layers, head, head_dim)
        rope["rope_dim"] = None if width == head_dim else width
        rope["partial_rotary_factor"] = None
    return {name: value for name, value in rope.items() if value is not None and not name.startswith("mrope_")}


def _of_one_kind(layers: Fields, name: str) -> Any:
    """The items of rotary parameters; of those by layer type the ones of sliding layers, which speculators uses."""
    rope = layers.nested(name)
    kinds = [kind for kind in ("sliding_attention", "full_attention") if rope.get(kind) is not None]
    return (rope.nested(kinds[0]) if kinds else rope).values.items()


def _rotated_channels(rope: Fields, layers: Fields, head: Fields, head_dim: int) -> int:
    """How many of the first channels of an attention head are rotated.

    This is `rope_dim`, or else `head_dim` times a `partial_rotary_factor`; all channels if neither is read. A factor

    - among the rotary parameters is read if their type is not "default". Transformers' layers of Llama and Qwen3 ignore
      it with "default" too; most heads have it only because it was copied from a target such as Qwen3.5.
    - of the layers, or else of the head, is read in heads of MiMo; in other heads if the rotary parameters have no
      factor, and either their type is not "default", or the head has a `dflash_config`, as SGLang reads it, and no
      `mrope_section` that was copied from a target.
    """
    if (width := rope.optional_integer("rope_dim", 2)) is None:
        top = layers if layers.get("partial_rotary_factor") is not None else head
        inside = rope.get("partial_rotary_factor") is not None
        is_scaled = rope.get("rope_type") != "default"
        is_mimo = head.get("attention_value_scale") is not None or head.get("attention_sink_bias") is not None
        copied = inside or rope.get("mrope_section") is not None
        counts = is_scaled or is_mimo or (head.get("dflash_config") is not None and not copied)
        factor = 1.0
        if counts and top.get("partial_rotary_factor") is not None and (is_mimo or not inside):
            factor = top.number("partial_rotary_factor")
        elif is_scaled and inside:
            factor = rope.number("partial_rotary_factor")
        width = int(head_dim * factor)
    if width % 2 or not 2 <= width <= head_dim:
        raise ValueError(f"{width} of {head_dim} channels of a head cannot be rotated; it has to be an even number")
    return width
