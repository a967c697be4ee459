"""Calls and targets without a model, for tests of depth policies."""

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from hf_specgen.call import Call, DraftingSettings, GenerationState
from hf_specgen.call_statistics import RowStep, StepRecord
from hf_specgen.depth import PolicySession

NUMBERS = count()


class Model(nn.Module):
    """What is read of a target model; those of one name have the same architecture."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(
            is_encoder_decoder=False,
            get_text_config=lambda **_: SimpleNamespace(_attn_implementation="sdpa"),
            to_json_string=lambda: name or f"{next(NUMBERS)}",
        )

    tp_size: int = 1
    _device_mesh: Any = None

    def get_input_embeddings(self) -> nn.Module:
        """On the device of the inputs."""
        return nn.Embedding(1, 1)


class Clock:
    """Stands in for `perf_counter` and `thread_time`; `Target` advances it, and a reading by a nanosecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


class Target:
    """A target whose passes take known times, by which the clock is advanced: T(q) / T(1) by tokens per row."""

    device = torch.device("cpu")

    def __init__(self, clock: Clock, relative: Any, last_position: float = 10**6):
        self.clock, self.relative, self.last_position = clock, relative, last_position
        self.first_positions = [10]
        self.passes: list[int] = []

    def forward(self, tree: Any, pending: Sequence[int]) -> None:
        """Take the time of a pass, in units of T(1) = 1 s."""
        self.passes.append(1 + tree.nodes)
        self.clock.now += self.relative(1 + tree.nodes)

    def copy(self) -> "Target":
        """Itself: it has no state that a drafter reads."""
        return self

    def capture_now(self) -> None:
        """Nothing is captured."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Nothing was appended."""


def depth_call(
    rows: int = 1,
    prompt: int = 100,
    *,
    k: int = 16,
    negligible_draft_cost: bool = True,
    adaptive_tree: bool = False,
    model: Any = None,
    temperature: float = 0.0,
    max_new_tokens: float = float("inf"),
) -> Call:
    """A call whose rows have prompts of this length and one generated token."""
    state = GenerationState(torch.ones(rows, prompt, dtype=torch.long), max_length=prompt + max_new_tokens)
    for row in range(rows):
        state.append(row, [1])
    config = GenerationConfig(do_sample=temperature > 0, temperature=temperature or None)
    settings = DraftingSettings(k, ("draft_model", k), negligible_draft_cost, adaptive_tree)
    return Call(model, state, config, settings)


def run(session: PolicySession, steps: int, accepted: Sequence[int], relative: Any = None) -> list[list[int]]:
    """Run a session for some steps; returns the depths of all of them.

    `accepted`: the most tokens that each row accepts in a step.
    `relative`: seconds of a pass by tokens per row, where the session times the steps.
    """
    depths = []
    for _ in range(steps):
        requested = session.depths([99] * len(accepted))
        depths.append(requested)
        counts = [(depth, min(depth, most)) for depth, most in zip(requested, accepted, strict=True)]
        rows = [RowStep(depth, depth, count, count + 1) for depth, count in counts]
        seconds = {"draft": 0.1, "forward": 1.0} | ({"thread": relative(1 + max(requested))} if relative else {})
        session.observe(StepRecord(requested, rows, 1 + max(requested), seconds, None))
    return depths
