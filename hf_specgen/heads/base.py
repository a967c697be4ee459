"""Base classes of draft heads that read the target's hidden states, and how a head is attached to a target.

    features of the target ─► head.combine ─► hidden ─┐
                                                      ├─► head(embeddings, hidden, …) ─► HeadOutput
    next token ─► attached.embed ─► embeddings ───────┘                                   │      │
                                                              fed to the next step ◄─ hidden   output ─► attached.logits

A head owns the weights of its checkpoint. Those that the checkpoint leaves out (usually the embedding, often the output
matrix) are the target's, shared by `AttachedHead`: they are neither copied nor saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.heads import taps


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Configuration that all heads have in common: their sizes, and those of the target that they fit.

    Args:
        hidden_size: width of the states that the head passes from step to step.
        vocab_size: the target's.
        target_hidden_size: width of the target's hidden states.
        num_taps: how many of the target's hidden states are concatenated to a feature.
        taps: their `hidden_states` indices; None for the format's default for the target's number of layers.
        draft_vocab_size: how many tokens the head can propose; `vocab_size` means all of them.
        own_embeddings, own_lm_head: whether the head has its own embedding and output matrix, or uses the target's.
        speculative_tokens: the number of draft tokens that the checkpoint recommends.
        base_model: Hub id or path of the target that it was trained for, if known.
        num_target_layers: number of layers of that target, if known.

    Raises:
        ValueError: if the numbers contradict each other.
    """

    hidden_size: int
    vocab_size: int
    target_hidden_size: int
    num_taps: int
    taps: tuple[int, ...] | None = None
    draft_vocab_size: int
    own_embeddings: bool = False
    own_lm_head: bool = False
    speculative_tokens: int | None = None
    base_model: str | None = None
    num_target_layers: int | None = None

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
        if self.taps is not None and len(self.taps) != self.num_taps:
            raise ValueError(f"the head reads {self.num_taps} hidden states of the target, but taps are {self.taps}")


class HeadOutput(NamedTuple):
    """The output of a head for each position, both `[batch, length, hidden]`.

    `hidden` replaces the combined features in the next draft step; `output` is the input of the output matrix.
    """

    hidden: torch.Tensor
    output: torch.Tensor


class DraftHead(nn.Module):
    """Base class of the heads; a subclass adds its layers, `default_taps`, `combine` and `forward`.

    Args:
        config: the head's configuration.
    """

    lm_head: nn.Module | None
    draft_to_target: torch.Tensor | None
    """`[draft_vocab_size]` the target's id of each draft id; None if the vocabularies are the same."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        )
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size) if reduced else None)

    def default_taps(self, num_layers: int) -> tuple[int, ...]:
        """The `hidden_states` indices that the format reads of a target with `num_layers` layers by default."""
        raise NotImplementedError

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's token ids of draft token ids, in the same shape."""
        return draft_ids if self.draft_to_target is None else self.draft_to_target[draft_ids]

    def attach(self, target: PreTrainedModel, taps: Sequence[int] | None = None) -> AttachedHead:
        """Check that the head can draft for `target`, and share the target's weights that the head lacks.

        Args:
            target: the model that the head was trained for; it is not changed.
            taps: `hidden_states` indices to read instead of the configured ones.

        Raises:
            ValueError: naming the first mismatch.
        """
        return AttachedHead(self, target, taps)


class AttachedHead:
    """A head together with the target that it drafts for; see `DraftHead.attach`."""

    taps: tuple[int, ...]
    """The `hidden_states` indices that `features` reads."""

    def __init__(self, head: DraftHead, target: PreTrainedModel, taps: Sequence[int] | None = None) -> None:
        config = target.config.get_text_config()
        self.head = head
        embed: Any = target.get_input_embeddings()
        lm_head: Any = target.get_output_embeddings()
        if lm_head is None:
            raise ValueError(f"{type(target).__name__} has no output matrix, which draft heads need")
        self._check_sizes(config.hidden_size, embed.weight.shape[0], embed.weight.shape[1], lm_head.weight.shape[1])
        self.taps = _checked_taps(head, config.num_hidden_layers, taps)
        self._embed: Any = head.embed_tokens or embed
        self._lm_head: Any = head.lm_head or lm_head
        self._like = next(head.parameters())

    def _check_sizes(self, hidden: int, vocab: int, embedding: int, output: int) -> None:
        config = self.head.config
        pairs = [("a hidden size of", config.target_hidden_size, hidden), ("a vocabulary of", config.vocab_size, vocab)]
        if not config.own_embeddings:
            pairs.append(("embeddings of width", config.hidden_size, embedding))
        if not config.own_lm_head:
            pairs.append(("an output matrix of width", config.hidden_size, output))
        for what, wanted, found in pairs:
            if wanted != found:
                origin = f" ({config.base_model})" if config.base_model else ""
                raise ValueError(
                    f"the head was made for a target{origin} with {what} {wanted}, but this target has {found}; "
                    "load the head that belongs to it"
                )

    @property
    def capture_arguments(self) -> dict[str, Any]:
        """Arguments of the target's forward pass that make it return the states that `features` reads."""
        return taps.capture_arguments(self.taps)

    def features(self, hidden_states: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The target's `hidden_states` as `[batch, length, taps * target_hidden]`, in the head's dtype and device."""
        return taps.concatenate(hidden_states, self.taps).to(self._like)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[batch, length]` target token ids to `[batch, length, hidden]` embeddings."""
        return self._embed(token_ids.to(self._embed.weight.device)).to(self._like)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` of `HeadOutput.output` to `[..., draft_vocab_size]`; select the positions first."""
        return self._lm_head(output.to(self._lm_head.weight)).to(output.device)

    def target_logits(self, output: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` of `HeadOutput.output` to `[..., vocab]` over the target's vocabulary.

        Tokens that are not in the draft vocabulary get -inf.
        """
        logits, head = self.logits(output), self.head
        if head.draft_to_target is None:
            return logits
        scattered = logits.new_full((*logits.shape[:-1], head.config.vocab_size), -torch.inf)
        scattered[..., head.draft_to_target] = logits
        return scattered

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's token ids of draft token ids, in the same shape."""
        return self.head.target_ids(draft_ids)


def _checked_taps(head: DraftHead, num_layers: int, given: Sequence[int] | None) -> tuple[int, ...]:
    config = head.config
    if config.num_target_layers is not None and config.num_target_layers != num_layers:
        raise ValueError(
            f"the head was made for a target of {config.num_target_layers} layers, but this one has {num_layers}; "
            "load the head that belongs to it"
        )
    chosen = tuple(given if given is not None else config.taps or head.default_taps(num_layers))
    if len(chosen) != config.num_taps:
        raise ValueError(f"the head reads {config.num_taps} hidden states of the target, but taps are {chosen}")
    if not all(0 <= tap <= num_layers for tap in chosen):
        raise ValueError(f"taps {chosen} are not all between 0 and {num_layers}, the target's number of layers")
    return chosen
