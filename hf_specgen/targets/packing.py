"""Decides which models of a call run with packed weights; see `hf_specgen.targets.packed_weights`.

With `pack_weights=True` target and drafter do, with `pack_weights=False` neither does. By default they do unless that
takes much memory: packed weights make a pass over a few tokens up to four times as fast on a CPU. Results differ by
rounding only, as they do between batch sizes.
"""

from __future__ import annotations

import logging
from typing import cast

from torch import nn

from hf_specgen.targets.packable import is_packable
from hf_specgen.targets.packed_weights import leave_unpacked, pack, runs_packed

MAX_BYTES = 2**30
"""A target is packed by default if its linear layers take at most so many bytes. Packing so many takes 0.5 s in
bfloat16 and 1.2 s in float32, once, on two cores."""
SMALL_DRAFTER, DRAFTER_SHARE = 64 * 2**20, 1 / 8
"""A drafter is packed by default if its linear layers take at most this many bytes, or at most this share of the bytes
of the target's parameters."""

logger = logging.getLogger("hf_specgen")


def pack_target(model: nn.Module, wanted: bool | None) -> bool:
    """Pack the target for this call; returns whether it runs with packed weights.

    Args:
        model: the target.
        wanted: `pack_weights` of the call.
    """
    if wanted is not None:
        return wanted and pack(model)
    return is_packed_by_default(model) and _pack_if_possible(model, repack=False)


def is_packed_by_default(target: nn.Module) -> bool:
    """Whether a target is packed unless `pack_weights=False`."""
    return 0 < sum(map(_bytes, _layers(target))) <= MAX_BYTES


def pack_drafter(drafter: nn.Module, target: nn.Module | None, wanted: bool | None) -> None:
    """Pack a drafter for this call. Its rounding affects which tokens are drafted, not which are accepted.

    By default not if the target, which is not packed, would run with its packed layers.

    Args:
        drafter: a draft model or head.
        target: the model that it drafts for; None if that is not known.
        wanted: `pack_weights` of the call.
    """
    if wanted:
        pack(drafter)
    if wanted is not None:
        return
    layers = _layers(drafter)
    of_target = 0 if target is None else sum(one.numel() * one.element_size() for one in target.parameters())
    unpacked = set() if target is None else {module for module in target.modules() if not runs_packed(module)}
    is_small = sum(map(_bytes, layers)) <= max(SMALL_DRAFTER, DRAFTER_SHARE * of_target)
    if layers and is_small and unpacked.isdisjoint(layers):
        _pack_if_possible(drafter, repack=True)


def _pack_if_possible(model: nn.Module, repack: bool) -> bool:
    try:
        return pack(model, repack)
    except (ValueError, RuntimeError) as error:  # nobody asked for it, so lack of memory is no failure
        logger.info("%s runs with ordinary weights: %s", type(model).__name__, error)
        leave_unpacked(model)
        return False


def _layers(model: nn.Module) -> list[nn.Linear]:
    return [cast(nn.Linear, module) for module in model.modules() if is_packable(module)]


def _bytes(layer: nn.Linear) -> int:
    return layer.weight.numel() * layer.weight.element_size()
