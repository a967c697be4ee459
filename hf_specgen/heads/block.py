"""Block heads (DFlash, JetSpec): predict a whole block of tokens in one pass from the target's hidden states.

The block is the last known token, the anchor, and mask tokens. Every layer attends to the block and to the *context*:
one key and value per accepted position, projected from the target's features without the head's layers:

    context (features of accepted positions)   |  block
    c0   c1   c2   c3                          |  x4 (anchor)  mask  mask  mask
                                                                d5    d6    d7      d6 is predicted independently of d5

DFlash attends in both directions inside the block, JetSpec only backwards. Block entries are dropped after each pass.

Sources: DFlash (2026), https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_specgen.drafter import DepthLogits
from hf_specgen.heads.base import BoundHead, DraftHead, HeadConfig, HeadOutput
from hf_specgen.heads.checkpoint import MASK_EMBEDDING, Fields, named_errors, read_mask_embedding
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.layer_options import PAIR_FLAGS
from hf_specgen.heads.layers import Attention, DecoderLayer, LayerConfig, RotaryEmbedding

LAYER_TYPES = ("full_attention", "sliding_attention")
SLIDING_FLAG = "sliding_window_non_causal"
CAUSAL_FLAGS = ("causal_head", "causal", "is_causal")
ANCHOR_FLAGS = {"sample_from_anchor": True, "shift_label": True, "dspark_bonus_anchor": False}
"""Fields with the value that says that the anchor's own position proposes a token."""


@dataclass(frozen=True)
class BlockAttention:
    """The attention pattern of one layer inside a block."""

    causal: bool = False  # attend only backwards inside the block
    window: int | None = None  # sliding window in positions; None for all
    window_from_anchor: bool = False  # one window for the whole block (speculators), not one from each position


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Configuration of `BlockHead`."""

    layer: LayerConfig
    attention: tuple[BlockAttention, ...]  # of each layer
    block_size: int  # positions, the anchor included
    mask_token_id: int
    first_proposing_position: int = 1  # 0: position i predicts the token after it (`sample_from_anchor`)
    layout_undecided: bool = False  # whether that is not specified, and the first drafts decide
    pairs_undecided: bool = False  # whether the file does not say which channels are rotated as a pair
    max_draft_tokens: int | None = None  # that a block proposes; None: one for each proposing position

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.block_size <= 1024:  # rejects damaged configs; published heads have blocks of 8 to 16 tokens
            raise ValueError(f"block_size must be between 2 and 1024, got {self.block_size}")

    @property
    def depth(self) -> int:
        """How many tokens a block proposes."""
        return self.max_draft_tokens or self.block_size - self.first_proposing_position


class BlockHead(DraftHead):
    """DFlash and JetSpec heads: `extend` with accepted positions, `forward` over the block, drop its cache entries."""

    config: BlockConfig
    reads_all_positions = False
    """Whether the logits of a depth depend on all positions of the block, however deep the draft is."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.num_aux_hidden_states * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.layer.rms_norm_eps)
        self.layers = nn.ModuleList(map(self.make_layer, range(len(config.attention))))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.layer)

    def make_layer(self, index: int) -> DecoderLayer:
        """A new layer of the stack."""
        return DecoderLayer(self.config.layer, index)

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """Spread evenly over the target, one for each layer of the head."""
        return block_layers(num_layers, len(self.layers))

    def extend(self, features: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Add accepted positions to the context."""
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary(context, position_ids)
        for layer in self.layers:
            attention = cast(Attention, layer.self_attn)
            cache.update(*attention.keys_values(context, rotary), attention.layer_index)

    def forward(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, cache: Cache, lengths: Sequence[int]
    ) -> HeadOutput:
        """One pass over a block, `[batch, block, hidden]`, after a context of `lengths` entries in the rows."""
        block = embeddings.shape[1]
        equal_lengths = len(set(lengths)) == 1
        masks = {
            # Without a mask, attention can use its fastest kernels.
            attention: None
            if attention == BlockAttention() and equal_lengths
            else block_mask(attention, lengths, block, embeddings.device)
            for attention in set(self.config.attention)
        }
        rotary = self.rotary(embeddings, position_ids)
        states = embeddings * self.config.input_embedding_scale
        for layer, attention in zip(self.layers, self.config.attention, strict=True):
            states = layer(states, rotary, masks[attention], cache)
        return HeadOutput(states, self.norm(states))

    def depth_logits(
        self, bound: BoundHead, hidden: torch.Tensor, features: Sequence[torch.Tensor], depth: int
    ) -> DepthLogits:
        """The logits of the first `depth` depths.

        Args:
            bound: this head, with the output matrix of the target.
            hidden: `[batch, positions, hidden]` outputs at the positions that propose tokens.
            features: `[new, features]` the target's features of each row's new context.
        """
        return DepthLogits(bound.target_logits(hidden).float()[:, :, None])


def block_mask(
    attention: BlockAttention, lengths: Sequence[int], block: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """`[batch, 1, block, max(lengths) + block]` bool, True where a position sees a cache slot."""
    slots = torch.arange(max(lengths) + block, device=device)
    anchor = torch.tensor(lengths, device=device)[:, None, None]
    positions = anchor + torch.arange(block, device=device)[:, None]
    visible = slots <= positions if attention.causal else (slots < anchor + block).expand(-1, block, -1)
    if attention.window is not None and attention.window_from_anchor:
        visible = visible & (slots >= anchor - attention.window)
    elif attention.window is not None:
        visible = visible & (positions - slots < attention.window)
        visible = visible if attention.causal else visible & (slots - positions < attention.window)
    return visible[:, None]


def block_layers(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Which states DFlash reads by default: spread evenly, one for each draft layer."""
    if num_draft_layers == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + layer * step) + 1 for layer in range(num_draft_layers))


