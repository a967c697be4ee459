"""Block heads whose logits are corrected by what was drafted: DSpark, with a confidence head, and Domino.

DSpark has a low-rank Markov correction:

| correction | query, with e = W1[previous token], output h of the position and a state s along the path |
|---|---|
| vanilla | e |
| gated | sigmoid(gate_proj([h; e])) * e |
| rnn | tanh(o), where g, c, o = joint_proj([s; e; h]); then s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c) |

Its confidence head estimates from h, or from [h; e], how likely the token proposed at the position is accepted.

Source: DSpark (2026), as implemented by deepseek-ai/DeepSpec and by the package speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hf_specgen.heads.block import BlockConfig, block_options
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.path_head import Embed, PathHead, Step

KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """Configuration of `DSparkHead`."""

    markov_rank: int = 256  # 0: no correction
    markov_head_type: str = "vanilla"  # or "gated", "rnn"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True  # whether the confidence head reads the previous token

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head_type not in KINDS:
            raise ValueError(f"markov_head_type must be one of {', '.join(KINDS)}, got {self.markov_head_type[:40]!r}")


class DSparkHead(PathHead):
    """A DSpark head."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        width = config.hidden_size
        kind = config.markov_head_type
        self.state_size = rank if kind == "rnn" else 0
        self.markov_head: Any = None
        if rank:
            self.markov_head = nn.ModuleDict({"markov_w1": nn.Embedding(config.vocab_size, rank)})
            self.markov_head["markov_w2"] = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if rank and kind == "gated":
            self.markov_head["gate_proj"] = nn.Linear(width + rank, rank)
        if rank and kind == "rnn":
            self.markov_head["joint_proj"] = nn.Linear(2 * rank + width, 3 * rank)
        self.confidence_head: Any = None
        if config.enable_confidence_head:
            width += rank if config.confidence_head_with_markov else 0
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    def keys(self) -> torch.Tensor:
        """`[draft_vocab, rank]`."""
        if self.markov_head is None:
            return self.norm.weight.new_zeros(self.config.draft_vocab_size, 0)
        return cast(torch.Tensor, self.markov_head.markov_w2.weight)

    def step(self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor, depth: int, embed: Embed) -> Step:
        """See the table above."""
        if self.markov_head is None:
            return hidden[..., :0], state
        previous = self.markov_head.markov_w1(tokens)
        if self.config.markov_head_type == "vanilla":
            return previous, state
        if self.config.markov_head_type == "gated":
            gate = self.markov_head.gate_proj(torch.cat((hidden.expand(*tokens.shape, -1), previous), dim=-1))
            return gate.sigmoid() * previous, state
        keep, content, query = self.markov_head.joint_proj(torch.cat((state, previous, hidden), dim=-1)).chunk(
            3, dim=-1
        )
        return query.tanh(), torch.lerp(content.tanh(), state.to(content.dtype), keep.sigmoid())

    def first_state(
        self, hidden: torch.Tensor, anchor: torch.Tensor, embed: Embed, first: int | None = None
    ) -> torch.Tensor:
        """Zeros; where the anchor's own position proposes nothing, the state after it, as in training."""
        state = super().first_state(hidden, anchor, embed)
        if (self.config.first_proposing_position if first is None else first) == 0:
            return state
        return self.step(hidden[:, 0], anchor, state, 0, embed)[1]

    def confidence_logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """`[...]` logits of the probability that what is proposed is accepted; None without a confidence head.

        They are computed from the position's output, and the token before it if the head reads that.
        """
        if self.confidence_head is None:
            return None
        if self.markov_head is not None and self.config.confidence_head_with_markov:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(tokens)), dim=-1)
        return cast(torch.Tensor, self.confidence_head.proj(hidden))[..., 0]


def load_dspark(file: HeadFile) -> DSparkHead:
    """A DSpark head of speculators, DeepSpec, SpecForge or ModelOpt."""
    fields = file.fields
    rank, confidence = (
        file.matrix(name)[1] if file.has(name) else 0
        for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight")
    )
    configured = fields.optional_integer("markov_rank")
    if configured not in (None, rank):
        raise ValueError(f"config.json has markov_rank {configured}, but the tensors have {rank}")
    options = block_options(file)
    if "first_proposing_position" not in options:
        options |= _layout(file, options["block_size"])
    config = DSparkConfig(
        **options,
        markov_rank=rank,
        markov_head_type=fields.text("markov_head_type") or "vanilla",
        enable_confidence_head=confidence > 0,
        confidence_head_with_markov=not rank or confidence != options["hidden_size"],
    )
    return file.build(DSparkHead, config)


def _layout(file: HeadFile, block_size: int) -> dict[str, object]:
    """Which position of the block proposes first in a file that does not specify it, and whether drafts decide.

    In the wrong layout a good head is accepted as rarely as a random one, without any error.
    """
    if file.is_nested:  # before the field existed, speculators trained the other layout than its class now has
        return {"first_proposing_position": int(file.speculative_tokens() != block_size), "layout_undecided": True}
    is_lfm2 = "lfm2" in str(file.fields.get("architectures")).lower()
    undecided = "dflash_config" in file.checkpoint.config and not is_lfm2
    return {"first_proposing_position": 0, "layout_undecided": undecided}


@dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """Configuration of `DominoHead`."""

    emb_dim: int  # rank of the correction
    gru_hidden_dim: int
    pure_draft_prefix_len: int = 0  # draft tokens without a correction


class DominoHead(PathHead):
    """A block head whose logits are corrected by a GRU over the embeddings of the path.

    With the state s after the anchor and the tokens drafted so far, the correction of a position with output h is
    `embed_proj([h; s])`, two linear layers around SiLU; the first `pure_draft_prefix_len` draft tokens have none.

    Source: Domino (2026), https://arxiv.org/abs/2605.29707, as implemented by SpecForge.
    """

    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.state_size = config.gru_hidden_dim
        self.prefix_gru = nn.GRU(width, config.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
        )

    def keys(self) -> torch.Tensor:
        """`[draft_vocab, emb_dim]`."""
        return cast(nn.Linear, self.embed_proj[2]).weight

    def step(self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor, depth: int, embed: Embed) -> Step:
        """The GRU reads the token, then the position's output and the state make the query."""
        read = embed(tokens.view(len(tokens), -1)).flatten(0, 1)
        weights = dict(self.prefix_gru.named_parameters())
        flat = torch.gru_cell(read, state.flatten(0, -2), weights["weight_ih_l0"], weights["weight_hh_l0"])
        state = flat.view(state.shape)
        query = self.embed_proj[:2](torch.cat((hidden, state), dim=-1))
        return query * (depth >= self.config.pure_draft_prefix_len), state


def load_domino(file: HeadFile) -> DominoHead:
    """A Domino head of SpecForge or ModelOpt; without `shift_label` position j of the block proposes token j."""
    fields = file.fields
    options = block_options(file)
    config = DominoConfig(
        **options,
        max_draft_tokens=options["block_size"] - 1,
        emb_dim=fields.integer("emb_dim"),
        gru_hidden_dim=fields.integer("gru_hidden_dim"),
        pure_draft_prefix_len=fields.optional_integer("pure_draft_prefix_len") or 0,
    )
    return file.build(DominoHead, config)
