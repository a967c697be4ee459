"""Calls without a model, for tests of single sessions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_specgen import Candidates, DraftCall, NgramCandidates
from hf_specgen.call import GenerationState
from hf_specgen.device_tree import Ancestors, Frontier
from hf_specgen.tree import Parents

AMPLE = 2**31
"""A budget that limits no draft."""


def make_state(prompts: Sequence[Sequence[int]]) -> GenerationState:
    """The state of prompts of any lengths, left-padded with 0."""
    width = max(1, *map(len, prompts)) if prompts else 1
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return GenerationState(ids, mask)


def make_call(
    state: GenerationState, *, candidates: Candidates | None = None, processors: Any = None, do_sample: bool = False
) -> DraftCall:
    """A call in this state, without model and target."""
    settings, config = (candidates or NgramCandidates(k=4)).settings(), GenerationConfig(do_sample=do_sample)
    return DraftCall(None, state, config, settings, processors or LogitsProcessorList())


def frontier_of(tokens: torch.Tensor, depth: int, nodes: int, parent_index: torch.Tensor | None = None) -> Frontier:
    """The nodes of a drafter's next pass, for drafters that read no ancestors: `[rows, new]` tokens of one depth."""
    ancestors = Ancestors(*tokens.shape, tokens.device)
    return Frontier(tokens, depth, nodes, parent_index is None, ancestors, parent_index=parent_index)


def ngram_draft(candidates: NgramCandidates, text: list[int], budget: int = AMPLE) -> tuple[list[int], Parents]:
    """Tokens and parents of the draft that continues one row, whose last token counts as generated."""
    state = make_state([text[:-1]])
    state.append(0, text[-1:])
    tree = candidates.start(make_call(state, candidates=candidates)).draft([budget])
    return tree.tokens[0].tolist(), tree.parents[0]


def with_sessions(candidates: Any, change: Callable[[Any], Any]) -> Any:
    """The strategy, whose sessions are changed as they start."""
    start = candidates.start

    def started(call: Any) -> Any:
        session = start(call)
        change(session)
        return session

    candidates.start = started
    return candidates
