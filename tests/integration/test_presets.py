"""Presets: the strategy that each chooses for a target, and the tokens of plain `generate`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specgen import attached, speculate
from hf_specgen.candidates.presets import PresetCandidates
from tests.helpers import prompts, tiny_model
from tests.helpers.head_fixtures import FIXTURES

CHOSEN = {
    "auto": "CombinedCandidates([NgramCandidates(",
    "latency": "CombinedCandidates([NgramCandidates(",
    "throughput": "NgramCandidates(",
    "memory": "NgramCandidates(k=8",
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("batch", [1, 3])
def test_preset_has_plain_tokens_and_names_what_it_chose(name: str, batch: int) -> None:
    model, inputs = tiny_model("llama"), prompts(batch)
    plain = model.generate(**inputs, max_new_tokens=12)
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True}
    outputs = [
        model.generate(**inputs, candidate_generator=name, **settings),
        model.generate(**inputs, custom_generate=speculate(name), **settings),  # type: ignore[arg-type]
    ]
    with attached(model, name) as totals:  # type: ignore[arg-type]
        outputs.append(model.generate(**inputs, **settings))
    for output in outputs:
        assert torch.equal(output.sequences, plain)
        assert output.speculation.summary().startswith(CHOSEN[name])
        assert "AdaptiveDepth()" in output.speculation.summary()
    assert totals.calls == 1


def test_latency_preset_uses_the_mtp_layer_of_a_checkpoint_that_has_one() -> None:
    """Would catch: a config with a default number of MTP layers whose checkpoint has none, refused as an error."""
    preset, fixture = PresetCandidates("latency"), FIXTURES["mtp_transformers_glm4_moe"]
    model = AutoModelForCausalLM.from_pretrained(fixture.target_folder)
    assert "MTPCandidates" in repr(preset.for_model(model)) and preset.for_model(model) is preset.for_model(model)
    without = AutoModelForCausalLM.from_config(model.config)
    without.config.name_or_path = ""
    assert "MTPCandidates" not in repr(preset.for_model(without))
    assert "MTPCandidates" not in repr(PresetCandidates("throughput").for_model(model))
