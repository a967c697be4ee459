"""Classes of published checkpoints, as `python -m tests.checkpoints` tries all of them; a few of each kind here."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specgen import AutoCandidates
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.dflash2 import DFlash2Config, DFlash2Head
from hf_specgen.heads.dspark import DominoConfig, DominoHead, DSparkConfig, DSparkHead
from hf_specgen.heads.eagle import Eagle3Head, EagleConfig
from hf_specgen.heads.export import export_head
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.targets.model_parts import text_config, text_embeddings
from tests.checkpoints import page
from tests.checkpoints.cases import (
    CASES,
    CRASH,
    DIFFERENT,
    PLAIN_FAILS,
    SAME,
    SIBLINGS,
    Case,
    build,
    llama4_repaired,
    run,
    run_all,
)
from tests.checkpoints.inputs import text, with_media
from tests.checkpoints.table import CHECKPOINTS
from tests.helpers import architecture_list
from tests.helpers.paths import ROOT

SUBSET = [
    *("gpt-oss", "Falcon-H1", "Qwen3.5, 3.6, 3.8 (dense)", "Gemma 4 E2B, E4B", "PaliGemma", "Mistral Small 4"),
    *("Llama 4", "Qwen2-Audio", "T5Gemma 2", "TrOCR", "Kosmos-2"),
]
"""One of each kind: windows, states, several axes of positions, inputs of layers, own positions, wrappers, audio …"""
QUICK = [case for case in CASES if case.name == f"{SIBLINGS}, batch"]
ROWS = {row.name: row for row in CHECKPOINTS}


@pytest.mark.parametrize("name", SUBSET)
def test_class_of_a_checkpoint_as_recorded(name: str) -> None:
    """Would catch: a class that is refused or differs since a change, and one whose refusal the page still has."""
    found = page.result(run_all(ROWS[name], QUICK))
    expected = page.recorded()["checkpoints"][name]
    assert {kind: status for kind, (status, *_) in found.items()} == {kind: expected[kind][0] for kind in found}


HEADS: dict[str, Callable[[dict[str, Any]], DraftHead]] = {
    "EAGLE-3": lambda sizes: Eagle3Head(EagleConfig(**sizes)),
    "DFlash": lambda sizes: BlockHead(BlockConfig(**sizes, **BLOCK)),
    "DFlash2": lambda sizes: DFlash2Head(DFlash2Config(**sizes, **BLOCK, selector_rank=4, selector_top_k=9)),
    "DSpark": lambda sizes: DSparkHead(DSparkConfig(**sizes, **BLOCK, markov_rank=4)),
    "Domino": lambda sizes: DominoHead(DominoConfig(**sizes, **BLOCK, emb_dim=4, gru_hidden_dim=6, max_draft_tokens=4)),
}
BLOCK: dict[str, Any] = {"attention": (BlockAttention(),) * 2, "block_size": 5, "mask_token_id": 3}


@pytest.mark.parametrize("name", [row.name for row in CHECKPOINTS if set(row.heads.split(", ")) & HEADS.keys()])
def test_heads_that_are_published_for_a_checkpoint_draft_for_its_class(name: str, tmp_path: Path) -> None:
    """Heads in the layouts of speculators and z-lab: would catch a class whose states a head cannot read."""
    row = ROWS[name]
    model = build(row)
    config = text_config(model)
    width, vocab = config.hidden_size, text_embeddings(model).weight.shape[0]
    for kind in set(row.heads.split(", ")) & HEADS.keys():
        flat = kind in ("DFlash", "DFlash2", "Domino")
        layer = LayerConfig(
            hidden_size=width, intermediate_size=48, num_attention_heads=4, head_dim=16, qk_norm=kind != "EAGLE-3"
        )
        sizes = {"layer": layer, "hidden_size": width, "target_hidden_size": width, "vocab_size": vocab}
        sizes |= {"num_aux_hidden_states": 2, "aux_hidden_state_layers": (1, config.num_hidden_layers)}
        sizes |= {"draft_vocab_size": vocab - (0 if flat else 20), "own_lm_head": not flat}
        export_head(HEADS[kind](sizes), tmp_path / kind, "sglang" if flat else "vllm")
        candidates = AutoCandidates.from_pretrained(tmp_path / kind)
        prompt = partial(with_media, row) if row.media.startswith("encoder_") else text
        with llama4_repaired():
            outcome = run(model, prompt, Case("head", lambda *_, found=candidates: found, 1))
        assert outcome.status == SAME, f"{kind}: {outcome}"


def test_draft_tokens_may_be_placeholders_of_images() -> None:
    """Would catch: n-grams of a prompt with an image, for which Phi-4-multimodal reads its images again and raises."""
    outcomes = run_all(ROWS["Phi-4-multimodal"], [case for case in CASES if case.name == "n-grams"])
    assert {outcome.status for outcome in outcomes.values()} == {SAME}


def test_image_before_layers_that_keep_states_alone() -> None:
    """Would catch: the length of a cache that has none, asked for in the first step of a prompt with an image."""
    row = ROWS["LFM3-VL"]._replace(settings={"text_config": {"layers": "vv"}})
    outcomes = run_all(row, [case for case in CASES if case.name in ("oracle", "two turns")])
    assert {outcome.status for outcome in outcomes.values()} == {SAME}


def test_every_checkpoint_has_a_result_that_is_right_or_a_refusal() -> None:
    """Would catch: a line of the table that nobody ran, one that was renamed, and a recorded difference."""
    results = page.recorded()["checkpoints"]
    assert list(results) == list(ROWS)
    cases = [case for by_case in results.values() for case in by_case.values()]
    assert not {status for status, _, half in cases for status in (status, half)} & {CRASH, DIFFERENT}
    failing = [name for name, result in results.items() if all(status == PLAIN_FAILS for status, *_ in result.values())]
    assert set(failing) <= {"Gemma 3n", "VibeVoice"}, "plain generate fails with text and image; say why on the page"


def test_page_has_the_table_and_the_lists_of_the_records() -> None:
    """Would catch: a result, a head or a type that was changed in one of both."""
    assert architecture_list.PAGE.read_text(encoding="utf-8") == architecture_list.page(architecture_list.results())


def test_recorded_refusals_are_sentences_of_the_package() -> None:
    """Would catch: a page that refuses for a reason which the package does not give any more."""
    files = sorted((ROOT / "hf_specgen").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", " ".join(file.read_text(encoding="utf-8") for file in files))
    results = [result for row in page.recorded()["checkpoints"].values() for result in row.values()]
    reasons = {reason for status, reason, _ in results if status != PLAIN_FAILS and reason}
    for reason in reasons | set(architecture_list.results().values()) - set(architecture_list.VERIFIED):
        words = reason.partition("(")[0].split()
        assert any(" ".join(words[first : first + 4]) in source for first in range(max(1, len(words) - 3))), reason


def test_every_architecture_of_the_tests_has_a_result() -> None:
    """Would catch: a type that is tested and that the page does not list, or lists twice."""
    assert set(architecture_list.results()) == set(architecture_list.NAMES)


def test_every_type_of_transformers_is_tried_or_named_as_untried() -> None:
    """Would catch: a type that a newer Transformers adds and that nobody tries."""
    unlisted = page.unlisted()
    assert not unlisted, f"new types: add a line to tests/checkpoints/table.py, or to 'untried': {', '.join(unlisted)}"


def test_new_type_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before has power."""
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "made_up", "MadeUpForCausalLM")
    assert page.unlisted() == ["made_up"]
