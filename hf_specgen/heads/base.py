"""Base classes of draft heads that read the target's hidden states, and their binding to a target.

    features of the target ─► head.combine ─► hidden ─┐
                                                      ├─► head(embeddings, hidden, …) ─► HeadOutput
    next token ─► bound.embed ─► embeddings ──────────┘                                   │      │
                                                              fed to the next step ◄─ hidden   output ─► bound.logits

Weights that a checkpoint leaves out (usually the embedding) are the target's, shared by `BoundHead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.targets.model_parts import num_layers, text_config, text_embeddings


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Configuration that all heads have in common: their sizes, and those of the target that they fit."""

    hidden_size: int  # of the states passed from step to step
    vocab_size: int  # the target's
    target_hidden_size: int
    num_aux_hidden_states: int = 1  # concatenated to a feature
    aux_hidden_state_layers: tuple[int, ...] | None = None  # `hidden_states` indices; None: the default of the format
    draft_vocab_size: int  # tokens that the head can propose
    own_embeddings: bool = False  # else the target's
    own_lm_head: bool = False  # else the target's
    speculative_tokens: int | None = None  # draft tokens that the checkpoint recommends
    base_model: str | None = None  # the target that it was trained for
    target_type: str | None = None  # its `model_type`
    num_target_layers: int | None = None
    trained_length: int | None = None  # tokens of the longest texts that it was trained on
    mask_token_id: int | None = None  # input at the positions that are predicted in parallel
    has_mask_embedding: bool = False  # whether that token has an embedding of the head's own
    input_embedding_scale: float = 1.0  # of the embeddings that the head reads
    output_multiplier: float = 1.0  # of the logits, before they are capped
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be between 1 and the target's vocabulary size {self.vocab_size}, "
                f"got {self.draft_vocab_size}"
            )
        if self.draft_vocab_size < self.vocab_size and not self.own_lm_head:
            raise ValueError(
                f"a head with a draft vocabulary of {self.draft_vocab_size} of {self.vocab_size} tokens needs its own "
                "output matrix (lm_head.weight)"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id must be a token of the target, below {self.vocab_size}: {self.mask_token_id}"
            )


class HeadInputs(NamedTuple):
    """The inputs of a pass of a head that drafts step by step."""

    embeddings: torch.Tensor  # [batch, length, hidden] of the tokens *after* the positions
    hidden: torch.Tensor  # [batch, length, hidden] combined features, or `HeadOutput.hidden` of the parents
    positions: torch.Tensor  # [batch, length]
    mask: torch.Tensor  # [batch, 1, length, slots], True where a query sees a slot of the cache


class HeadOutput(NamedTuple):
    """States `[batch, length, hidden]`: `hidden` for the next draft step, `output` for the output matrix."""

    hidden: torch.Tensor
    output: torch.Tensor


class DraftHead(nn.Module):
    """Base class of the heads; a subclass adds its layers, `default_layers`, `combine` and `forward`.

    `forward` of heads that draft step by step takes `HeadInputs` and the cache for keys and values.
    """

    lm_head: nn.Module | None
    reads_embeddings = True
    """Whether the head reads embeddings of tokens."""
    keep_dtype_of: tuple[str, ...] = ("inv_freq.",)
    """Parts of names, between dots, of tensors that are not cast with the head."""
    draft_to_target: torch.Tensor | None
    """`[draft_vocab_size]` the target's id of each draft id; None if the vocabularies are the same."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        )
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if config.has_mask_embedding else None
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size) if reduced else None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Some tensors keep their dtype: in bfloat16 rotary frequencies are too coarse for late positions."""
        named = (*self.named_buffers(), *self.named_parameters())
        kept = [tensor for name, tensor in named if any(part in f".{name}." for part in self.keep_dtype_of)]
        keep_dtype = lambda tensor: tensor.to(fn(tensor).device) if any(tensor is one for one in kept) else fn(tensor)  # noqa: E731
        return super()._apply(keep_dtype, recurse)

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """The `hidden_states` indices that the format reads by default: the state after the final norm."""
        return (num_layers,)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Features to hidden states; the features themselves where they have the width of the head."""
        return features

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's token ids of draft token ids, in the same shape."""
        return draft_ids if self.draft_to_target is None else self.draft_to_target[draft_ids]

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiplied, then softly capped."""
        cap = self.config.final_logit_softcapping
        factor = self.config.output_multiplier
        logits = logits if factor == 1.0 else logits * factor
        return logits if cap is None else cap * (logits / cap).tanh()

    def bind(self, target: PreTrainedModel, aux_hidden_state_layers: Sequence[int] | None = None) -> BoundHead:
        """Check that the head can draft for `target`, and share the target's weights that the head lacks."""
        config = text_config(target)
        own = self.config
        embed = text_embeddings(target)
        lm_head: Any = target.get_output_embeddings()
        if lm_head is None:
            raise ValueError(f"{type(target).__name__} has no output matrix, which draft heads need")
        ids = self.draft_to_target
        if ids is not None and not ids.is_meta and not 0 <= int(ids.min()) <= int(ids.max()) < own.vocab_size:
            raise ValueError(f"draft_to_target of {type(self).__name__} has ids that are not below {own.vocab_size}")
        shares_embeddings = self.reads_embeddings and not own.own_embeddings
        comparisons = [
            ("architecture", own.target_type, config.model_type),
            ("a hidden size of", own.target_hidden_size, config.hidden_size),
            ("a vocabulary of", own.vocab_size, lm_head.weight.shape[0]),
            ("this number of layers:", own.num_target_layers, num_layers(target)),
            ("embeddings of width", shares_embeddings and own.hidden_size, embed.weight.shape[1]),
            ("an output matrix of width", not own.own_lm_head and own.hidden_size, lm_head.weight.shape[1]),
        ]
        check_target(comparisons, own.base_model)
        like = next(self.parameters())
        return BoundHead(
            self,
            _checked_layers(self, num_layers(target), aux_hidden_state_layers),
            self.embed_tokens or embed,
            self.lm_head or lm_head,
            like,
            like.new_full((), -torch.inf),
        )


