"""What a forward pass of a step takes beside tokens, mask and cache: positions, and inputs that accompany the text.

Images and audio belong to the prompt: their features lie in the cache once it has been read, and the model's own
`prepare_inputs_for_generation` leaves them out of later passes. That method is called once, after the prompt.
Rotary positions may have several axes (text, time, height, width): after the prompt all advance by one with each
token, so that every row has a constant distance between its axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hf_specgen.tree import DraftTree

OWN_ARGUMENTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
    "use_cache",
}
"""What the target passes itself."""
TOKEN_TYPES = {"token_type_ids": "last", "mm_token_type_ids": "text", "moe_mm_token_type_ids": "text"}
"""Arguments with one value per token, and what generated tokens have: the last token's, or that of text (0)."""


def accompanying_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that hold data beside the text: images, audio, token types."""
    return {
        name: value
        for name, value in model_kwargs.items()
        if name not in OWN_ARGUMENTS and (isinstance(value, torch.Tensor) or (isinstance(value, dict) and value))
    }


def step_tokens(tree: DraftTree, pending: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`[batch, 1 + nodes]` input tokens of a step: the last token of each row, then its draft."""
    if isinstance(pending, torch.Tensor) or not tree.tokens.is_cpu:
        first = torch.as_tensor(pending).to(device)[:, None]
        return torch.cat([first, tree.tokens.to(device)], dim=1)
    # On the CPU by way of numpy: a fifth of the time of torch.cat.
    tokens = np.empty((tree.batch, 1 + tree.nodes), dtype=np.int64)
    tokens[:, 0] = pending
    tokens[:, 1:] = tree.tokens.numpy()
    return on_device(tokens, device)


def on_device(values: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A tensor of numbers that Python has computed: by way of numpy in a third of the time of torch.tensor."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device)


class StepInputs:
    """Makes the arguments of the forward passes after the prompt.

    Args:
        model: the target.
        input_ids: `[batch, prompt]`.
        model_kwargs: as prepared by `generate`; positions `[batch, prompt]` or `[axes, batch, prompt]`.
    """

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]):
        self._model, self._input_ids, self._kwargs = model, input_ids, model_kwargs
        last = model_kwargs["position_ids"][..., -1]
        last = last.expand(*last.shape[:-1], len(input_ids))
        self._axes: torch.Tensor | None = None
        if last.dim() > 1:
            self._axes, last = last - last[:1], last[0]
        self.first_positions: tuple[int, ...] = tuple(position + 1 for position in last.tolist())
        """The position of each row's first generated token, on the first axis."""
        self.accompanies_text = bool(accompanying_inputs(model_kwargs))
        """Whether the prompt has inputs beside text."""
        self._extra: dict[str, Any] | None = None

    @property
    def divisible(self) -> bool:
        """Whether rows can be dropped: not if there are tensors whose batch dimension is unknown."""
        return all(name in TOKEN_TYPES for name in accompanying_inputs(self._extra or {}))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only."""
        self._axes = None if self._axes is None else self._axes[:, list(rows)]
        for name in TOKEN_TYPES.keys() & (self._extra or {}).keys():
            self._extra[name] = self._extra[name][list(rows)]  # type: ignore[index]

    def positions(self, text: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens]` positions on the first axis to those on all axes."""
        return text if self._axes is None else text + self._axes[..., None].to(text.device)

    def text_cache(self, given: Any) -> Any:
        """Of the cache that `generate` passes on, the part for the text."""
        return given

    def past_key_values(self, cache: Any) -> Any:
        """The cache as the model takes it; `cache` is the part for the text."""
        return cache

    def returned_cache(self, cache: Any, past_key_values: Any) -> Any:
        """The cache that the caller gets: of `cache`, and what `past_key_values` returned for it."""
        return cache

    def arguments(
        self, tokens: dict[str, torch.Tensor], mask: Any, positions: torch.Tensor, cache: Any
    ) -> dict[str, Any]:
        """The arguments of a pass.

        Args:
            tokens: the input of the pass, under the name that the model or the part to run has for it.
            mask: as its attention takes it.
            positions: `[batch, tokens]` on the first axis.
            cache: as `past_key_values` returned it.
        """
        return {
            **tokens,
            "attention_mask": mask,
            "position_ids": self.positions(positions),
            "past_key_values": cache,
            **self.extra(cache, positions.shape[1]),
        }

    def extra(self, cache: Any, tokens: int) -> dict[str, Any]:
        """The other arguments of a pass over so many tokens per row, once the prompt is in the cache."""
        if self._extra is None:
            self._extra = self._after_prompt(cache)
        types = {name: self._extra[name].expand(-1, tokens) for name in TOKEN_TYPES.keys() & self._extra.keys()}
        return {**self._extra, **types}

    def _after_prompt(self, cache: Any) -> dict[str, Any]:
        """The arguments that the model's own preparation passes on in the first step after the prompt."""
        kwargs = {name: value for name, value in self._kwargs.items() if name != "logits_to_keep"}
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        kwargs["position_ids"] = kwargs["position_ids"][..., -1:] + 1
        for name in TOKEN_TYPES.keys() & kwargs.keys():
            kwargs[name] = kwargs[name][:, -1:] if TOKEN_TYPES[name] == "last" else kwargs[name][:, -1:] * 0
        prepared = self._prepared({**kwargs, "past_key_values": cache})
        return {name: value for name, value in prepared.items() if name not in OWN_ARGUMENTS and value is not None}

    def _prepared(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        model = cast(Any, self._model)
        return dict(model.prepare_inputs_for_generation(self._input_ids[:, -1:], next_sequence_length=1, **kwargs))
