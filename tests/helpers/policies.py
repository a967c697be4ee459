"""Policies that take plain steps between drafts, or before them."""

from collections.abc import Sequence
from itertools import cycle

from hf_specgen import Call, Policy, PolicySession


class AfterPlainSteps(Policy):
    """Drafts 4 tokens from the step on in which every active row has more than `tokens` generated tokens."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def start(self, call: Call) -> PolicySession:
        return _AfterPlainStepsSession(self.tokens, call)


class _AfterPlainStepsSession(PolicySession):
    def __init__(self, tokens: int, call: Call):
        self._tokens, self._call = tokens, call

    def depths(self, limits: Sequence[int]) -> list[int]:
        state = self._call.state
        active = [len(text) for row, text in enumerate(state.generated) if not state.has_ended(row)]
        return [4 if min(active, default=0) > self._tokens else 0] * len(limits)


class Pattern(Policy):
    """Drafts these numbers of tokens in turn, 0 for a plain step."""

    def __init__(self, *depths: int):
        self.pattern = depths

    def start(self, call: Call) -> PolicySession:
        return _PatternSession(self.pattern)


class _PatternSession(PolicySession):
    def __init__(self, pattern: Sequence[int]):
        self._depths = cycle(pattern)

    def depths(self, limits: Sequence[int]) -> list[int]:
        return [next(self._depths)] * len(limits)
