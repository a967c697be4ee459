"""Keys of a head's config.json that are not known to change nothing are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_specgen.heads.config_keys import HEAD, check_keys
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from tests.helpers.head_fixtures import FIXTURES

HEADS = [name for name, one in FIXTURES.items() if "head" in one.expected and not name.startswith(("pard", "medusa"))]
PLACES = ("transformer_layer_config", "text_config", "dflash_config", "rope_parameters")


@pytest.mark.parametrize("name", [*HEADS, "medusa_v1"])
def test_key_that_is_not_known_raises_in_every_format_and_place(name: str, tmp_path: Path) -> None:
    """Would catch: a head that is computed without what a new key means, and whose drafts are never accepted."""
    shutil.copytree(FIXTURES[name].head_folder, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())

    def load() -> None:
        if name == "speculators_mtp_qwen3":
            load_mtp(FIXTURES[name].target, str(path.parent))
        else:
            load_head(path.parent)

    load()
    for place in (None, *PLACES):
        if place is not None and place not in config:
            continue
        changed = json.loads(json.dumps(config))
        (changed if place is None else changed[place])["attention_wobble"] = 0.7
        path.write_text(json.dumps(changed))
        key = "attention_wobble" if place is None else f"{place}.attention_wobble"
        with pytest.raises(ValueError, match=rf"head: config.json has {key} = '0.7', which may change what"):
            load()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("residual_multiplier", 0.5, r"residual_multiplier = '0.5'.* is not read \(1 or 1.0 is\)"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping = '50.0'"),
        ("eagle_config", {"use_last_layernorm": False}, r"eagle_config.use_last_layernorm = 'False'.* \(True is\)"),
        ("rope_scaling", {"rope_type": "yarn", "ramp": 3}, "rope_scaling.ramp = '3'"),
        ("is_upside_down", False, "is_upside_down = 'False'"),
        ("markov_rank", 8, "markov_rank = '8'"),
        ("residual_multiplier", 1.0, None),
        ("markov_rank", False, None),
        ("use_wobble", False, None),
        ("attention_wobble", None, None),
        ("num_experts_per_tok", 8, None),
        ("image_token_id", 8, None),
        ("quantization_config", {"quant_method": "fp8"}, None),
    ],
)
def test_values_of_keys_that_are_not_read(key: str, value: Any, reason: str | None) -> None:
    """Would catch: options that are off, training data or parts of a target taken for something unknown."""
    config = {"model_type": "llama", "hidden_act": "silu", key: value}
    if reason is None:
        return check_keys(config, HEAD)
    with pytest.raises(ValueError, match=reason):
        check_keys(config, HEAD)
