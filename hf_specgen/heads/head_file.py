"""A draft head's checkpoint as the loader of its format reads it: fields of the config, tensors, the finished head.

A format is one function that reads a `HeadFile`, and an entry in the table of `hf_specgen.heads.head_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_specgen.heads.base import DraftHead, HeadConfig
from hf_specgen.heads.checkpoint import Checkpoint, Fields, Names, TensorInfo, first_line
from hf_specgen.heads.layers import LayerConfig, count_layers, layer_fields, read_layer

IGNORED = re.compile(r"^(d2t|t2d|verifier_(norm|lm_head)\.weight|.*\.inv_freq)$")
"""Read separately, derived from another tensor, or belonging to the target."""
LAYER_FIELDS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_aux_hidden_state_layer_ids",), 0),  # speculators, vLLM (eagle3, peagle)
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 1),  # SGLang, SpecForge, ModelOpt
    (("aux_hidden_state_layer_ids",), 0),  # speculators (dflash)
    (("dflash_config", "target_layer_ids"), 1),  # z-lab DFlash, JetSpec
    (("target_layer_ids",), 1),  # DeepSpec
)
"""Fields of config.json that name layers of the target, and what to add to their numbers.

Transformers counts `hidden_states`: index 0 is the embedding, index i the output of layer i - 1, and the last index the
state after the final norm. A wrong index never changes the generated text, but fewer draft tokens are accepted.
"""
RENAMED = (
    (re.compile(r"^midlayer\."), "layers.0."),  # EAGLE-3
    (re.compile(r"^logit_head\."), ""),  # early block heads of SpecForge
    (re.compile(r"^((?:markov_w1|markov_w2|gate_proj|joint_proj)\.)"), r"markov_head.\1"),  # ModelOpt
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),  # ModelOpt
    (re.compile(r"codebook\.weight$"), "codebook"),  # DFlash2
)
"""Patterns of names in files, with those in our modules."""
MASK_TOKEN_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
Head = TypeVar("Head", bound=DraftHead)


class HeadFile:
    """A checkpoint that holds a draft head.

    Args:
        checkpoint: its config, and the shapes of its tensors.
        dtype: of the head; None for that of the file.

    Attributes:
        fields: the config, with the fields in its `dflash_config`.
        kind: its type in the format of speculators; None in every other one.
        is_nested: whether it describes the layers in a config of their own, as speculators does.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None):
        self.checkpoint, self._dtype = checkpoint, dtype
        of_block = Fields(checkpoint.config).nested("dflash_config").values
        self.fields = Fields(checkpoint.config | {name: value for name, value in of_block.items() if value is not None})
        self.kind = speculators_type(checkpoint)
        self.is_nested = "transformer_layer_config" in checkpoint.config

    @cached_property
    def names(self) -> Names:
        """The tensors by the names in our modules, each with its name in the file."""
        names = {name: name for name in self.tensors if not IGNORED.match(name)}
        for pattern, ours in RENAMED:
            names = {pattern.sub(ours, name): theirs for name, theirs in names.items()}
        return names

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of all tensors of the file."""
        return self.checkpoint.tensors

    def has(self, *names: str) -> bool:
        """Whether there are tensors of these names in our modules."""
        return self.names.keys() >= set(names)

    def matrix(self, name: str) -> tuple[int, ...]:
        """The shape of a matrix, by its name in our modules; raises `ValueError` if there is none."""
        if name not in self.names:
            raise ValueError(f"the tensor {name} is missing")
        shape = self.tensors[self.names[name]].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"tensor {self.names[name]} must be a matrix, but has shape {shape}")
        return shape

    @cached_property
    def of_layers(self) -> Fields:
        """The config of the layers, with the defaults of their model type."""
        nested = self.fields.nested("transformer_layer_config").values
        return layer_fields(nested if self.is_nested else self.checkpoint.config)

    @cached_property
    def num_layers(self) -> int:
        """The number of layers."""
        return count_layers(self.of_layers, self.names)

    def layer(self) -> LayerConfig:
        """The configuration of the layers."""
        queries, keys = (self.matrix(f"layers.0.self_attn.{part}_proj.weight")[0] for part in "qk")
        return read_layer(self.of_layers, self.names, queries, keys)

    def common(self, layer: LayerConfig, projects: bool = True) -> dict[str, Any]:
        """The fields of `HeadConfig`; `projects` says whether a linear layer reads the target's states."""
        fields, hidden = self.fields, layer.hidden_size
        target_hidden = fields.optional_integer("target_hidden_size", 1) or hidden
        vocab, draft_vocab = self.of_layers.integer("vocab_size"), fields.optional_integer("draft_vocab_size", 1)
        if draft_vocab is None:
            draft_vocab = self.tensors["d2t"].shape[0] if "d2t" in self.tensors and self.tensors["d2t"].shape else vocab
        verifier = fields.nested("speculators_config").nested("verifier")
        scales = layer.is_gemma and "embed_tokens.weight" in self.tensors
        caps = layer.is_gemma and self.of_layers.get("final_logit_softcapping") is not None
        return {
            "hidden_size": hidden,
            "vocab_size": vocab,
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": target_hidden,
            "num_aux_hidden_states": max(1, self.matrix("fc.weight")[1] // target_hidden) if projects else 1,
            "aux_hidden_state_layers": configured_layers(self.checkpoint.config),
            "own_embeddings": "embed_tokens.weight" in self.tensors,
            "own_lm_head": "lm_head.weight" in self.tensors,
            "speculative_tokens": self.speculative_tokens(),
            "trained_length": fields.optional_integer("trained_length", 1),
            "base_model": verifier.text("name_or_path") if verifier.get("name_or_path") else None,
            "input_embedding_scale": hidden**0.5 if scales else 1.0,
            "final_logit_softcapping": self.of_layers.number("final_logit_softcapping") if caps else None,
        }

    def speculative_tokens(self) -> int | None:
        """The number of draft tokens that a speculators config recommends."""
        methods = self.fields.nested("speculators_config").get("proposal_methods")
        if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
            return None
        return Fields(methods[0]).optional_integer("speculative_tokens", 1)

    def mask_token(self) -> int:
        """The token that stands for positions that are predicted in parallel."""
        for name in MASK_TOKEN_FIELDS:
            if self.fields.get(name) is not None:
                return self.fields.integer(name, 0)
        raise ValueError(f"the head predicts positions in parallel, but config.json has no {MASK_TOKEN_FIELDS[0]}")

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors of another file, by their names in our modules."""
        added = {name: TensorInfo.of(tensor, Path(str(self.checkpoint.source))) for name, tensor in tensors.items()}
        self.checkpoint = replace(self.checkpoint, tensors={**self.tensors, **added})
        self.names |= {name: name for name in added}

    def build(self, head_class: Callable[[Any], Head], config: HeadConfig) -> Head:
        """The head with its tensors, each of which is read when its name, shape and dtype are known to be right."""
        try:
            with torch.device("meta"):
                head = head_class(config)
        except Exception as error:  # such as an overflow of the sizes, or whatever Transformers raises
            raise ValueError(f"config.json describes a head that cannot be built ({first_line(error)})") from None
        expected = {name: tensor for name, tensor in head.state_dict().items() if name != "draft_to_target"}
        self._check_names(expected.keys())
        membership = self.tensors.get("t2d")
        if membership is not None and membership.shape != (config.vocab_size,):
            raise ValueError(f"t2d has shape {membership.shape}, but config.json has vocab_size {config.vocab_size}")
        ids = None if head.draft_to_target is None else self._draft_to_target(config)
        files = {name: self.tensors[self.names[name]] for name in expected}
        dtype = self._dtype or next((one.dtype for one in files.values() if one.dtype.is_floating_point), torch.float32)
        state = {} if ids is None else {"draft_to_target": ids}
        for name, tensor in expected.items():
            info = files[name]
            is_whole = ids is not None and len(tensor) == len(ids) and info.shape[:1] == (config.vocab_size,)
            shape = (*tensor.shape[:1], *info.shape[1:]) if is_whole else info.shape
            check_tensor(self.names[name], shape, info.dtype, tensor)
            found = info.read()[ids] if is_whole else info.read()
            state[name] = found.to(dtype if tensor.is_floating_point() else tensor.dtype).reshape(tensor.shape)
        head.load_state_dict(state, assign=True)
        return head.eval().requires_grad_(False)

    def _check_names(self, expected: Set[str]) -> None:
        """Raise unless the file has these tensors, and no others."""
        missing, unknown = sorted(expected - self.names.keys()), sorted(self.names.keys() - expected - {"token_map"})
        quantised = missing and self.fields.nested("quantization_config").get("quant_method")
        if quantised:  # some configs have that of the target, though the head is not quantised
            raise ValueError(
                f"the head is quantised by {str(quantised)[:40]!r}, which is not read; load one that is not"
            )
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing, such as {', '.join(missing[:3])}; download it again")
        if unknown:
            names = ", ".join(self.names[name] for name in unknown[:3])
            raise ValueError(
                f"a head with this config.json has no tensors such as {names} ({len(unknown)} in all); it is of a "
                "variant that is not supported"
            )

    def _draft_to_target(self, config: HeadConfig) -> torch.Tensor:
        """The target's id of each draft id: vLLM's `token_map`, or from the differences of both in `d2t`."""
        name = "token_map" if "token_map" in self.tensors else "d2t"
        info, size = self.tensors.get(name), config.draft_vocab_size
        if info is None or info.shape != (size,) or info.dtype not in (torch.int64, torch.int32):
            description = "none" if info is None else f"one of shape {info.shape} and dtype {info.dtype}"
            raise ValueError(
                f"a draft vocabulary of {size} tokens needs an integer tensor {name} of that size, found {description}"
            )
        ids = self.checkpoint.read([name])[name].long()
        ids = ids + torch.arange(size) if name == "d2t" else ids
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise ValueError(
                f"{name} maps draft tokens to ids outside of the target's vocabulary of {config.vocab_size}"
            )
        return ids


def check_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: torch.Tensor) -> None:
    """Raise unless a tensor of the file has the expected dtype, and its shape apart from dimensions of size 1."""
    if [size for size in shape if size != 1] != [size for size in expected.shape if size != 1]:
        raise ValueError(f"tensor {name} has shape {shape}, but config.json makes it {tuple(expected.shape)}")
    if expected.is_floating_point() and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"tensor {name} has dtype {dtype}; quantised heads are not supported")
    if not expected.is_floating_point() and dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tensor {name} has dtype {dtype}, but it holds token ids")


def configured_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The `hidden_states` indices that a head's config.json names, or None if it leaves them to the default."""
    layers: dict[str, tuple[int, ...]] = {}
    for path, offset in LAYER_FIELDS:
        ids: Any = config
        for key in path:
            ids = ids.get(key) if isinstance(ids, Mapping) else None
        if ids is None:
            continue
        name = ".".join(path)
        # Where ids count outputs of layers, -1 is the embedding.
        if not isinstance(ids, list) or not ids or not all(type(entry) is int and entry >= -offset for entry in ids):
            raise ValueError(f"{name} must be a list of layer numbers, got {str(ids)[:80]!r}")
        layers[name] = tuple(entry + offset for entry in ids)
    if len(set(layers.values())) > 1:
        raise ValueError(f"config.json names the target's layers twice, and differently: {layers}; remove one of them")
    return next(iter(layers.values()), None)


def speculators_type(checkpoint: Checkpoint) -> str | None:
    """The type of a checkpoint in the format of speculators; None for every other one."""
    name = checkpoint.config.get("speculators_model_type")
    return str(name) if name is not None else None
