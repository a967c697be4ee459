"""Agreement between the ranks of a tensor-parallel model: all use the latencies that the first rank measured."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def lockstep_group(model: Any) -> Any:
    """The process group whose ranks run every step of the model together; None if there is no such group.

    Only the tensor-parallel group of the model's device mesh is meant. Replicas of the model, as under
    `accelerate launch`, take different numbers of steps and must not wait for each other.
    """
    size = getattr(model, "tp_size", None) or 1
    if size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        if dist.get_world_size() == size:
            return dist.group.WORLD
        raise ValueError(
            f"the model is spread over {size} of {dist.get_world_size()} processes, but has no device mesh that names "
            "them; give a fixed depth such as k=5, or a latency file, so that no agreement is needed"
        )
    names = mesh.mesh_dim_names or ()
    return (mesh["tp"] if "tp" in names and mesh.ndim > 1 else mesh).get_group()


def from_first_rank(value: T, group: Any) -> T:
    """The value of the group's first rank, on each of its ranks; all of them call it in the same step."""
    if group is None:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    return holder[0]
