"""Speed of the adaptive depth with T(q) learnt from steps, on a simulated machine whose speed changes.

A chain of free draft tokens, each accepted with the same probability given those before it. The first step of the first
call may be delayed; the same policy with T(q) given is the reference. No time is measured: the steps' times are random
numbers, the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from hf_specgen.call import Call, DraftingSettings, GenerationState
from hf_specgen.call_statistics import RowStep, StepRecord
from hf_specgen.depth import AdaptiveDepth, CostCurve, LatencyModel

PASS_SECONDS = {1: 1.0, 2: 1.15, 3: 1.2, 4: 1.6, 5: 1.65, 6: 1.6, 7: 1.8, 8: 1.9, 16: 2.2, 24: 2.4, 64: 4.2}
"""T(q), with T(1) = 1: SmolLM2-135M in float32 on two threads of an Intel Xeon."""
DELAY = 0.4  # of the first step, in logarithms of seconds
ACCEPTANCE, CALLS, NEW_TOKENS, K = (0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9), 6, 64, 16


def learnt_latency(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Geometric means over processes of six calls each; "lowest" is the process with the slowest later calls."""
    curve = CostCurve(tuple(PASS_SECONDS), tuple(PASS_SECONDS.values()), 100, 1)
    variants = {
        "learnt": (AdaptiveDepth(), 0.0),
        "learnt, first step delayed": (AdaptiveDepth(), DELAY),
        "given": (AdaptiveDepth(LatencyModel.from_curves(curve)), 0.0),
    }
    rows = []
    for acceptance in ACCEPTANCE[:1] if quick else ACCEPTANCE:
        for name, (policy, delay) in variants.items():
            processes = range(2 if quick else 60)
            logs = np.log([list(_calls(policy, seed, acceptance, delay)) for seed in processes])
            later = logs[:, 1:].mean(1)
            speeds = {"first call": logs[:, 0].mean(), "later calls": later.mean(), "lowest": later.min()}
            row = {"acceptance": acceptance, "T(q)": name}
            rows.append(row | {key: float(np.exp(value)) for key, value in speeds.items()})
    return rows


class _Model(nn.Module):
    """What latencies are kept for."""

    device, dtype, tp_size, _device_mesh = torch.device("cpu"), torch.float32, 1, None

    def __init__(self, name: str):
        super().__init__()
        text_config = SimpleNamespace(_attn_implementation="sdpa")
        self.config = SimpleNamespace(
            is_encoder_decoder=False, get_text_config=lambda **_: text_config, to_json_string=lambda: name
        )

    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding(1, 1)


def _calls(policy: AdaptiveDepth, seed: int, acceptance: float, delay: float) -> Iterator[float]:
    """The speed over plain decoding of each call of a process, by the time that its steps would take undisturbed."""
    random = np.random.default_rng(seed)
    model = _Model(f"{policy} {seed} {acceptance} {delay}")
    queries, seconds = list(PASS_SECONDS), list(PASS_SECONDS.values())
    for _ in range(CALLS):
        session = policy.start(_call(model))
        speed = random.normal(0, 0.2)
        time, tokens = 0.0, 0
        while tokens < NEW_TOKENS:
            # The speed changes by 4% a step, and by 35% in one step of 50; other processes delay one step of 20.
            speed += random.normal(0, 0.04) + (random.normal(0, 0.35) if random.random() < 0.02 else 0.0)
            delay += abs(random.normal(0, 0.6)) if random.random() < 0.05 else 0.0
            depth = session.depths([NEW_TOKENS])[0]
            accepted = int((random.random(depth) < acceptance).cumprod().sum())
            undisturbed = float(np.interp(1 + depth, queries, seconds))
            measured = 0.04 * undisturbed * np.exp(speed + random.normal(0, 0.06) + delay)
            times = {"draft": 1e-4, "forward": measured, "thread": measured}
            session.observe(StepRecord([depth], [RowStep(depth, depth, accepted, accepted + 1)], 1 + depth, times, ()))
            time += undisturbed
            tokens += accepted + 1
            delay = 0.0
        yield tokens / time


def _call(model: Any) -> Call:
    state = GenerationState(torch.ones(1, 100, dtype=torch.long), max_length=100 + NEW_TOKENS)
    state.append(0, [1])
    settings = DraftingSettings(K, ("simulated", K), negligible_draft_cost=True, adaptive_tree=False)
    return Call(model, state, GenerationConfig(), settings)