@dataclass(eq=False)
class BoundHead:
    """A head together with the target that it drafts for; see `DraftHead.bind`."""

    head: Any  # None in a captured function, which must not keep it
    aux_hidden_state_layers: tuple[int, ...]  # the `hidden_states` indices that are concatenated to features
    embedding: Any  # the head's own, or the target's; so is the output matrix
    output_matrix: Any
    like: torch.Tensor  # a parameter of the head, for dtype and device
    left_out: torch.Tensor  # the logit of tokens that cannot be drafted

    @property
    def weights(self) -> tuple[int, ...]:
        """Identifies the matrices that may be the target's."""
        matrices = self.embedding, self.output_matrix
        return tuple(value for module in matrices for value in (id(module), module.weight.data_ptr()))

    def of_head(self, head: Any) -> BoundHead:
        """A copy with another head, or with None so that it does not keep the head."""
        return replace(self, head=head)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[batch, length]` target token ids to `[batch, length, hidden]` embeddings."""
        embeddings = self.embedding(token_ids.to(self.embedding.weight.device)).to(self.like)
        if (mask := self.head.mask_embedding) is None:
            return embeddings
        is_mask = token_ids.to(self.like.device).eq(cast(int, self.head.config.mask_token_id))
        return torch.where(is_mask[..., None], mask, embeddings)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` of `HeadOutput.output` to `[..., draft_vocab_size]`; select the positions first."""
        return self.head.scale_logits(self.output_matrix(output.to(self.output_matrix.weight)).to(output.device))

    def target_logits(self, output: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., vocab]`; tokens that are not in the draft vocabulary get -inf."""
        return self.to_target_vocabulary(self.logits(output))

    def to_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """`[..., draft_vocab_size]` to `[..., vocab]`; tokens that are not in the draft vocabulary get -inf."""
        head = self.head
        if head.draft_to_target is None:
            return logits
        left_out = self.left_out.expand(*logits.shape[:-1], head.config.vocab_size)
        return left_out.index_copy(-1, head.draft_to_target, logits)


def check_target(comparisons: Iterable[tuple[str, Any, Any]], base_model: str | None = None) -> None:
    """Raise a `ValueError` if a property that the head specifies differs from that of the target."""
    origin = f" ({base_model[:120]})" if base_model else ""
    for name, expected, actual in comparisons:
        if expected and expected != actual:
            raise ValueError(
                f"the head was made for a target{origin} with {name} {str(expected)[:80]}, but this target has "
                f"{actual}; load the head that belongs to it"
            )


def _checked_layers(head: DraftHead, num_layers: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The `hidden_states` indices to read: those given, those of the config, or the format's default."""
    config = head.config
    given = layers or config.aux_hidden_state_layers
    layers = tuple(given or head.default_layers(num_layers))
    if len(layers) != config.num_aux_hidden_states:
        raise ValueError(
            f"the head reads {config.num_aux_hidden_states} hidden states of the target, but aux_hidden_state_layers "
            f"are {layers}"
        )
    if given and not all(0 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"aux_hidden_state_layers {layers} are not all between 0 and {num_layers}, the target's number of layers"
        )
    return layers
