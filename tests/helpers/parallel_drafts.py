"""Runs a parallel draft model on the inputs of its fixtures, and compares it with its original implementation."""

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_specgen import DraftModelCandidates
from hf_specgen.candidates.draft_sessions import ParallelDraft
from hf_specgen.candidates.encoder_draft import decoder_prompt
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.tree import DraftTree
from hf_specgen.verification.coupled import CoupledVerifier
from hf_specgen.verification.result import VerificationResult
from tests.helpers.calls import make_call, make_state
from tests.helpers.head_fixtures import Comparison, Fixture


class _Recorder:
    """What a draft model reads: positions of its passes, and what is added to its embeddings."""

    def __init__(self, draft: Any) -> None:
        self.positions: list[torch.Tensor] = []
        self.added: list[torch.Tensor] = []
        draft.register_forward_pre_hook(self._position, with_kwargs=True)
        draft.get_input_embeddings().register_forward_hook(self._embedded)
        draft.model.layers[0].register_forward_pre_hook(lambda _, args: self.added.append(args[0] - self._before))

    def _position(self, _: Any, __: Any, kwargs: Any) -> None:
        self.positions.append(kwargs["position_ids"])

    def _embedded(self, _: Any, __: Any, output: torch.Tensor) -> None:
        self._before = output

    def clear(self) -> None:
        """Forget what was read so far."""
        self.positions, self.added = [], []

    def take(self, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and what was added at a row's last `count` tokens of all passes since the call before."""
        positions, added = (torch.cat([part[row] for part in parts])[-count:] for parts in (self.positions, self.added))
        return positions, added


def run_parallel_draft(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    """Both rounds, in one batch; acceptance is that of the fixture."""
    draft: Any = AutoModelForCausalLM.from_pretrained(fixture.head_folder, dtype=torch.float32).eval()
    settings, recorder, depth = ParallelDraft.of(draft), _Recorder(draft), fixture.expected["draft_k"]
    assert settings is not None
    projection = settings.projection(draft, fixture.target) if settings.layers else None
    candidates = DraftModelCandidates(draft, k=depth)
    texts = [fixture.get(f"{prompt}.round1.input_ids")[0].tolist() for prompt in prompts]
    call = replace(make_call(make_state(texts), candidates=candidates), model=fixture.target)
    layers = candidates.target_requirements(fixture.target)
    assert layers == TargetRequirements(settings.layers_of(fixture.target) if settings.layers else ())
    target = make_target(layers, fixture.target, *decoder_prompt(fixture.target, call, texts))
    call = replace(call, target=target, verification=CoupledVerifier().start(call))
    session: Any = candidates.start(call)
    compute, scores = session.depth_logits, torch.empty(0)

    def keep_logits(depth: int) -> torch.Tensor:
        nonlocal scores
        scores = compute(depth)
        return scores

    session.depth_logits = keep_logits
    recorder.clear()
    tokens: list[list[int]] = [[] for _ in prompts]
    with torch.no_grad():
        for number in (1, 2):
            if number == 1:
                logits = target.prefill(DraftTree.empty(len(prompts)))
                target.commit([[]] * len(prompts))
            else:
                accepted = [fixture.get(f"{prompt}.round2.accepted")[0].tolist() for prompt in prompts]
                logits = target.forward(DraftTree.chains(accepted), call.state.pending())
                target.commit([[0, 1]] * len(prompts))
                tokens = accepted
            for row, prompt in enumerate(prompts):
                name = f"{prompt}.round{number}"
                comparison.check_end(f"{name}.target_logits", logits[row : row + 1])
                following = fixture.get(f"{name}.next_token")[0].tolist()
                comparison.check(f"{name}.next_token", logits[row, -1].argmax())
                call.state.append(row, [*tokens[row], *following])
            if number == 2:
                session.observe(VerificationResult([[0, 1]] * len(prompts), [[*row, 0] for row in tokens], [2, 2]))
            session.draft([depth] * len(prompts))
            assert len(session.passes) == 1, "one pass a draft"
            for row, prompt in enumerate(prompts):
                name = f"{prompt}.round{number}"
                comparison.check(f"{name}.slots.logits", scores[row : row + 1])
                comparison.check(f"{name}.slots.tokens", scores[row : row + 1].argmax(dim=-1))
                count = fixture.get(f"{name}.draft.positions").shape[1]
                positions, added = recorder.take(row, count)
                comparison.check(f"{name}.draft.positions", positions[None])
                if projection is not None:
                    features = fixture.get(f"{name}.draft.target_features")
                    torch.testing.assert_close(added[None], settings.scale * projection(features), atol=2e-4, rtol=1e-4)
                    comparison.compared.add(f"{name}.draft.target_features")
            recorder.clear()
