"""Drafters that know the answer or nothing, and a policy of any depths; written as an extension author would."""

from collections.abc import Callable, Sequence
from random import Random

from hf_specgen import Call, Candidates, DraftSession, DraftTree, Policy, PolicySession

Nodes = tuple[list[int], tuple[int, ...]]
"""Tokens and parents of a row's draft tree; parent -1 continues the row."""

Script = Callable[[int, list[int], int], Nodes]
"""Proposes tokens for one row, given its number, its generated tokens and the depth; one object a call."""


class Scripted(Candidates):
    """Proposes what a script says, which is made anew for each call."""

    def __init__(self, start_script: Callable[[], Script], k: int, policy: Policy | None):
        super().__init__(k, policy)
        self._start_script = start_script

    def start(self, call: Call) -> DraftSession:
        return _ScriptedSession(call, self._start_script())


class _ScriptedSession(DraftSession):
    def __init__(self, call: Call, script: Script):
        super().__init__(call)
        self._script = script

    def draft(self, budget: Sequence[int]) -> DraftTree:
        rows = enumerate(zip(self.call.state.generated, budget, strict=True))
        nodes = [self._script(row, generated, depth) if depth else ([], ()) for row, (generated, depth) in rows]
        return DraftTree.from_nodes(nodes)


class RandomDepths(Policy):
    """Any depth in any row at any step, plain steps included."""

    def __init__(self, seed: int = 0):
        self._seed = seed

    def start(self, call: Call) -> PolicySession:
        return _RandomDepthsSession(Random(self._seed), call.drafting.k)


class _RandomDepthsSession(PolicySession):
    def __init__(self, random: Random, k: int):
        self._random, self._k = random, k

    def depths(self, limits: Sequence[int]) -> list[int]:
        if self._random.random() < 0.2:
            return [0] * len(limits)
        return [self._random.choice((0, 1, 2, self._k, self._k)) for _ in limits]
