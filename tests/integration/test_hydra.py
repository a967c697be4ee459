"""Medusa heads that read the path before their token (Hydra): the same tokens, and logits of each node's own path."""

from typing import Any

import pytest
import torch

from hf_specgen import FixedDepth, MedusaCandidates
from hf_specgen.candidates.medusa import HydraSession
from hf_specgen.evaluation.calibration import measure_acceptance
from hf_specgen.heads import MedusaHeads
from hf_specgen.heads.medusa import MedusaConfig
from hf_specgen.targets.requirements import OUTPUT_STATE
from hf_specgen.tree import DraftTree
from tests.helpers import assert_same_tokens, prompts, tiny_model
from tests.helpers.medusa import fitted_heads, random_heads

HYDRA = {"reads_token": True, "reads_path": True}


def hydra_heads(model: Any, inputs: dict[str, torch.Tensor], **sampling: Any) -> MedusaHeads:
    """Heads that often predict the output for these inputs, and depend on the path a little."""
    fitted, generator = fitted_heads(model, inputs, **sampling), torch.Generator().manual_seed(3)
    heads = MedusaHeads.from_target(model, num_heads=3, own_outputs=True, **HYDRA)
    heads.load_state_dict(fitted.state_dict(), strict=False)
    with torch.no_grad():
        for matrix in heads.token_maps:
            matrix.weight += 0.01 * torch.randn(matrix.weight.shape, generator=generator)
    return heads.eval()


def test_hydra_logits_of_every_node_are_those_of_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result of a level against the head of the node's depth, computed for this node alone."""
    model, inputs = tiny_model("llama"), prompts(3)
    original, compared = HydraSession.next_scores, 0

    def next_scores(session: HydraSession, tree: DraftTree, new: int) -> torch.Tensor:
        nonlocal compared
        scores = original(session, tree, new)
        states, embed = session._target.states_of((OUTPUT_STATE,)), model.get_input_embeddings()
        heads = session._runner.heads
        for row, text in enumerate(session.call.state.generated):
            for index in range(new):
                node, path = tree.nodes - new + index, []
                while node >= 0:
                    path.insert(0, int(tree.tokens[row, node]))
                    node = tree.parents[row][node]
                if len(path) < heads.config.num_heads:
                    tokens = embed(torch.tensor([text[-1], *path]))
                    expected = heads.lm_heads[len(path)](heads.head_state(len(path), states[row], tokens))
                    torch.testing.assert_close(scores[row, index], expected, atol=1e-4, rtol=1e-4)
                    compared += 1
        return scores

    monkeypatch.setattr(HydraSession, "next_scores", next_scores)
    candidates = MedusaCandidates(hydra_heads(model, inputs), 10, policy=FixedDepth())
    assert_same_tokens(model, inputs, candidates, max_new_tokens=12)
    assert compared > 30


def test_hydra_fixed_paths_are_refused() -> None:
    model = tiny_model("llama")
    candidates = MedusaCandidates(random_heads(model, **HYDRA), [[0], [0, 0]])
    with pytest.raises(ValueError, match='use tree="auto" or a number of nodes'):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)


def test_heads_that_read_the_path_read_its_first_token_too() -> None:
    with pytest.raises(ValueError, match="needs reads_token=True"):
        MedusaConfig(hidden_size=8, vocab_size=9, reads_path=True)


def test_heads_with_too_few_tokens_name_what_they_read() -> None:
    heads = MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=9, num_heads=2, **HYDRA))
    with pytest.raises(ValueError, match="head 1 reads 2 tokens"):
        heads(torch.zeros(1, 8), torch.zeros(1, 1, 8))


def test_acceptance_of_hydra_heads_is_not_measured_in_advance() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="learn their acceptance while they draft"):
        measure_acceptance(model, random_heads(model, **HYDRA), [])