def block_options(file: HeadFile) -> dict[str, Any]:
    """The fields of `BlockConfig` in every format; without the first proposing position if the file leaves it open."""
    fields = file.fields
    options = file.common()
    target_layers = options["num_target_layers"]
    if options["aux_hidden_state_layers"] is None and target_layers is not None:
        options["aux_hidden_state_layers"] = block_layers(target_layers, file.num_layers)
    for name, proposes in ANCHOR_FLAGS.items():
        if fields.get(name) is not None:
            options.setdefault("first_proposing_position", 0 if fields.flag(name) == proposes else 1)
    mask_token = file.mask_token()
    path = file.checkpoint.source.file(MASK_EMBEDDING)
    if path is not None:
        with named_errors(path):
            vector = read_mask_embedding(path, options["hidden_size"], mask_token)
            file.add({"mask_embedding": vector.to(file.tensors["fc.weight"].dtype)})
    return options | {
        "mask_token_id": mask_token,
        "has_mask_embedding": path is not None,
        "pairs_undecided": not {*file.of_layers.values, *fields.values} & {*PAIR_FLAGS},
        "block_size": fields.integer("block_size", 2),
        "attention": _attention(file),
    }


def _attention(file: HeadFile) -> tuple[BlockAttention, ...]:
    """The attention of each layer; Qwen3 ignores the window if its use is off.

    In the format of speculators the window is counted from the anchor, and sliding layers are causal inside the block
    by default, except those of DFlash2. In other formats a flag may decide for all layers whether they are causal, and
    `use_swa` has a window of its own, in both directions without such a flag.
    """
    layers = file.of_layers
    fields = file.fields
    count = file.num_layers
    window = layers.optional_integer("sliding_window", 1) if layers.flag("use_sliding_window") else None
    types = layers.values.get("layer_types")
    own_window = fields.flag("use_swa")
    if own_window:
        window = fields.integer("swa_window_size")
        types = types or ["sliding_attention"] * count
    elif fields.get("swa_window_size") not in (None, window):
        raise ValueError(f"swa_window_size is {fields.get('swa_window_size')!r:.40}, but the layers have {window}")
    if types is None:
        full = (layers.optional_integer("max_window_layers") or 0) if window else count
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(count)]
    if not isinstance(types, list) or len(types) != count or not all(name in LAYER_TYPES for name in types):
        raise ValueError(f"layer_types must name the attention of {count} layers, got {str(types)[:80]!r}")
    if file.is_nested:
        both_ways = Fields(fields.values, {SLIDING_FLAG: file.kind == "dflash2"}).flag(SLIDING_FLAG)
        kinds = (BlockAttention(), BlockAttention(not both_ways, window, window_from_anchor=True))
        kinds = kinds if window else kinds[:1] * 2
    else:
        causal = next((fields.flag(name) for name in CAUSAL_FLAGS if fields.get(name) is not None), None)
        causal = False if causal is None and own_window else causal
        kinds = (BlockAttention(causal is True), BlockAttention(causal is not False, window))
    return tuple(kinds[LAYER_TYPES.index(name)] for name in types)


def block_type(file: HeadFile) -> str | None:
    """What kind of block head a file holds: "dflash", or the name of its correction; None if there is none.

    The name is that in the config, or else that of the class; DFlash2 has convolutions, LiLiCorr may have them too.
    """
    if not file.has("fc.weight", "hidden_norm.weight"):
        return None
    if file.has("lilicorr.slot_embedding"):
        return "lilicorr"
    if file.has("layers.0.attention_conv.base_kernel"):
        return "dflash2"
    classes = str(file.fields.get("architectures")).lower()
    by_class = next((name for name in ("dspark", "domino") if name in classes), "dflash")
    return str(file.fields.get("projector_type") or by_class)


def load_block(file: HeadFile) -> BlockHead:
    """A DFlash or JetSpec head."""
    if (name := block_type(file)) not in ("dflash", None):
        raise ValueError(f"DFlash heads with projector_type {str(name)[:40]!r} are not supported")
    return file.build(BlockHead, BlockConfig(**block_options(file)))
