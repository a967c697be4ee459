"""Tests which architectures give the tokens of plain `generate`, and writes the documentation's page about them.

python -m tests.helpers.architecture_list          # writes tests/assets/architectures.json and docs/architectures.md
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import page as checkpoints
from tests.fuzz.models import ARCHITECTURES, tiny_model
from tests.helpers import encoder_decoder
from tests.helpers.comparison import assert_same_tokens
from tests.helpers.models import STATEFUL, prompts, stateful_model
from tests.helpers.multimodal import MULTIMODAL, multimodal_model, multimodal_prompts
from tests.helpers.oracle import Oracle

RESULTS = Path(__file__).parents[1] / "assets" / "architectures.json"
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
VERIFIED = TREES, CHAINS, ONE_ROW = "trees", "chains", "one row"
NAMES = sorted(
    {*ARCHITECTURES, *STATEFUL}
    | {f"{kind} (with image or audio)" for kind in MULTIMODAL}
    | {f"{kind} (encoder-decoder)" for kind in encoder_decoder.CONFIGS}
)


TYPES = """
## By type

Names are the `model_type` of the config, tried with the bare language model. Without an addition they mean the causal
language model, so `bart` is `BartForCausalLM`, the decoder alone.
"""
"""The introduction of the lists."""


def outcome(name: str) -> str:
    """What the architecture verifies, or the sentence with which it is refused."""
    kind, _, more = name.partition(" (")
    for batch in (3, 1):
        model, inputs = _model(kind, more, batch)
        try:
            statistics = assert_same_tokens(model, inputs, _trees, max_new_tokens=8)
        except ValueError as refusal:
            sentence = str(refusal)
            continue
        if batch == 1:
            return ONE_ROW
        return TREES if statistics.accepted else CHAINS  # the first path of the oracle's trees is always wrong
    return re.sub(r"^\w+ ", "", sentence)


def _trees(answers: torch.Tensor) -> Oracle:
    return Oracle(answers, 0.7, k=3, branching=True)


def _model(kind: str, more: str, batch: int) -> tuple[Any, Any]:
    """A model and its inputs."""
    if more == "encoder-decoder)":
        return encoder_decoder.encoder_decoder(kind), encoder_decoder.encoder_inputs(kind, batch)
    if more:
        return multimodal_model(kind), multimodal_prompts(kind, batch)
    return (stateful_model(kind) if kind in STATEFUL else tiny_model(kind)), prompts(batch)


def page(by_name: dict[str, str]) -> str:
    """The documentation page of these results, with the introduction and the table that it has."""
    groups = {TREES: "Draft trees and batches", CHAINS: "Chains and batches", ONE_ROW: "One prompt at a time"}
    parts = [PAGE.read_text(encoding="utf-8").split("\n| checkpoint ")[0], "\n", checkpoints.section()]
    parts.append(TYPES)
    for status, title in groups.items():
        names = [name for name, result in by_name.items() if result == status]
        if names:
            parts.append(f"\n## {title}\n\n{', '.join(f'`{name}`' for name in names)}\n")
    refused: dict[str, list[str]] = {}
    for name, result in by_name.items():
        if result not in groups:
            reason = result.removesuffix("; use plain generate(candidate_generator=None)").replace("|", "/")
            refused.setdefault(reason, []).append(f"`{name}`")
    rows = "".join(f"| {', '.join(names)} | {reason} |\n" for reason, names in refused.items())
    parts.append(f"\n## Refused\n\n| type | reason |\n|---|---|\n{rows}")
    return "".join(parts) + f"\n## Not tried\n\n{checkpoints.untried_section()}"


def results() -> dict[str, str]:
    """What is recorded, by name."""
    recorded: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return dict(sorted(recorded.items()))


def main() -> None:
    """Try every architecture that has no result yet."""
    found = results()
    for name in NAMES:
        if name not in found:
            try:
                found[name] = outcome(name)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            print(f"{name}: {found[name]}", flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(dict(sorted(found.items()))), encoding="utf-8")


if __name__ == "__main__":
    main()
