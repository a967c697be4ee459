"""Medusa heads: small networks that predict the tokens after the next one from the target's last hidden state.

    hidden state that predicts token t+1 ─┬─► target's output matrix ─► token t+1   (the target itself)
                                          └─► head 0 ─► output matrix ─► token t+2; head 1 ─► …

With `reads_path` (Hydra heads) head h also reads the draft tokens before its own, and drafts one level of a tree:

    that state, tokens t+1 … t+h+1 of a path ─► head h ─► output matrix ─► token t+h+2 of this path

All heads share the target's output matrix, maybe with a LoRA matrix for each head, or have matrices of their own.

| format | file | tensors |
|---|---|---|
| our own | model.safetensors, maybe `lora/` of PEFT | as in `MedusaHeads` |
| Medusa v1, TGI | medusa_lm_head.pt, .safetensors | `{head}.{layer}.linear.weight`, `.bias`; `{head}.{layers}.weight` |
| Medusa v2, TGI | medusa_lm_head.safetensors | `{head}.{layer}.linear.weight`, `.bias` |
| vLLM | model.safetensors | `blocks.{head}.layers.{layer}.weight`, `.bias`; `lm_heads.{head}.weight`; `token_map` |

Sources: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), section
2.1; Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.device_tree import Frontier
from hf_specgen.drafter import DepthLogits, Drafter
from hf_specgen.heads.base import BoundHead, DraftHead, HeadConfig
from hf_specgen.heads.checkpoint import MEDUSA_FILES, Fields, load_adapter
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.head_text import StateSource, StateText
from hf_specgen.targets.model_parts import decoder_layers, output_logits, output_matrix
from hf_specgen.targets.requirements import OUTPUT_STATE

MODEL_TYPE = "medusa_heads"
LORA_FOLDER = "lora"
"""Subfolder of a set of heads in our format that holds an adapter of PEFT with one LoRA matrix for each head."""
OWN_FIELDS = ("hidden_size", "vocab_size", "num_heads", "num_layers", "lora_rank", "logit_scale")
PARTS = ("blocks.", "lm_heads.", "token_map", "lora_A.", "lora_B.")
"""How the names of our tensors begin."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Configuration of a set of Medusa heads; a `vocab_size` of 0 is the target's, whatever that is."""

    num_heads: int = 4  # head h predicts the token h + 2 positions after the one whose hidden state it reads
    num_layers: int = 1  # residual layers of each head
    own_outputs: bool = False  # an output matrix for each head, instead of the target's
    reads_path: bool = False  # also the embeddings of the next token and of the draft tokens after it (Hydra)
    logit_scale: float = 1.0  # factor on the logits
    lora_rank: int = 0  # of a matrix for each head that is added to the target's output matrix; 0: none

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_layers) < 1 or self.lora_rank < 0:
            raise ValueError(
                f"num_heads and num_layers must be at least 1 and lora_rank at least 0, got {self.num_heads}, "
                f"{self.num_layers} and {self.lora_rank}"
            )
        if self.draft_vocab_size != self.vocab_size and not self.own_outputs:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} needs output matrices of the heads' own")
        if self.own_outputs and self.lora_rank:
            raise ValueError(f"heads with their own output matrices take no LoRA, got lora_rank={self.lora_rank}")


