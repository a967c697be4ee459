"""Gemma 4 assistants inside the decoding loop: the same tokens, and the drafts of the original."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import AutoCandidates, GemmaAssistantCandidates
from hf_specgen.heads import load_head
from tests.helpers import assert_same_tokens, prompts
from tests.helpers.head_fixtures import find_fixtures

FIXTURES = find_fixtures(Path(__file__).parents[1] / "assets" / "fixtures")
ASSISTANTS = {fixture.folder.name: fixture for fixture in FIXTURES if fixture.family == "assistant"}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ASSISTANTS)
def test_gemma_assistant_drafts_the_tokens_of_the_original(name: str) -> None:
    """The first draft after the prompts of the fixture, in one left-padded batch."""
    fixture = ASSISTANTS[name]
    drafted: list[Any] = []

    class Recorded(GemmaAssistantCandidates):
        def begin(self, *arguments: Any) -> Any:
            session = super().begin(*arguments)
            draft = session.draft
            session.draft = lambda budget: drafted.append(draft(budget)) or drafted[-1]  # type: ignore[method-assign, func-returns-value]
            return session

    texts = [fixture.get(f"{prompt}.round1.input_ids")[0, :-1] for prompt in fixture.prompts]
    width = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in texts])
    mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()
    expected = [fixture.get(f"{prompt}.round1.clean.tokens").flatten().tolist() for prompt in fixture.prompts]
    candidates = Recorded(fixture.head_folder, k=len(expected[0]))
    fixture.target.generate(
        ids, attention_mask=mask, max_new_tokens=6, candidate_generator=candidates, do_sample=False, eos_token_id=None
    )
    first = next(tree for tree in drafted if tree.nodes)
    assert first.nodes >= 2
    assert first.tokens.tolist() == [chain[: first.nodes] for chain in expected]


@pytest.mark.parametrize("name", ASSISTANTS)
def test_gemma_assistant_pass_over_several_nodes_is_that_over_each(name: str) -> None:
    """Would catch: nodes of a level that see each other, or positions that the layers leave out."""
    fixture = ASSISTANTS[name]
    bound = load_head(fixture.head_folder).bind(fixture.target)
    head: Any = bound.head
    random = torch.Generator().manual_seed(3)
    layers = [layer.self_attn for layer in head.model.layers]
    shared = {
        layer.layer_type: tuple(torch.randn(2, 2, 12, layer.head_dim, generator=random) for _ in range(2))
        for layer in layers
    }
    embeddings, hidden = (torch.randn(2, 3, head.config.hidden_size, generator=random) for _ in range(2))
    lengths, padding = torch.tensor([12, 9]), torch.tensor([0, 4])
    rest = shared, lengths, padding, dict.fromkeys(shared, 0)
    positions = (lengths - padding)[:, None].expand(2, 3)
    together = bound.target_logits(head(embeddings, hidden, positions, *rest).output)
    for node in range(3):
        one = slice(node, node + 1)
        alone = bound.target_logits(head(embeddings[:, one], hidden[:, one], positions[:, one], *rest).output)
        torch.testing.assert_close(together[:, one], alone, atol=1e-4, rtol=1e-4)  # other kernels


def test_gemma_assistant_ended_rows_same_tokens() -> None:
    fixture = ASSISTANTS["gemma4_assistant"]
    inputs = prompts(3)
    texts = fixture.target.generate(**inputs, max_new_tokens=10)[:, inputs["input_ids"].shape[1] :].tolist()
    candidates = GemmaAssistantCandidates(fixture.head_folder, k=2, tree=6)
    assert_same_tokens(fixture.target, inputs, candidates, max_new_tokens=10, eos_token_id=texts[0][3], pad_token_id=0)


def test_auto_assistant_gives_its_strategy() -> None:
    assert type(AutoCandidates.from_pretrained(ASSISTANTS["gemma4_assistant"].head_folder)) is GemmaAssistantCandidates
