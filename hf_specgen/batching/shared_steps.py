"""Steps of several calls with common forward passes: what `generate_many` and continuous batching have in common.

Each call is decoded by a `DecodingLoop` of its own with one row, so its tokens do not depend on the others. In a common
step all loops plan, then the drafters with a forward pass draft for all of them at once, then each loop takes its
draft. The caller cuts the drafts by the latency of the step, runs the target on all of them in one pass, and lets each
loop verify its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from hf_specgen.batching.batched_drafter import joined
from hf_specgen.decoding import DecodingLoop
from hf_specgen.depth import AdaptiveDepth
from hf_specgen.depth.adaptive import DraftingLoss
from hf_specgen.depth.latency import StepLatency
from hf_specgen.settings import Settings
from hf_specgen.tree import DraftTree


class SharedSteps:
    """Plans and drafts the steps of calls, and counts what their drafts lose.

    Attributes:
        settings: of each call: a strategy whose sessions draft together, and a policy with a common `DraftingLoss`.
        latency: of the step, by its rows; None if it is not known, or no row decodes.
        passes: tokens of each forward pass of the drafters in the step.
    """

    def __init__(self, settings: Settings):
        policy, self._loss = copy.copy(settings.policy), DraftingLoss()
        if isinstance(policy, AdaptiveDepth):
            policy.shared_loss = self._loss
        candidates, self._drafters = joined(settings.candidates)
        self.settings = replace(settings, candidates=candidates, policy=policy)
        self.latency: StepLatency | None = None
        self.passes = list[int]()
        self._rows, self._has_draft = 0, False

    def begin(self, loops: Sequence[DecodingLoop], rows: int) -> None:
        """Begin a step of these calls, `rows` of which decode; the others are in their prefill."""
        known = loops[0].policy.latency
        context = max(loop.call.context_length for loop in loops)
        self.latency, self._rows = None if known is None or not rows else known.at(rows, context), rows

    def draft(self, loops: Sequence[DecodingLoop], may_draft: Sequence[bool]) -> list[DraftTree]:
        """The draft of each call, empty where it may not draft."""
        for loop, may in zip(loops, may_draft, strict=True):
            loop.state.other_rows = max(0, self._rows - 1)
            loop.plan_step(may)
        self._has_draft = any(any(loop.max_depths) for loop in loops)
        for drafter in self._drafters:
            drafter.draft()
        seconds = sum(drafter.seconds for drafter in self._drafters)
        self.passes = [tokens for drafter in self._drafters for tokens in drafter.passes]
        for loop in loops:
            loop.timer.add("draft", seconds)  # each call's timer receives the whole common time
        return [loop.draft_step() for loop in loops]

    def count_loss(self, seconds: float, emitted: int, passes: Sequence[int]) -> None:
        """Count a step with drafts, see `DraftingLoss.count`."""
        if self.latency is not None and self._has_draft:
            self._loss.count(self.latency, self._rows, seconds, passes, emitted / self._rows)

    def close(self) -> None:
        """End the common drafts."""
        for drafter in self._drafters:
            drafter.close()
