"""Drafts of every head format against what its original implementation computed, and heads' caches.

`pytest tests --fixtures DIR` runs other fixtures of the same kind; each folder with an `expected.json` is one.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_specgen import AutoCandidates, Candidates
from hf_specgen.candidates.encoder_draft import decoder_prompt
from hf_specgen.targets.requirements import make_target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import CoupledVerifier, VerificationResult
from tests.helpers.calls import make_call, make_state
from tests.helpers.head_fixtures import Fixture

pytestmark = pytest.mark.filterwarnings("ignore")


class Rounds:
    """A strategy's session beside the target, in the steps that a fixture recorded for some of its prompts.

    Attributes:
        logits: of the last draft, `[batch, vocab]` for each of its depths.
    """

    def __init__(self, fixture: Fixture, prompts: list[str], candidates: Candidates):
        self.target_model = fixture.target
        self._texts = {number: [fixture.text(prompt, number) for prompt in prompts] for number in fixture.rounds}
        texts = [text[:-1] for text in self._texts[1]]
        call = replace(make_call(make_state(texts), candidates=candidates), model=self.target_model)
        requirements = candidates.target_requirements(self.target_model)
        self._target = make_target(requirements, self.target_model, *decoder_prompt(self.target_model, call, texts))
        self._call = replace(call, target=self._target, verification=CoupledVerifier().start(call))
        self._session: Any = candidates.start(self._call)
        self.logits: list[torch.Tensor] = []
        for method in ("first_scores", "next_scores", "depth_logits"):
            if hasattr(self._session, method):
                setattr(self._session, method, self._recorded(getattr(self._session, method)))

    def _recorded(self, compute: Any) -> Any:
        def record(*arguments: Any) -> torch.Tensor:
            scores = compute(*arguments)
            self.logits += [scores] if scores.dim() == 2 else list(scores.unbind(dim=1))
            return scores

        return record

    def draft(self, number: int, depth: int) -> DraftTree:
        """The draft of a round, once the target has emitted the tokens that the text got since the one before."""
        state = self._call.state
        batch = state.batch
        if number == 1:
            self._target.prefill(DraftTree.empty(batch))
            self._target.commit([[]] * batch)
            for row, text in enumerate(self._texts[1]):
                state.append(row, text[-1:])
        else:
            known = [len(text) for text in self._texts[number - 1]]
            new = [text[length:] for text, length in zip(self._texts[number], known, strict=True)]
            paths: list[list[int] | None] = [list(range(len(tokens) - 1)) for tokens in new]
            self._target.forward(DraftTree.chains([tokens[:-1] for tokens in new]), state.pending())
            self._target.commit(paths)
            for row, tokens in enumerate(new):
                state.append(row, tokens)
            self._session.observe(VerificationResult(paths, new, [len(tokens) - 1 for tokens in new]))
        self.logits.clear()
        return self._session.draft([depth] * batch)


@pytest.mark.parametrize("rows", ["alone", "batch"])
@torch.no_grad()
def test_head_drafts_with_the_logits_of_its_original(head_fixture: Fixture, rows: str) -> None:
    """In all rounds of the fixture, of which later ones follow accepted and rejected draft tokens.

    Would catch: hidden states of another layer, token or row, a layout of tensors read wrongly, a cache that keeps
    rejected tokens, a correction left out, logits of another vocabulary.
    """
    tolerance = {name: head_fixture.expected["tolerance"][name] for name in ("atol", "rtol")}
    for prompts in [[prompt] for prompt in head_fixture.prompts] if rows == "alone" else [head_fixture.prompts]:
        depth = len(head_fixture.drafted(prompts[0], 1).logits)
        candidates = AutoCandidates.from_pretrained(head_fixture.checkpoint_folder, k=depth)
        steps = Rounds(head_fixture, prompts, candidates)
        for number in head_fixture.rounds:
            tree = steps.draft(number, depth)
            logits = torch.stack(steps.logits, dim=1)
            for row, prompt in enumerate(prompts):
                drafted = head_fixture.drafted(prompt, number)
                ours = logits[row] if drafted.candidates is None else logits[row].gather(-1, drafted.candidates)
                ours = ours.softmax(dim=-1) if drafted.is_normalised else ours
                torch.testing.assert_close(ours, drafted.logits, **tolerance)
                assert tree.tokens[row].tolist() == drafted.tokens
