"""How a parallel draft model drafts (PARD), and what it reads of the target (PARD-2); see `draft_model_drafter.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.encoder_draft import embedding_size
from hf_specgen.candidates.features import FeatureQueue
from hf_specgen.heads.checkpoint import Fields, named_errors, read_linear
from hf_specgen.heads.config_keys import check_read
from hf_specgen.heads.source import Source

MASK_TOKEN_FIELDS = ("pard_token", "ptd_token_id")
CONFIG_FIELDS = (*MASK_TOKEN_FIELDS, "pard2", "pard2_target_layers", "pard2_scale")
"""What the config of a parallel draft model has."""
PROJECTION_FILE = "warp_model.bin"  # where a PARD-2 checkpoint holds the projection of the target's hidden states


@dataclass(frozen=True)
class ParallelDraft:
    """How a draft model drafts in one pass, from its config."""

    mask_token: int
    aux_hidden_state_layers: tuple[int, ...] = ()
    """Indices into `hidden_states` of the target (negative ones from the end) that PARD-2 reads; none for PARD."""
    scale: float = 0.0  # factor of their projection

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ParallelDraft | None:
        """None for a model that predicts one token at a time; `ValueError` for a key that its class does not read."""
        with named_errors(model.name_or_path or type(model).__name__):
            return cls._of_config(model)

    @classmethod
    def _of_config(cls, model: PreTrainedModel) -> ParallelDraft | None:
        config = Fields({name: getattr(model.config, name, None) for name in CONFIG_FIELDS})
        name = next((name for name in MASK_TOKEN_FIELDS if config.get(name) is not None), None)
        if name is None:
            return None
        mask = config.integer(name, 0)
        if mask >= embedding_size(model):
            raise ValueError(f"config.json has {name} {mask}, but the model has {embedding_size(model)} embeddings")
        # Keys that the config class of the model has are read by the model.
        class_keys = type(model.config)().to_dict()
        values = {name: value for name, value in model.config.to_dict().items() if name not in class_keys}
        # The last two only repeat the shape of the projection's tensors.
        check_read(values, {*CONFIG_FIELDS, "pard2_proj_bias", "pard2_target_dim"})
        if not config.flag("pard2"):
            return cls(mask)
        layers = config.get("pard2_target_layers")
        if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
            raise ValueError(f"pard2_target_layers must be a list of layers, got {layers!r:.80}")
        return cls(mask, tuple(layers), config.number("pard2_scale"))

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Layers of the target as non-negative indices; `ValueError` if it does not have them."""
        count = target.config.get_text_config().num_hidden_layers
        layers = self.aux_hidden_state_layers
        if not all(-count - 1 <= layer <= count for layer in layers):
            raise ValueError(
                f"the draft reads layers {list(layers)} of its target, but this target has {count} layers; use the "
                "draft that belongs to it"
            )
        return tuple(layer if layer >= 0 else count + 1 + layer for layer in layers)

    def projection(self, model: PreTrainedModel, target: PreTrainedModel) -> nn.Linear:
        """The projection of a PARD-2 checkpoint, on the model's device."""
        sizes = [int(one.config.get_text_config().hidden_size) for one in (model, target)]
        shape = sizes[0], sizes[1] * len(self.aux_hidden_state_layers)
        path = Source(str(model.name_or_path)).required_file(PROJECTION_FILE, "PARD-2 needs it; download it again")
        like: Any = model.get_input_embeddings()
        return read_linear(path, "target_proj.", shape).to(like.weight).requires_grad_(False)


class TargetFeatures:
    """Adds projected hidden states of the target to the embeddings of a draft model (PARD-2).

    Of each token those of the token before it; of the first token zeros, of mask tokens those of the last known token.
    """

    def __init__(self, batch: DraftBatch, draft: PreTrainedModel, settings: ParallelDraft):
        self.queue = FeatureQueue(batch, settings.layers_of(batch.model))
        self._state = batch.state
        self._scale = settings.scale
        self._projection = settings.projection(draft, batch.model)
        self._embeddings = draft.get_input_embeddings()

    def begin(self) -> None:
        """Receive the hidden states of the prompts, before the first step."""
        if not self.queue.has_rows:
            self.queue.receive()

    def _projected(self, features: Sequence[torch.Tensor], side: str) -> torch.Tensor:
        """`[batch, longest, hidden]` what is added to embeddings; with a bias also where there are no features."""
        padded = pad_sequence(list(features), batch_first=True, padding_side=side)
        return self._scale * self._projection(padded.to(self._projection.weight))

    def of_prompts(self) -> torch.Tensor:
        """`[batch, longest prompt, hidden]`; zeros for tokens that a passed cache already has, and for left padding."""
        # All features but those of generated tokens, which the first draft reads.
        generated = enumerate(self._state.generated)
        features = self.queue.pop_states([self.queue.available(row) - len(tokens) for row, tokens in generated])
        longest = max(map(len, self._state.prompts))
        features[0] = nn.functional.pad(features[0], (0, 0, longest - len(features[0]), 0))  # so that all are padded
        return self._projected(features, "left")

    def of_text(self, is_drafting: Sequence[bool], rows: Sequence[int], masks: Sequence[int]) -> torch.Tensor:
        """`[rows, tokens, hidden]` of all further tokens in the rows that draft, and of `masks[row]` mask tokens."""
        features = self.queue.pop_states([inf if drafting else 0 for drafting in is_drafting])
        with_masks = [torch.cat([features[row], features[row][-1:].repeat(masks[row], 1)]) for row in rows]
        return self._projected(with_masks, "right")

    @contextmanager
    def added(self, values: torch.Tensor) -> Iterator[None]:
        """Inside, and in this thread, `values` are added to what the embedding returns for the next tokens."""
        thread = threading.get_ident()
        begin = 0

        def add(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
            nonlocal begin
            if threading.get_ident() != thread:
                return None
            added = values[:, begin : begin + output.shape[1]]
            begin += output.shape[1]
            return output + added.to(output)

        handle = self._embeddings.register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()
