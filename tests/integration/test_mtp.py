"""Native MTP layers inside the decoding loop: the same tokens, and what the layer reads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import AutoCandidates, MTPCandidates
from tests.helpers import assert_same_tokens, prompts, tiny_model
from tests.helpers.eagle import reread
from tests.helpers.head_fixtures import find_fixtures

FIXTURES = find_fixtures(Path(__file__).parents[1] / "assets" / "fixtures")
NATIVE = {fixture.folder.name: fixture for fixture in FIXTURES if fixture.family.startswith("mtp")}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", [name for name in NATIVE if not name.endswith("layers")])
def test_mtp_committed_cache_equals_reading_from_scratch(name: str) -> None:
    """Would catch: hidden states of other tokens than those that were accepted, also of targets with a state."""
    fixture = NATIVE[name]
    sessions: list[Any] = []

    class Recording(MTPCandidates):
        def begin(self, *arguments: Any) -> Any:
            sessions.append(super().begin(*arguments))
            return sessions[-1]

    candidates = Recording(fixture.checkpoint_folder, k=2)
    fixture.target.generate(**prompts(2), max_new_tokens=8, candidate_generator=candidates)
    runner = sessions[0].runner
    for place, (row, length) in enumerate(zip(runner.rows, runner.lengths, strict=True)):
        cache, output = reread(sessions[0], row, length)
        for ours, scratch in zip(runner.cache.layers, cache.layers, strict=True):
            torch.testing.assert_close(ours.keys[place, :, :length], scratch.keys[0, :, :length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(runner.last.output[place, 0], output, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NATIVE)
def test_mtp_rotary_frequencies_of_a_half_precision_target_are_its_own(name: str) -> None:
    """Would catch: frequencies rounded to bfloat16 with the head, which are too coarse for late positions."""
    fixture = NATIVE[name]
    model = type(fixture.target).from_pretrained(fixture.target_folder, dtype=torch.bfloat16)
    head = MTPCandidates(str(fixture.checkpoint_folder))._on(model).head
    assert next(head.parameters()).dtype == torch.bfloat16
    position_ids = torch.tensor([[5000, 100_001]])
    own = model.get_decoder().rotary_emb(torch.zeros(1, dtype=torch.float32), position_ids)
    ours = head.rotary(torch.zeros(1, dtype=torch.float32), position_ids)
    assert all(torch.equal(*pair) for pair in zip(ours, own, strict=True))


def test_mtp_without_a_checkpoint_uses_where_the_target_was_loaded_from() -> None:
    fixture = NATIVE["mtp_transformers_glm4_moe"]
    fixture.target.config.name_or_path = str(fixture.target_folder)
    assert_same_tokens(fixture.target, prompts(1), MTPCandidates(k=1), max_new_tokens=4)


@pytest.mark.parametrize("fixture", [f for f in FIXTURES if f.family.startswith("mtp")], ids=lambda f: f.folder.name)
def test_auto_target_with_mtp_layers_is_no_draft_model(fixture: Any) -> None:
    assert type(AutoCandidates.from_pretrained(fixture.checkpoint_folder)) is MTPCandidates


def test_mtp_checkpoint_without_layers_raises(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no MTP layers"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, candidate_generator=MTPCandidates(str(tmp_path), k=1))
