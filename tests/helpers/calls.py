"""Calls for tests of single sessions, without a model or beside a target."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_specgen import Candidates, DraftBatch, FixedDepth, NgramCandidates, Policy
from hf_specgen.call import Call, GenerationState
from hf_specgen.candidates.encoder_draft import decoder_prompt
from hf_specgen.device_tree import Ancestors, Frontier
from hf_specgen.targets.requirements import make_target
from hf_specgen.tree import Parents
from hf_specgen.verification import ExactVerifier

AMPLE = 2**31
"""A budget that limits no draft."""


def make_state(prompts: Sequence[Sequence[int]]) -> GenerationState:
    """The state of prompts of any lengths, left-padded with 0."""
    width = max(1, *map(len, prompts)) if prompts else 1
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return GenerationState(ids, mask)


def make_call(
    state: GenerationState,
    *,
    candidates: Candidates | None = None,
    processors: Any = None,
    do_sample: bool = False,
    model: Any = None,
) -> Call:
    """A call in this state."""
    settings, config = (candidates or NgramCandidates(k=4)).settings(), GenerationConfig(do_sample=do_sample)
    return Call(model, state, config, settings, processors or LogitsProcessorList())


class StubModel:
    """Stands for a target of which a session reads the vocabulary alone."""

    def __init__(self, name_or_path: str = "", vocab: int = 2**31):
        text_config = SimpleNamespace(vocab_size=vocab)
        self.name_or_path = name_or_path
        self.config = SimpleNamespace(is_encoder_decoder=False, get_text_config=lambda: text_config)
        self._matrix = SimpleNamespace(weight=torch.empty(vocab, 0))

    def get_output_embeddings(self) -> Any:
        return self._matrix


class StubTarget:
    """Stands for the target of a session that reads no hidden states."""

    verifies_chains_only, device = False, torch.device("cpu")

    def pass_shape(self, tokens: int) -> tuple[int, int]:
        return 1, tokens


def make_batch(
    state: GenerationState,
    *,
    candidates: Candidates | None = None,
    model: Any = None,
    policy: Policy | None = None,
    verification: Any = None,
) -> DraftBatch:
    """The rows of a greedy call in this state, without a target's passes."""
    call = make_call(state, candidates=candidates, model=model or StubModel())
    target: Any = StubTarget()
    session = verification or ExactVerifier().start(call)
    return DraftBatch(call, target, session, (policy or FixedDepth()).start(call))


def frontier_of(tokens: torch.Tensor, depth: int, nodes: int, parent_index: torch.Tensor | None = None) -> Frontier:
    """The nodes of a drafter's next pass, for drafters that read no ancestors: `[rows, new]` tokens of one depth."""
    ancestors = Ancestors(*tokens.shape, tokens.device)
    return Frontier(tokens, depth, nodes, parent_index is None, ancestors, parent_index=parent_index)


@torch.no_grad()
def batch_on(model: Any, texts: Sequence[Sequence[int]], candidates: Candidates) -> DraftBatch:
    """Rows of a target that has processed these texts but for their last token, which counts as generated."""
    state = make_state([text[:-1] for text in texts])
    call = make_call(state, candidates=candidates, model=model)
    prompt = decoder_prompt(model, state.prompts, call.max_new_tokens)
    target = make_target(candidates.target_requirements(model), model, *prompt)
    target.prefill()
    target.commit([[]] * state.batch)
    for row, text in enumerate(texts):
        state.append(row, text[-1:])
    return DraftBatch(call, target, ExactVerifier().start(call), FixedDepth().start(call))


def drafted_after(model: Any, text: Sequence[int], candidates: Candidates) -> list[int]:
    """The leftmost chain of the draft after a text, beside a target."""
    draft = candidates.start(batch_on(model, [text], candidates)).draft([candidates.k])
    return draft.leftmost_chain().tokens[0].tolist()


def ngram_draft(candidates: NgramCandidates, text: list[int], budget: int = AMPLE) -> tuple[list[int], Parents]:
    """Tokens and parents of the draft that continues one row, whose last token counts as generated."""
    state = make_state([text[:-1]])
    state.append(0, text[-1:])
    tree = candidates.start(make_batch(state, candidates=candidates)).draft([budget])
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
