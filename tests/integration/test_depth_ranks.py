"""Ranks of one tensor-parallel model draft alike although their clocks differ; replicas do not wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_specgen.depth.ranks import from_first_rank, is_first_rank, lockstep_group

WORKER = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from hf_specgen.depth import AdaptiveDepth, CostCurve
from tests.helpers.depth_simulator import Candidates, Simulation

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=4)

class Model:
    tp_size, _device_mesh = 1, None

requested = {}
for layout in ("one mesh", "replicas", "apart"):
    os.environ["HF_SPECGEN_CACHE"] = f"{out}.{layout}.cache"  # as on machines of their own
    model = Model()
    if layout != "apart":
        dims, names = {"one mesh": ((4,), ("tp",)), "replicas": ((2, 2), ("dp", "tp"))}[layout]
        model.tp_size, model._device_mesh = dims[-1], init_device_mesh("cpu", dims, mesh_dim_names=names)
    replica = rank // model.tp_size
    # Verifying and drafting are cheap on the first rank, expensive on the others: alone, these would draft otherwise.
    cheap = rank % model.tp_size == 0 if layout != "apart" else rank == 0
    curve = CostCurve((1, 16), (0.010, 0.012 if cheap else 0.060), 256, 1)
    candidates = Candidates(8, negligible_draft_cost=False)
    simulation = Simulation(lambda step, row, i: 0.7 if step < 60 else 0.2, curve, candidates, noise=0.2, model=model)
    simulation.draft_token, simulation.prefill = (0.0003, 0.0001) if cheap else (0.004, 0.003)
    simulation.seed = replica if layout != "apart" else 0
    steps = 100 + 50 * replica  # replicas take different numbers of steps
    simulation.run(AdaptiveDepth(), steps)
    requested[layout] = simulation.requested
    dist.barrier()
with open(out, "w") as file:
    json.dump(requested, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def requested(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[list[int]]]]:
    """The depths of every step by rank and layout of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"{rank}.json" for rank in range(4)]
    start, root = [sys.executable, "-c", WORKER], Path(__file__).resolve().parents[2]
    commands = [[*start, str(rank), str(folder / "store"), str(out)] for rank, out in enumerate(outs)]
    workers = [subprocess.Popen(command, cwd=root) for command in commands]
    try:
        assert [worker.wait(timeout=300) for worker in workers] == [0] * 4
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.parametrize(
    ("layout", "groups"), [("one mesh", [[0, 1, 2, 3]]), ("replicas", [[0, 1], [2, 3]]), ("apart", [])]
)
def test_ranks_of_one_model_decide_alike_and_replicas_do_not_wait(
    requested: list[dict[str, list[list[int]]]], layout: str, groups: list[list[int]]
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
