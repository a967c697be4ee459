"""Heads that draft all depths at once, for tests: recorded sessions, and drafts of which a known part is accepted."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_specgen import Call, DraftSession
from hf_specgen.candidates.draft_heads import HeadCandidates
from hf_specgen.targets.cache import RaggedCache
from tests.helpers.head_fixtures import features_of
from tests.helpers.head_sessions import causal_mask

RAISED = 50.0
"""Added to the logit of a token that is to be drafted."""
WRONG_EVERY = 4
"""Every so many tokens of a text are left to the head."""


class Steered:
    """A runner whose logits prefer the tokens that will be generated, but for every fourth.

    Args:
        runner: does all of the head's work.
        call: of the session.
        texts: by row the generated tokens of plain generate.

    Attributes:
        waiting: drafts in which an unfinished row had no new tokens.
    """

    def __init__(self, runner: Any, call: Call, texts: Sequence[Sequence[int]]):
        self._runner, self._state, self._texts = runner, call.state, texts
        self.waiting = 0

    def draft(self, features: Any, next_tokens: Any, needed: Sequence[bool], depth: int) -> torch.Tensor:
        self.waiting += any(needs and not new for needs, new in zip(needed, next_tokens, strict=True))
        logits = self._runner.draft(features, next_tokens, needed, depth)
        for row, text in enumerate(self._texts):
            known = len(self._state.generated[row])
            for place in range(known, min(known + depth, len(text))):
                if place % WRONG_EVERY:
                    logits[row, place - known, text[place]] += RAISED
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def recording(base: type[HeadCandidates], texts: Sequence[Sequence[int]] | None = None) -> Any:
    """A strategy class that keeps the session of the last call as `session`, steered if texts are given."""

    class Recording(base):  # type: ignore[misc, valid-type]
        session: Any

        def begin(self, call: Call, target: Any, bound: Any) -> DraftSession:
            self.session: Any = super().begin(call, target, bound)
            if texts is not None:
                self.session.runner = Steered(self.session.runner, call, texts)
            return self.session

    return Recording


@torch.no_grad()
def reread(session: Any, row: int, count: int, parallel: bool) -> RaggedCache:
    """The reference: the head's cache over a row's text, from scratch, in one pass.

    Args:
        session: after the call.
        row: of the call.
        count: positions.
        parallel: a P-EAGLE head, which reads tokens as well; otherwise a block head.
    """
    call, runner = session.call, session.runner
    bound = runner.bound
    text = torch.tensor([call.state.prompts[row] + call.state.generated[row]])
    states = call.model(text[:, :-1], output_hidden_states=True).hidden_states
    features, cache = features_of(bound, states)[:, :count], RaggedCache()
    positions = torch.arange(count)[None]
    if parallel:
        tokens = bound.embed(text[:, 1 : 1 + count])
        bound.head(tokens, bound.head.combine(features), positions, causal_mask([0], count), cache)
    else:
        bound.head.extend(features, positions, cache)
    return cache
