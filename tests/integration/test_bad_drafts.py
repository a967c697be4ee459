"""Nothing that a drafter gives changes the text: values that are not finite, and drafts that cannot be verified."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    DraftSession,
    DraftTree,
    LayerSkipCandidates,
    MedusaCandidates,
)
from hf_specgen.candidates.draft_batch import DraftBatch
from tests.helpers import SAMPLING, RecordingStreamer, assert_same_tokens, perturbed_copy, prompts, tiny_model
from tests.helpers.medusa import random_heads


def not_finite(kind: str) -> Any:
    """A draft for tiny llama whose logits are not all finite."""
    draft = perturbed_copy(tiny_model("llama"))
    weight = draft.lm_head.weight.data
    if kind == "half":
        weight *= 1e5  # overflows in half precision
        return draft.half()
    weight[slice(None) if kind == "nan" else slice(7, 8)] = torch.nan if "nan" in kind else torch.inf
    return draft


@pytest.mark.parametrize("tree", [8, "auto"])
@pytest.mark.parametrize("kind", ["nan", "nan row", "inf row", "half", "adapter", "heads"])
def test_drafter_with_logits_that_are_not_finite_same_tokens(kind: str, tree: Any) -> None:
    """Would catch: NaN ranked before every number, so that a draft token takes the place of the last token of the text.

    Eta sampling refuses NaN scores.
    """
    model, eta = tiny_model("llama"), {"do_sample": True, "eta_cutoff": 0.01}
    if kind == "adapter":
        adapter = torch.nn.Linear(64, 99)
        torch.nn.init.constant_(adapter.weight, torch.nan)
        candidates: Any = LayerSkipCandidates(1, 3, adapter, tree=tree)
    elif kind == "heads":
        heads = random_heads(model)
        torch.nn.init.constant_(next(heads.parameters()), torch.nan)
        candidates = MedusaCandidates(heads, tree=tree)
    else:
        candidates = DraftModelCandidates(not_finite(kind), k=4, tree=tree)
    for arguments in ({}, SAMPLING["sampled"], eta):
        statistics = assert_same_tokens(model, prompts(3), candidates, max_new_tokens=12, **arguments)
    assert statistics.accepted > 0 or kind != "nan row" or tree == "auto"
    sampled = {"do_sample": True, "verification": "rejection", "candidate_generator": candidates}
    assert model.generate(**prompts(3), max_new_tokens=12, **sampled).shape == (3, 24)


class Proposes(Candidates, DraftSession):
    """A strategy that returns what it was given as its draft in each step."""

    def __init__(self, make: Callable[[int], Any]):
        super().__init__(k=4)
        self._make = make

    def start(self, batch: DraftBatch) -> DraftSession:
        self.batch = batch
        return self

    def draft(self, max_depths: Sequence[int]) -> Any:
        return self._make(len(max_depths))


class ProposesIds(CandidateGenerator):
    """A generator of Transformers that returns what it was given."""

    def __init__(self, make: Callable[[torch.Tensor], Any]):
        self._make = make

    def get_candidates(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return self._make(input_ids)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: Any, num_matches: int) -> None:
        """Nothing to update."""


def with_q(q: Any) -> Proposes:
    return Proposes(lambda rows: DraftTree([[5]], ((-1,),), q))


UNVERIFIABLE = "the draft of Proposes(k=4) cannot be verified: "
NO_NUMBERS = UNVERIFIABLE + "its tokens and parents must be whole numbers ("
DRAFTS: list[tuple[Any, str]] = [
    (
        Proposes(lambda rows: None),
        "Proposes(k=4) must return a DraftTree of 1 rows, such as DraftTree.chains(rows), got a NoneType",
    ),
    (Proposes(lambda rows: DraftTree.empty(rows + 1)), "Proposes(k=4) must return a DraftTree of 1 rows"),
    (Proposes(lambda rows: DraftTree.chains([[99]])), UNVERIFIABLE + "its token 99 is outside of the target's voc"),
    (Proposes(lambda rows: DraftTree.chains([[5, -1]])), UNVERIFIABLE + "its token -1 is outside"),
    (Proposes(lambda rows: DraftTree.chains([[5.0]])), NO_NUMBERS + "'float'"),  # type: ignore[list-item]
    (Proposes(lambda rows: DraftTree(torch.tensor([[5.5]]), ((-1,),))), NO_NUMBERS + "'float'"),
    (Proposes(lambda rows: DraftTree([[5, 6]], ((-1, 0.0),))), NO_NUMBERS + "'float'"),  # type: ignore[arg-type]
    (Proposes(lambda rows: DraftTree([[5]], ((-1,),), probability=((),))), UNVERIFIABLE + "its probability must have"),
    (CombinedCandidates([Proposes(lambda rows: DraftTree.empty(2))]), "got a DraftTree of 2 rows"),
    (with_q(torch.full((1, 1, 99), torch.nan)), UNVERIFIABLE + "its q has values that are negative or not finite"),
    (with_q(-torch.ones(1, 1, 99)), UNVERIFIABLE + "its q has values that are negative"),
    (with_q(torch.ones(1, 99)), "its q must be probabilities of at most the shape [1, 1, 99], got the shape [1, 99]"),
    (with_q(torch.ones(1, 1, 100)), "of at most the shape [1, 1, 99], got the shape [1, 1, 100]"),
    (with_q([0.5]), "of at most the shape [1, 1, 99], got the shape []"),
    (
        ProposesIds(lambda ids: (torch.cat([ids, ids - 50], dim=1), None)),
        "of TransformersCandidates('ProposesIds') can",
    ),
    (ProposesIds(lambda ids: (torch.cat([ids, ids / 3], dim=1), None)), "must be whole numbers"),
    (ProposesIds(lambda ids: (None, None)), "must return ids [1, length] and scores, got None"),
    (ProposesIds(lambda ids: ids), "must return ids [1, length] and scores, got tensor"),
    (LayerSkipCandidates(1, 3, torch.nn.Flatten()), "must return logits [1, 1, '…']"),
]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "verification": "rejection"}], ids=["exact", "rejection"])
@pytest.mark.parametrize(("candidates", "words"), DRAFTS, ids=[words[-40:] for _, words in DRAFTS])
def test_draft_that_cannot_be_verified_raises_before_its_pass(candidates: Any, words: str, sampling: Any) -> None:
    """Would catch: an embedding or a gather that reads out of bounds, which ends a CUDA process, and NaN from q."""
    streamer = RecordingStreamer()
    with pytest.raises(ValueError, match=re.escape(words)):
        arguments = {"candidate_generator": candidates, "streamer": streamer, **sampling}
        tiny_model("llama").generate(**prompts(1), max_new_tokens=8, **arguments)
    assert len(streamer.chunks) == 2  # the prompt and the first token
