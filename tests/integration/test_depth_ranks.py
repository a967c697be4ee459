"""Ranks of one tensor-parallel model draft alike although their clocks differ; replicas do not wait for each other."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_specgen.depth import AdaptiveDepth, CostCurve
from hf_specgen.depth.ranks import from_first_rank, is_first_rank, lockstep_group
from tests.helpers.depth_simulator import Candidates, Simulation
from tests.helpers.processes import run_in_ranks

Requested = dict[str, list[list[int]]]


class Model:
    """What is read of a model that may be spread over ranks."""

    tp_size: int = 1
    _device_mesh: Any = None


def requested_depths(rank: int, store: str, caches: str) -> Requested:
    """In a rank of its own: the depths of every step, by layout of the four ranks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    requested = {}
    for layout in ("one mesh", "replicas", "apart"):
        os.environ["HF_SPECGEN_CACHE"] = f"{caches}/{rank} {layout}"  # as on machines of their own
        model = Model()
        if layout != "apart":
            dims, names = {"one mesh": ((4,), ("tp",)), "replicas": ((2, 2), ("dp", "tp"))}[layout]
            model.tp_size, model._device_mesh = dims[-1], init_device_mesh("cpu", dims, mesh_dim_names=names)
        replica = rank // model.tp_size
        # Verifying and drafting are cheap on the first rank, expensive on the others: alone, they would draft so
        cheap = rank % model.tp_size == 0 if layout != "apart" else rank == 0
        curve = CostCurve((1, 16), (0.010, 0.012 if cheap else 0.060), 256, 1)
        candidates = Candidates(8, negligible_draft_cost=False)
        simulation = Simulation(
            lambda step, row, i: 0.7 if step < 60 else 0.2, curve, candidates, noise=0.2, model=model
        )
        simulation.draft_token, simulation.prefill = (0.0003, 0.0001) if cheap else (0.004, 0.003)
        simulation.seed = replica if layout != "apart" else 0
        steps = 100 + 50 * replica  # replicas take different numbers of steps
        simulation.run(AdaptiveDepth(), steps)
        requested[layout] = simulation.requested
        dist.barrier()
    dist.destroy_process_group()
    return requested


@pytest.fixture(scope="module")
def requested(tmp_path_factory: pytest.TempPathFactory) -> list[Requested]:
    """The depths of every step by rank and layout of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_in_ranks(requested_depths, [(rank, str(folder / "store"), str(folder)) for rank in range(4)])


@pytest.mark.parametrize(
    ("layout", "groups"), [("one mesh", [[0, 1, 2, 3]]), ("replicas", [[0, 1], [2, 3]]), ("apart", [])]
)
def test_ranks_of_one_model_decide_alike_and_replicas_do_not_wait(
    requested: list[Requested], layout: str, groups: list[list[int]]
) -> None:
    """B7: agreement on the world group makes replicas wait for each other, so that one never returns."""
    depths = [of_rank[layout] for of_rank in requested]
    for group in groups:
        assert all(depths[rank] == depths[group[0]] for rank in group)
    if not groups:
        assert depths[0] != depths[1]
    assert max(depth for (depth,) in depths[0]) > 3


def test_model_of_one_process_needs_no_agreement() -> None:
    assert lockstep_group(None) is None
    assert lockstep_group(SimpleNamespace(tp_size=None)) is None
    assert lockstep_group(SimpleNamespace(tp_size=4)) is None, "nothing was initialised, so there are no other ranks"
    assert from_first_rank("value", None) == "value" and is_first_rank(None)


def test_model_whose_ranks_are_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    with pytest.raises(ValueError, match="spread over 2 of 8 processes, but has no device mesh"):
        lockstep_group(SimpleNamespace(tp_size=2, _device_mesh=None))
