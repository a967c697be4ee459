"""The noise by which calls choose their tokens."""

from typing import Any

import torch

from hf_specgen import Call
from hf_specgen.verification import ExactVerifier


class RecordedNoise(ExactVerifier):
    """Keeps the noise by which the tokens of its calls were chosen."""

    def __init__(self) -> None:
        self.noise: list[bytes] = []

    def start(self, call: Call) -> Any:
        session = super().start(call)
        end = session.end

        def end_recorded(positions: int) -> None:
            self.noise += list(steps.values())[:positions]
            end(positions)

        steps, choose = dict[int, bytes](), session.choose

        def choose_recorded(scores: torch.Tensor, places: Any, *given: Any) -> torch.Tensor:
            tokens = choose(scores, places, *given)
            for step in sorted({step for row in places for step in row}):
                noise = session.draft_noise([[step]] * call.state.batch, torch.device("cpu"))
                steps.setdefault(step, noise.numpy().tobytes())
            return tokens

        session.choose, session.end = choose_recorded, end_recorded
        return session
