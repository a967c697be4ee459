"""A draft head's checkpoint as the loader of its format reads it: fields of the config, tensors, the finished head.

A format is one function that reads a `HeadFile`, and an entry in the table of `hf_specgen.heads.head_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import DeepseekV3Config, Gemma4TextConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from hf_specgen.heads.base import DraftHead, HeadConfig
from hf_specgen.heads.checkpoint import Checkpoint, Fields, TensorInfo
from hf_specgen.heads.config_keys import HEAD, MASK_TOKEN_FIELDS, check_keys, merged_fields
from hf_specgen.heads.layer_options import PAIR_FLAGS, FoldedOptions, has_neighbouring_pairs, rotary_parameters
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.heads.source import first_line

GEMMA = ("gemma4_text", "gemma4_unified_text")
MODEL_TYPES: Mapping[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    **dict.fromkeys(GEMMA, Gemma4TextConfig),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), DeepseekV3Config),
}
LAYER_NAME = re.compile(r"^layers\.(\d{1,6})\.")
LAYER_FIELDS = {
    "eagle_aux_hidden_state_layer_ids": 0,  # speculators, vLLM (eagle3, peagle)
    "eagle_config.eagle_aux_hidden_state_layer_ids": 1,  # SGLang, SpecForge, ModelOpt
    "aux_hidden_state_layer_ids": 0,  # speculators (dflash)
    "dflash_config.target_layer_ids": 1,  # z-lab DFlash, JetSpec
    "target_layer_ids": 1,  # DeepSpec
    "dspark_config.target_layer_ids": 1,
    "dspark_target_layer_ids": 1,  # MiniMax-M3
}
"""Fields of config.json that name layers of the target, and what to add to their numbers.

