"""Draft heads survive being written and read again, in every layout that can hold them."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.export import PROGRAMS, export_head, save_head
from hf_specgen.heads.head_formats import load_head
from tests.fuzz.heads import random_head
from tests.helpers import tiny_model
from tests.helpers.head_fixtures import FIXTURES

EAGLE3 = FIXTURES["eagle3_original"].head_folder
KINDS = ("eagle1", "eagle3", "peagle", "dflash")
HEADS: dict[str, Callable[[], DraftHead]] = {
    name: partial(load_head, fixture.head_folder)
    for name, fixture in FIXTURES.items()
    if fixture.family in ("autoregressive", "block", "path", "parallel")
}
HEADS |= {
    f"{kind} {seed}": lambda kind=kind, seed=seed: random_head(kind, tiny_model("llama"), Random(seed))
    for kind in KINDS
    for seed in range(12 if kind == "dflash" else 6)
}
"""Of every published layout, and with random options."""
EXPORTED = [
    *(("eagle3_original", to) for to in PROGRAMS),
    *((name, "sglang") for name in ("dflash_zlab", "jetspec_causal", "domino_specforge")),
    *((name, "sglang") for name in ("speculators_dspark_vanilla", "speculators_dspark_rnn")),
    ("eagle1_original", "eagle"),
]
"""What must not be refused."""
OF_FILE = ("speculative_tokens", "num_target_layers", "base_model", "target_type", "trained_length")


def assert_same(loaded: DraftHead, head: DraftHead) -> None:
    """The same module with the same weights: what both compute follows from these."""
    assert type(loaded) is type(head)
    kept = {field: getattr(loaded.config, field) for field in OF_FILE}
    assert loaded.config == dataclasses.replace(head.config, **kept)
    state, expected = loaded.state_dict(), head.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", HEADS)
def test_head_saved_or_exported_and_loaded_is_the_same(tmp_path: Path, name: str) -> None:
    """Would catch: an option or a tensor that a layout leaves out without a word."""
    with torch.random.fork_rng():
        head = HEADS[name]()
    for to in ("", *PROGRAMS):
        try:
            export_head(head, tmp_path / to, to) if to else save_head(head, tmp_path)
        except ValueError as refusal:
            assert "cannot express" in str(refusal) or "there is no layout" in str(refusal)
            assert (name, to) not in EXPORTED and not (tmp_path / to / "config.json").exists()
            assert to or name == "dflash2_zlab" or name not in FIXTURES
        else:
            assert_same(load_head(tmp_path / to), head)


def test_eagle_head_in_bfloat16_saved_and_loaded_keeps_dtype_and_exact_frequencies(tmp_path: Path) -> None:
    head: Any = load_head(EAGLE3).to(torch.bfloat16)
    assert head.rotary.module.inv_freq.dtype == torch.float32
    save_head(head, tmp_path)
    assert load_head(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load_head(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


def test_eagle_head_exported_for_sglang_names_layers_by_their_output(tmp_path: Path) -> None:
    export_head(load_head(EAGLE3, aux_hidden_state_layers=[2, 5, 7]), tmp_path, "sglang")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


Z_LAB = "z-lab's layout cannot express a head with"


@pytest.mark.parametrize(
    ("name", "to", "reason"),
    [
        ("speculators_eagle3_b_qwen3_nbr", "eagle", "norm_before_residual"),
        ("speculators_eagle3_e_twolayers_bias_fourtaps", "sglang", "several layers, biases"),
        ("speculators_eagle3_c_fcnorm_normout", "sglang", "norm_output"),
        ("speculators_peagle_llama", "eagle", "a mask token"),
        ("eagle1 0", "eagle", "an output matrix of its own, states of inner layers"),
        ("eagle3_original", "tgi", "there are eagle, sglang, vllm"),
        ("speculators_dflash_sliding_causal", "sglang", Z_LAB),
        ("speculators_dflash_full", "sglang", Z_LAB),
    ],
)
def test_export_of_head_that_layout_cannot_express_raises(tmp_path: Path, name: str, to: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        export_head(HEADS[name](), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_export_into_folder_with_config_raises(tmp_path: Path) -> None:
    export_head(load_head(EAGLE3), tmp_path, "vllm")
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds a config\.json already"):
        export_head(load_head(EAGLE3), tmp_path, "eagle")
