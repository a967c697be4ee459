"""Models that read images or audio beside text give the tokens of plain `generate`."""

from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from tests.helpers import SAMPLING, assert_same_tokens, shared_draft
from tests.helpers.multimodal import MULTIMODAL, multimodal_model, multimodal_prompts
from tests.helpers.oracle import ORACLES


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_generate_with_image_or_audio_same_tokens(kind: str, batch: int) -> None:
    """Would catch: features passed to every step, wrong axes of positions, rows of a batch that are mixed up."""
    model, inputs = multimodal_model(kind), multimodal_prompts(kind, batch)
    sampling = SAMPLING["sampled" if batch == 1 else "greedy"]
    statistics = assert_same_tokens(model, inputs, ORACLES["tree"], max_new_tokens=14, **sampling)
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_draft_model_with_image_same_tokens(kind: str) -> None:
    """Would catch: a draft that cannot read the placeholders of a prompt, or positions of rows that end early.

    The first row has no image where positions have several axes, so that its axes differ from those of the others.
    """
    model, inputs = multimodal_model(kind), multimodal_prompts(kind, 6, length=30)
    if kind != "llava":
        inputs["input_ids"][0] %= 90
        inputs["mm_token_type_ids"][0] = 0
        inputs |= {"pixel_values": inputs["pixel_values"][16:], "image_grid_thw": inputs["image_grid_thw"][1:]}
    draft = DraftModelCandidates(shared_draft(model, noise=0.3), k=3)
    end = {"eos_token_id": list(range(30, 36)), "pad_token_id": 0}
    assert assert_same_tokens(model, inputs, draft, max_new_tokens=20, **end).drafted > 0


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_layer_skip_with_image_same_tokens_or_refused(kind: str) -> None:
    """Would catch: image features that only the second half of the layers receives."""
    try:
        assert_same_tokens(
            multimodal_model(kind), multimodal_prompts(kind, 2), LayerSkipCandidates(1, k=3), max_new_tokens=10
        )
    except ValueError as refusal:
        assert "cannot draft with its own first layers" in str(refusal)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_text_alone_to_a_multimodal_model_same_tokens(kind: str) -> None:
    """Would catch: a trial run that leaves positions behind in the model, or a refusal of several axes."""
    model = multimodal_model(kind)
    inputs = {name: multimodal_prompts(kind, 3)[name] for name in ("input_ids", "attention_mask")}
    inputs["input_ids"] = inputs["input_ids"] % 90
    assert_same_tokens(model, inputs, NgramCandidates(k=3, tree=6), max_new_tokens=14)


def test_second_turn_with_image_same_tokens() -> None:
    """Would catch: positions of a second turn that a trial run has changed."""
    model, inputs = multimodal_model("qwen2_5_vl"), multimodal_prompts("qwen2_5_vl", 1)

    def two_turns(**more: Any) -> torch.Tensor:
        first = model.generate(**inputs, max_new_tokens=8, return_dict_in_generate=True, **more)
        ids = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=1)
        types = torch.zeros_like(ids)
        types[:, :16] = inputs["mm_token_type_ids"]
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        return model.generate(**second, past_key_values=first.past_key_values, max_new_tokens=8, **more)

    assert torch.equal(two_turns(candidate_generator=NgramCandidates(k=3)), two_turns())