Transformers counts `hidden_states`: index 0 is the embedding, index i the output of layer i - 1, and the last index the
state after the final norm. A wrong index never changes the generated text, but fewer draft tokens are accepted.
"""
IGNORED = re.compile(r"^(verifier_(norm|lm_head)\.weight|.*\.inv_freq)$")
"""Tensors that are derived from others, or belong to the target."""
SINKS = "self_attn.attention_sink_bias"
TOKEN_MAPS = {"d2t", "t2d", "token_map"}
"""Tensors that describe the draft vocabulary."""
RENAMED = (
    (re.compile(r"^language_model\.model\.dspark\."), ""),  # inside a MiniMax-M3 checkpoint
    (re.compile(r"\.decoder_layer\."), "."),
    (re.compile(r"^final_norm\."), "norm."),
    (re.compile(r"^midlayer\."), "layers.0."),  # EAGLE-3
    (re.compile(r"^logit_head\."), ""),  # early block heads of SpecForge
    (re.compile(r"^encoder\.fc\."), "fc."),  # block heads in the native layout of SGLang
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^((?:markov_w1|markov_w2|gate_proj|joint_proj)\.)"), r"markov_head.\1"),  # ModelOpt
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),  # ModelOpt
    (re.compile(r"codebook\.weight$"), "codebook"),  # DFlash2
    (re.compile(r"^(?:medusa_heads?\.)?(\d{1,6})\.(\d{1,6})\.linear\."), r"blocks.\1.layers.\2."),  # Medusa v1, v2, TGI
    (re.compile(r"^(?:medusa_heads?\.)?(?:lm_heads\.)?(\d{1,6})(?:\.\d{1,6})?\.weight$"), r"lm_heads.\1.weight"),
    (re.compile(r"^medusa_heads\.(?=blocks\.)"), ""),  # vLLM
)
"""Patterns of names in files, with those in our modules."""
Head = TypeVar("Head", bound=DraftHead)


class HeadFile:
    """A checkpoint that holds a draft head.

    Args:
        checkpoint: its config, and the shapes of its tensors.
        dtype: of the head; None for that of the file.
        keys: which the loader of its format reads in the config beside those of the layers.

    Attributes:
        fields: the config, with the fields in its `dflash_config` and the like.
        tensors: by their names in our modules; loaders rename them, and add others.
        kind: its type in the format of speculators; None in every other one.
        is_nested: whether it describes the layers in a config of their own, as speculators does.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None, keys: Set[str] = HEAD):
        self.checkpoint = checkpoint
        self._keys = keys
        self._dtype = dtype
        self.fields = Fields(merged_fields(checkpoint.config))
        self._folded: FoldedOptions | None = None
        self.kind = speculators_type(checkpoint)
        self.is_nested = "transformer_layer_config" in checkpoint.config
        self.tensors = {_our_name(name): info for name, info in checkpoint.tensors.items() if not IGNORED.match(name)}

    def has(self, *names: str) -> bool:
        """Whether there are tensors of these names in our modules."""
        return self.tensors.keys() >= set(names)

    def matrix(self, name: str) -> tuple[int, ...]:
        """The shape of a matrix, by its name in our modules; raises `ValueError` if there is none."""
        if name not in self.tensors:
            raise ValueError(f"the tensor {name} is missing")
        shape = self.tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"tensor {self.tensors[name].name} must be a matrix, but has shape {shape}")
        return shape

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors that are not in the file, by their names in our modules."""
        folder = Path(str(self.checkpoint.source))
        self.tensors |= {name: TensorInfo.of(name, tensor, folder) for name, tensor in tensors.items()}

    @cached_property
    def of_layers(self) -> Fields:
        """The config of the layers, with the defaults of their model type, which files may leave out."""
        values = self.fields.nested("transformer_layer_config").values if self.is_nested else self.checkpoint.config
        model_type = values.get("model_type") or "llama"
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            raise ValueError(
                f"draft layers of model_type {str(model_type)[:60]!r} are not supported, only {', '.join(MODEL_TYPES)}"
            )
        fields = Fields(values, MODEL_TYPES[model_type]().to_dict())
        return _gemma_fields(fields) if model_type in GEMMA else fields

    @cached_property
    def num_layers(self) -> int:
        """The number of layers."""
        return count_layers(self.of_layers, self.tensors)

    def layer(self) -> LayerConfig:
        """The configuration of the layers.

        The tensors say which biases there are: programs do not agree on what `attention_bias` stands for.
        """
        fields, has = self.of_layers, lambda name: self.has(f"layers.0.{name}")
        sizes = ("num_attention_heads", "hidden_size", "intermediate_size", "max_position_embeddings")
        options: dict[str, Any] = {name: fields.integer(name) for name in sizes}
        heads = options["num_attention_heads"]
        is_latent = has("self_attn.kv_b_proj.weight")
        options |= self._latent_sizes(heads) if is_latent else self._grouped_sizes(heads, options["hidden_size"])
        is_gemma = fields.values.get("model_type") in GEMMA
        activation = fields.text("hidden_act")
        if activation == "swigluoai":
            activation = "silu"  # with a slope and a limit
            options |= {name: fields.number(name) for name in ("swiglu_alpha", "swiglu_limit")}
        return LayerConfig(
            **options,
            rms_norm_eps=fields.number("rms_norm_eps"),
            hidden_act=activation,
            qkv_bias=has("self_attn.q_proj.bias"),
            output_bias=has("self_attn.o_proj.bias"),
            mlp_bias=has("mlp.gate_proj.bias"),
            qk_norm=fields.values.get("model_type") == "qwen3" or has("self_attn.q_norm.weight"),
            is_gemma=is_gemma,
            values_are_keys=is_gemma and fields.flag("attention_k_eq_v"),
            **self._layer_options(options["head_dim"], heads, is_latent),
        )

    def _grouped_sizes(self, heads: int, hidden_size: int) -> dict[str, int]:
        """The sizes of grouped-query attention."""
        configured = Fields(self.of_layers.values)
        query_rows, key_rows = (self.matrix(f"layers.0.self_attn.{part}_proj.weight")[0] for part in "qk")
        head_dim = query_rows // heads
        if query_rows != hidden_size:  # else EAGLE ignores the configured size, and divides the hidden size
            head_dim = configured.optional_integer("head_dim") or head_dim
        if heads * head_dim != query_rows:
            rows = f"there are {query_rows} rows"
            raise ValueError(f"config.json has {heads} attention heads of size {head_dim}, but {rows}")
        kv_heads = configured.optional_integer("num_key_value_heads", 1) or key_rows // head_dim
        return {"num_key_value_heads": kv_heads, "head_dim": head_dim}

    def _latent_sizes(self, heads: int) -> dict[str, Any]:
        """The options of multi-head latent attention: sizes by the tensors, which config.json has to confirm."""
        shape = lambda name: self.matrix(f"layers.0.self_attn.{name}.weight")  # noqa: E731
        has_query_latent = self.has("layers.0.self_attn.q_a_proj.weight")
        latent = shape("kv_b_proj")[1]
        rope = shape("kv_a_proj_with_mqa")[0] - latent
        nope = shape("q_b_proj" if has_query_latent else "q_proj")[0] // heads - rope
        sizes: dict[str, Any] = {
            "kv_lora_rank": latent,
            "q_lora_rank": shape("q_a_proj")[0] if has_query_latent else 0,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": nope,
            "v_head_dim": shape("kv_b_proj")[0] // heads - nope,
        }
        fields = Fields(self.of_layers.values, {"rope_interleave": True} | sizes)
        for name, size in sizes.items():
            if (configured := fields.get(name)) != size:
                raise ValueError(f"config.json has {name} {configured!r:.40}, but the tensors make it {size}")
        options = {"rope_interleave": fields.flag("rope_interleave"), "output_gate": fields.flag("mla_use_output_gate")}
        return sizes | options | {"num_key_value_heads": heads, "head_dim": rope}

    def _layer_options(self, head_dim: int, heads: int, is_latent: bool) -> dict[str, Any]:
        """The fields of `LayerConfig` that change no shape; others are folded into the weights."""
        configured = Fields(self.of_layers.values)
        settings = Fields({**configured.values, **self.fields.values}, {"attention_value_scale": 1.0})
        rope = rotary_parameters(configured, self.fields, head_dim)
        if is_latent and ("rope_dim" in rope or any(settings.get(name) for name in PAIR_FLAGS)):
            raise ValueError(f"latent attention with these rotary parameters is not supported: {rope}, {PAIR_FLAGS[0]}")
        self._folded = FoldedOptions(
            head_dim=head_dim,
            rotated=rope.get("rope_dim", head_dim),
            neighbouring_pairs=has_neighbouring_pairs(settings) and not is_latent,
            norms_add_one=settings.flag("use_gemma_norm"),
            value_scale=settings.number("attention_value_scale"),
        )
        in_tensors = any(name.endswith(SINKS) for name in self.tensors)
        if in_tensors:  # layers without them have ones that change nothing
            names = {f"layers.{index}.{SINKS}" for index in range(self.num_layers)} - self.tensors.keys()
            self.add({name: torch.full((heads,), -torch.inf) for name in names})
        return {"rope_parameters": rope, "attention_sinks": in_tensors or settings.flag("attention_sink_bias")}

    def common(self, projects: bool = True) -> dict[str, Any]:
        """The configuration of the layers and the fields of `HeadConfig`.

        `projects` says whether a linear layer reads the target's states.
        """
        fields = self.fields
        layer = self.layer()
        hidden = layer.hidden_size
        vocab = self.of_layers.integer("vocab_size")
        target_hidden = fields.optional_integer("target_hidden_size", 1) or hidden
        draft_vocab = fields.optional_integer("draft_vocab_size", 1)
        if draft_vocab is None:
            draft_vocab = (*self.tensors["d2t"].shape, vocab)[0] if self.has("d2t") else vocab
        scales = layer.is_gemma and self.has("embed_tokens.weight")
        own = Fields(fields.values, {"output_multiplier": 1.0, "logit_scale": 1.0, "input_embedding_scale": 1.0})
        capped = self.of_layers if layer.is_gemma else fields
        caps = capped.get("final_logit_softcapping") is not None
        return {
            "layer": layer,
            "hidden_size": hidden,
            "vocab_size": vocab,
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": target_hidden,
            "num_aux_hidden_states": max(1, self.matrix("fc.weight")[1] // target_hidden) if projects else 1,
            "aux_hidden_state_layers": configured_layers(self.checkpoint.config),
            "own_embeddings": self.has("embed_tokens.weight"),
            "own_lm_head": self.has("lm_head.weight"),
            "speculative_tokens": self.speculative_tokens(),
            "trained_length": fields.optional_integer("trained_length", 1),
            "num_target_layers": fields.optional_integer("num_target_layers", 1),
            "base_model": fields.nested("speculators_config").nested("verifier").text("name_or_path") or None,
            "input_embedding_scale": hidden**0.5 if scales else own.number("input_embedding_scale"),
            "output_multiplier": own.number("output_multiplier") * own.number("logit_scale"),
            "final_logit_softcapping": capped.number("final_logit_softcapping") if caps else None,
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

    def build(self, head_class: Callable[[Any], Head], config: HeadConfig) -> Head:
        """The head with its tensors, each of which is read when its name, shape and dtype are known to be right."""
        check_keys(self.checkpoint.config, self._keys)
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
        dtypes = (self.tensors[name].dtype for name in expected)
        dtype = self._dtype or next((one for one in dtypes if one.is_floating_point), torch.float32)
        state = {} if ids is None else {"draft_to_target": ids}
        for name, tensor in expected.items():
            info = self.tensors[name]
            is_whole = ids is not None and len(tensor) == len(ids) and info.shape[:1] == (config.vocab_size,)
            shape = (*tensor.shape[:1], *info.shape[1:]) if is_whole else info.shape
            check_tensor(info.name, shape, info.dtype, tensor)
            found = info.read()[ids] if is_whole else info.read()
            found = found if self._folded is None else self._folded.fold(name, found)
            state[name] = found.to(dtype if tensor.is_floating_point() else tensor.dtype).reshape(tensor.shape)
        head.load_state_dict(state, assign=True)
        return head.eval().requires_grad_(False)

    def _check_names(self, expected: Set[str]) -> None:
        """Raise unless the file has these tensors, and no others."""
        missing = sorted(expected - self.tensors.keys())
        unknown = sorted(self.tensors.keys() - expected - TOKEN_MAPS)
        quantised = missing and self.fields.nested("quantization_config").get("quant_method")
        if quantised:  # some configs have that of the target, though the head is not quantised
            raise ValueError(
                f"the head is quantised by {str(quantised)[:40]!r}, which is not read; load one that is not"
            )
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing, such as {', '.join(missing[:3])}; download it again")
        if unknown:
            names = ", ".join(self.tensors[name].name for name in unknown[:3])
            raise ValueError(
                f"a head with this config.json has no tensors such as {names} ({len(unknown)} in all); it is of a "
                "variant that is not supported"
            )

    def _draft_to_target(self, config: HeadConfig) -> torch.Tensor:
        """The target's id of each draft id: vLLM's `token_map`, or from the differences of both in `d2t`."""
        name = "token_map" if self.has("token_map") else "d2t"
        info = self.tensors.get(name)
        size = config.draft_vocab_size
        if info is None or info.shape != (size,) or info.dtype not in (torch.int64, torch.int32):
            description = "none" if info is None else f"one of shape {info.shape} and dtype {info.dtype}"
            raise ValueError(
                f"a draft vocabulary of {size} tokens needs an integer tensor {name} of that size, found {description}"
            )
        ids = info.read().long()
        ids = ids + torch.arange(size, device=ids.device) if name == "d2t" else ids
        if not ids.is_meta and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
            raise ValueError(
                f"{name} maps draft tokens to ids outside of the target's vocabulary of {config.vocab_size}"
            )
        return ids


def _our_name(name: str) -> str:
    """The name in our modules of a tensor in a file."""
    for pattern, ours in RENAMED:
        name = pattern.sub(ours, name)
    return name


def _gemma_fields(fields: Fields) -> Fields:
    """The config of Gemma 4's full-attention layers under the names of Llama's."""
    if set(fields.values.get("layer_types") or ()) != {"full_attention"}:
        raise ValueError("draft layers of Gemma 4 have to be of type full_attention, all of them")
    values = {**fields.values, "head_dim": fields.get("global_head_dim"), "hidden_act": fields.get("hidden_activation")}
    if fields.flag("attention_k_eq_v"):
        values["num_key_value_heads"] = fields.get("num_global_key_value_heads")
    values["rope_parameters"] = fields.nested("rope_parameters").values.get("full_attention")
    return Fields(values, fields.defaults)


def count_layers(fields: Fields, names: Iterable[str]) -> int:
    """The number of layers among the tensors, which the config has to confirm."""
    numbers = {int(match[1]) for name in names if (match := LAYER_NAME.match(name))}
    if not numbers or numbers != set(range(len(numbers))):
        raise ValueError(f"the tensors have no complete sequence of layers, only numbers {sorted(numbers)[:8]}")
    configured = fields.optional_integer("num_hidden_layers") if "num_hidden_layers" in fields.values else None
    if configured not in (None, len(numbers)):
        raise ValueError(f"config.json has {configured} layers, but the tensors have {len(numbers)}")
    return len(numbers)


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
    for name, offset in LAYER_FIELDS.items():
        ids: Any = config
        for key in name.split("."):
            ids = ids.get(key) if isinstance(ids, Mapping) else None
        if ids is None or (ids == [] and name.startswith("eagle_config.")):  # as ModelOpt writes the default
            continue
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
