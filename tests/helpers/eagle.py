"""EAGLE heads for tests of the strategy: those of the fixtures, and a target that a head predicts partly."""

import copy
from typing import Any

import torch

from hf_specgen import Call, DraftSession, EagleCandidates
from hf_specgen.candidates.head_sessions import EagleSession
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets.cache import RaggedCache
from tests.helpers.head_fixtures import Fixture, features_of
from tests.helpers.head_sessions import causal_mask
from tests.helpers.models import SHARED

CONTEXT = 0.3
"""How much the layers of a predictable target add to the embedding: a part of the draft tokens is accepted."""


LAYERS = 2
"""Of a predictable target whose head reads the last one alone."""


class Recording(EagleCandidates):
    """Keeps the session of the last call."""

    session: EagleSession

    def start(self, call: Call) -> DraftSession:
        session = super().start(call)
        assert isinstance(session, EagleSession)
        self.session = session
        return session


@torch.no_grad()
def predictable_pair(eagle1: Fixture) -> tuple[Any, DraftHead]:
    """A target whose next token depends mostly on the last one, and an EAGLE-1 head that reads that token alone.

    Tests share them and never change the target.
    """
    target, head = copy.deepcopy(eagle1.target), copy.deepcopy(load_head(eagle1.head_folder))
    if head.config.num_aux_hidden_states == 1:  # it reads the last layer alone, so that a few layers are enough
        target.model.layers = target.model.layers[:LAYERS]
        target.config.num_hidden_layers = LAYERS
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight *= CONTEXT
        layer.mlp.down_proj.weight *= CONTEXT
    width = head.fc.out_features
    head.fc.weight.zero_()
    head.fc.weight[:, :width] = torch.eye(width)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    for draft_layer in head.layers:
        draft_layer.self_attn.o_proj.weight *= 0.1
        draft_layer.mlp.down_proj.weight *= 0.1
    head.embed_tokens = None if head.embed_tokens is None else copy.deepcopy(target.get_input_embeddings())
    SHARED.add(target)
    return target, head


@torch.no_grad()
def reread(session: EagleSession, row: int, count: int) -> tuple[RaggedCache, torch.Tensor]:
    """The reference: the head's cache over the first `count` positions of a row's text, and its output at the last one.

    One forward pass of the target over the text without padding, then one of the head over these positions.
    """
    call, bound = session.call, session.runner.bound
    text = torch.tensor([call.state.prompts[row] + call.state.generated[row]])
    assert call.model is not None
    states: Any = call.model(text[:, :-1], output_hidden_states=True).hidden_states
    hidden = bound.head.combine(features_of(bound, states)[:, :count])
    cache = RaggedCache()
    positions = torch.arange(count)[None]
    output = bound.head(bound.embed(text[:, 1 : 1 + count]), hidden, positions, causal_mask([0], count), cache)
    return cache, output.output[0, -1]
