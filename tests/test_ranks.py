"""Two ranks of one model must draft alike, although their clocks differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, sys
import torch.distributed as dist
from hf_specgen.adaptive import Controller
from hf_specgen.evaluation.cost import CostCurve
from tests.simulator import Simulation

rank, store, out = int(sys.argv[1]), *sys.argv[2:4]
together, cheap = sys.argv[4] == "together", sys.argv[5] == "cheap"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
dist.barrier()  # a rank that has done its work and left would be missed by one that is still connecting

class Model:
    tp_size = 2 if together else None

# Widening, drafting and reading cost rank 0 little and rank 1 much: each by itself would draft differently.
curve = CostCurve((1, 16), ((0.010, 0.012), (0.010, 0.060))[rank], 256, 1)
acceptance = lambda step, row, i: 0.7 if step < 60 else 0.2  # noqa: E731
simulation = Simulation(acceptance, curve, noise=0.2, seed=5, negligible_draft_cost=cheap)
simulation.model = Model()
if not cheap:
    simulation.draft_token, simulation.reading = (0.0003, 0.004)[rank], (0.0001, 0.003)[rank]
rate = simulation.run(Controller(), 150)
open(out, "w").write(json.dumps(simulation.depths))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("cheap", ["cheap", "network"])
@pytest.mark.parametrize("together", ["together", "apart"])
def test_two_ranks_agree(tmp_path: Path, together: str, cheap: str) -> None:
    """Ranks of one model use what rank 0 measured; ranks that work side by side decide by their own clocks."""
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    start, store = [sys.executable, "-c", WORKER], str(tmp_path / "store")
    arguments = [[*start, str(rank), store, str(outs[rank]), together, cheap] for rank in (0, 1)]
    root = Path(__file__).resolve().parents[1]
    workers = [subprocess.Popen(argument, cwd=root) for argument in arguments]
    assert [worker.wait(timeout=500) for worker in workers] == [0, 0]
    first, second = (json.loads(out.read_text()) for out in outs)
    assert (first == second) == (together == "together")
    assert max(depth for (depth,) in first) > 3