class ResidualBlock(nn.Module):
    """Layers of `x + SiLU(Linear(x))`; the identity if all weights are zero."""

    def __init__(self, hidden_size: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class MedusaHeads(DraftHead):
    """A set of Medusa heads."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        size = config.hidden_size
        rank = config.lora_rank
        rows = config.draft_vocab_size
        count = range(config.num_heads)
        self.reads_embeddings = config.reads_path
        self.blocks = nn.ModuleList(ResidualBlock(size, config.num_layers) for _ in count)
        if config.reads_path:
            self.token_maps = nn.ModuleList(nn.Linear((head + 1) * size, size, bias=False) for head in count)
        if config.own_outputs:
            self.lm_heads = nn.ModuleList(nn.Linear(size, rows, bias=False) for _ in count)
        if rank:
            self.lora_A = nn.ModuleList(nn.Linear(size, rank, bias=False) for _ in count)
            self.lora_B = nn.ModuleList(nn.Linear(rank, config.vocab_size, bias=False) for _ in count)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **shape: Any) -> Self:
        """New heads that predict the target's next token, in float32 on its device.

        Args:
            target: the model that they will draft for.
            shape: fields of `MedusaConfig` from `num_heads` on.
        """
        matrix = output_matrix(target)
        config = MedusaConfig(
            hidden_size=matrix.in_features,
            vocab_size=matrix.out_features,
            target_hidden_size=matrix.in_features,
            draft_vocab_size=matrix.out_features,
            base_model=target.name_or_path or None,
            target_type=target.config.get_text_config().model_type,
            num_target_layers=len(decoder_layers(target)),
            **shape,
        )
        heads = cls(config)
        if heads.config.own_outputs and matrix.bias is not None:
            raise ValueError(
                "the target's output matrix has a bias, which the heads' own matrices cannot copy; use "
                "own_outputs=False"
            )
        for name, parameter in heads.named_parameters():
            if name.startswith("lm_heads."):
                parameter.data.copy_(matrix.weight)
            elif not name.startswith("lora_A."):
                nn.init.zeros_(parameter)
        return heads.to(matrix.weight.device)

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """The input of the target's output matrix."""
        return (OUTPUT_STATE,)

    def head_state(self, head: int, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., hidden]`, the hidden state of one head."""
        if self.config.reads_path:
            if tokens is None or tokens.shape[-2] <= head:
                raise ValueError(
                    f"head {head} reads {head + 1} tokens after the hidden state; pass their embeddings as tokens"
                )
            hidden = hidden + self.token_maps[head](tokens[..., : head + 1, :].flatten(-2))
        return cast(torch.Tensor, self.blocks[head](hidden))

    def scores(self, heads: Sequence[int], states: torch.Tensor, shared: nn.Module) -> torch.Tensor:
        """`[..., heads, draft_vocab]` scores for the states of some heads; `shared` is the target's output matrix."""
        if self.config.own_outputs:
            scores = _stacked([self.lm_heads[head](states[..., place, :]) for place, head in enumerate(heads)])
        else:
            scores = shared(states)
        if self.config.lora_rank:
            added = [self.lora_B[head](self.lora_A[head](states[..., place, :])) for place, head in enumerate(heads)]
            scores = scores + _stacked(added)
        return scores if self.config.logit_scale == 1.0 else scores * self.config.logit_scale


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[..., heads, size]` from one tensor for each head; of a single head a view."""
    return parts[0].unsqueeze(-2) if len(parts) == 1 else torch.stack(list(parts), dim=-2)


class MedusaDrafter(Drafter[StateText]):
    """Drafts with a set of heads on the target's last hidden state of each row; it has no cache.

    Heads that read the path (Hydra) draft a level at a time, others all depths at once.
    """

    rows_can_change = True

    def __init__(self, bound: BoundHead, source: StateSource, target: PreTrainedModel):
        super().__init__()
        self.bound = bound
        self.modules = (bound.head, bound.output_matrix)
        self._head = cast(MedusaHeads, bound.head)
        self._source = source
        self._target = target
        self._like = next(bound.head.parameters())
        self.max_depth = self._head.config.num_heads
        self.is_one_pass = not self._head.config.reads_path
        self._states: torch.Tensor = self._like
        self._path: torch.Tensor = self._like  # embeddings read in the last pass

    def take_uncached(self, max_depths: Sequence[int]) -> StateText | None:
        """The state and the last token of each row."""
        return self._source.states_for(max_depths)

    def forward_text(self, text: StateText) -> torch.Tensor:
        """`[batch, vocab]` the logits of head 0, from each row's hidden state and last token, if it reads that."""
        self._states = text.states.to(self._like)[:, None]
        return self._logits([0], self.bound.embed(torch.tensor(text.pending)[:, None, None]))[:, 0, 0]

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last nodes, by the head of their depth."""
        last = self.bound.embed(frontier.tokens.to(self._like.device))[:, :, None]
        path = torch.cat([frontier.gather_parents(self._path), last], dim=2)
        return self._logits([frontier.depth], path)[:, :, 0]

    def forward_depths(self, text: StateText, depth: int) -> DepthLogits:
        """The logits of the first `depth` heads, if they read no tokens."""
        self._states = text.states.to(self._like)[:, None]
        return DepthLogits(self._logits(range(depth)).transpose(1, 2).float())

    def _logits(self, heads: Sequence[int], path: torch.Tensor | None = None) -> torch.Tensor:
        """`[batch, nodes, heads, vocab]` logits of some heads, scaled and capped like the target's own.

        `path` are the embeddings that the heads read, `[batch, nodes, tokens, hidden]`.
        """
        hidden = self._states
        matrix = output_matrix(self._target)
        if path is not None:
            self._path = path
            hidden = hidden.expand(*path.shape[:-2], -1)
        states = _stacked([self._head.head_state(head, hidden, path) for head in heads])
        logits = output_logits(self._target, states, lambda states: self._head.scores(heads, states, matrix))
        return self.bound.to_target_vocabulary(logits)


def is_medusa(file: HeadFile) -> bool:
    """Whether the tensors are those of Medusa heads."""
    return _count(file.tensors, "blocks.") > 0


def _count(names: Iterable[str], prefix: str) -> int:
    """How many different numbers follow a prefix."""
    return len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


def load_medusa(file: HeadFile) -> MedusaHeads:
    """A set of Medusa heads of any format; their number and sizes are counted in the tensors."""
    fields = file.fields
    file.tensors = {name: info for name, info in file.tensors.items() if name.startswith(PARTS)}
    hidden = file.matrix("blocks.0.layers.0.weight")[1]
    heads = _count(file.tensors, "blocks.")
    if _count(file.tensors, "lm_heads.") == 1 < heads:  # vLLM's `original_lm_head`
        only = file.tensors.pop("lm_heads.0.weight", None)
        if only and file.has("token_map"):  # without a map it is the target's own matrix
            file.tensors |= {f"lm_heads.{head}.weight": only for head in range(heads)}
    base = fields.nested("base")
    own = file.has("lm_heads.0.weight")
    rows = file.matrix("lm_heads.0.weight")[0] if own else 0
    kept = (*file.tensors["token_map"].shape, 0)[0] if file.has("token_map") else 0
    vocab = fields.optional_integer("vocab_size") or rows
    vocab = vocab if kept or not own else rows
    if (configured := fields.optional_integer("truncated_vocab_size")) not in (None, kept or vocab):
        raise ValueError(f"truncated_vocab_size is {configured}, but token_map has {kept} tokens of {vocab}")
    rank = fields.optional_integer("lora_rank") or 0
    if rank and not file.has("lora_A.0.weight"):
        with torch.device("meta"):
            adapted = nn.ModuleDict({"heads": nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads))})
        adapter = load_adapter(adapted, file.checkpoint.source.inside(LORA_FOLDER))
        file.add({re.sub(r"heads\.(\d+)\.(lora_.)", r"\2.\1", name): tensor for name, tensor in adapter.items()})
    name = base.get("name_or_path") or fields.get("base_model_name_or_path")
    config = MedusaConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=kept or vocab,
        target_hidden_size=hidden,
        base_model=str(name) if name else None,
        num_target_layers=base.optional_integer("num_hidden_layers", 1),
        target_type=base.text("model_type") or None,
        num_heads=heads,
        num_layers=_count(file.tensors, "blocks.0.layers."),
        own_outputs=own,
        reads_path=file.has("token_maps.0.weight"),
        logit_scale=Fields(fields.values, {"logit_scale": 1.0}).number("logit_scale"),
        lora_rank=rank,
    )
    for count in ("num_heads", "num_layers"):
        if fields.get("model_type") == MODEL_TYPE and fields.integer(count) != getattr(config, count):
            raise ValueError(f"{count} is {fields.get(count)}, but there are tensors for {getattr(config, count)}")
    if not any(name.endswith(".bias") for name in file.tensors):  # vLLM's `medusa_fc_bias`
        layers = [name.removesuffix("weight") for name in file.tensors if name.startswith("blocks.")]
        file.add({f"{layer}bias": torch.zeros(hidden) for layer in layers})
    return file.build(MedusaHeads, config)


def medusa_file(
    heads: MedusaHeads, to: str, target: PreTrainedModel | None
) -> tuple[dict[str, Any], str, dict[str, torch.Tensor]]:
    """Config, file name and tensors of heads in a format: "medusa" (v1, v2), "tgi", "vllm", or "" for our own."""
    config = heads.config
    name = "model.safetensors"
    tensors = dict(heads.state_dict())
    if (ids := tensors.pop("draft_to_target", None)) is not None:
        tensors["token_map"] = ids
    fields: dict[str, Any] = {key: getattr(config, key) for key in OWN_FIELDS}
    base: dict[str, Any] = {"name_or_path": config.base_model, "model_type": config.target_type}
    fields["base"] = base | {"num_hidden_layers": config.num_target_layers}
    if not to:
        return fields | {"model_type": MODEL_TYPE}, name, tensors
    _check_expressible(config, to, target)
    if config.lora_rank:
        matrix = output_matrix(cast(PreTrainedModel, target)).weight
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("lora_")}
        for head in range(config.num_heads):
            down, up = (cast(nn.Linear, part[head]).weight.to(matrix) for part in (heads.lora_A, heads.lora_B))
            tensors[f"lm_heads.{head}.weight"] = matrix + up @ down
    own = "lm_heads.0.weight" in tensors
    fields["lora_rank"] = 0
    fields["base_model_name_or_path"] = config.base_model
    if to == "vllm":
        if not own:
            tensors["lm_head.weight"] = output_matrix(cast(PreTrainedModel, target)).weight
        vllm = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_hidden_layers": config.num_layers}
        size = {"truncated_vocab_size": config.draft_vocab_size, "logit_scale": config.logit_scale}
        return fields | vllm | size | {"medusa_fc_bias": True, "original_lm_head": not own}, name, tensors
    if to == "tgi" and not own and config.num_layers != 1:
        raise ValueError(
            f"TGI reads heads that share the output matrix with one layer only, these have {config.num_layers}"
        )
    renamed = {re.sub(r"^blocks\.(\d+)\.layers\.(\d+)", r"\1.\2.linear", key): value for key, value in tensors.items()}
    renamed = {re.sub(r"^lm_heads\.(\d+)", rf"\1.{config.num_layers}", key): value for key, value in renamed.items()}
    fields |= {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    fields |= {} if own else {"version": "2"}
    return fields, MEDUSA_FILES[own and to == "medusa"], renamed


def _check_expressible(config: MedusaConfig, to: str, target: PreTrainedModel | None) -> None:
    """Raise a `ValueError` if another program's format cannot hold such heads."""
    if config.reads_path:
        raise ValueError(f"{to} cannot represent heads that read the path (reads_path=True); train others")
    if config.draft_vocab_size < config.vocab_size and to != "vllm":
        raise ValueError(f"{to} cannot represent heads with a truncated vocabulary; export them to vllm")
    if config.own_outputs or not (config.lora_rank or to == "vllm"):
        return
    if target is None:
        raise ValueError(
            f"{to}'s format holds the target's output matrix, so these heads need it; give the target (--target)"
        )
    if output_matrix(target).bias is not None:
        raise ValueError(f"{to} cannot represent the bias of the target's output matrix; export heads that share it")
