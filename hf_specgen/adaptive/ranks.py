"""Ranks that compute one model together must draft alike: they use what rank 0 has measured."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def agrees_with_others(model: Any) -> bool:
    """Whether the model is spread over ranks that run every step together (tensor parallelism).

    Processes that merely work side by side, as under `accelerate launch` with a share of the prompts each, take
    different numbers of steps; they must not wait for each other.
    """
    spread = (getattr(model, "tp_size", None) or 1) > 1 or getattr(model, "_device_mesh", None) is not None
    return spread and dist.is_available() and dist.is_initialized()


def from_first_rank(value: Any) -> Any:
    """Rank 0's `value`, on every rank; all must call it at the same step."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]
