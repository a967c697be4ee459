"""Ground truth for draft heads: folders with a checkpoint and the numbers that its original implementation computes."""

import json
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.models import SHARED


def features_of(bound: Any, hidden_states: Any) -> torch.Tensor:
    """What a bound head reads of a target's `hidden_states`: `[batch, length, layers * hidden]`."""
    states = [hidden_states[layer] for layer in bound.aux_hidden_state_layers]
    return torch.cat(states, dim=-1).to(next(bound.head.parameters()))


FAMILIES = {
    "eagle1_original": "autoregressive",
    "eagle3_original": "autoregressive",
    "speculators_eagle3": "autoregressive",
    "dflash_zlab": "block",
    "jetspec": "block",
    "speculators_dflash": "block",
    "speculators_peagle": "parallel",
    "speculators_dspark": "path",
    "deepspec_dspark": "path",
    "specforge_dspark": "path",
    "modelopt_dspark": "path",
    "speculators_dflash2": "path",
    "dflash2": "path",
    "domino": "path",
    "modelopt_domino": "path",
    "speculators_mtp": "mtp_recursive",
    "mtp_transformers": "mtp",
    "mtp_qwen": "mtp_recursive",
    "gemma4_assistant": "assistant",
    "medusa": "medusa",
    "pard": "parallel_draft",
}
"""How a format drafts, by the beginning of its name; the longest match counts."""


INPUTS = {
    "input_ids",
    "next_token",
    "accepted",
    "position_ids",
    "path",
    "prompt",
    "n_last_matches",
    "inputs_embeds",
    "generated",
    "generated_plain",
    "generated_forced",
}
"""Last part of the names of tensors that are inputs of the head, or record how these were produced."""

NOT_DRAFTING = ("training_forward.step", "training_forward.loss", "shared_kv.", ".tree.")
"""What no drafter here computes: losses, later steps of a training forward without a cache, states handed over by the
target, and the original's trees, which are chosen by another rule."""


@dataclass
class Fixture:
    """One folder of ground truth: a head, its target, and the tensors that the original implementation computed."""

    folder: Path
    targets: Path
    expected: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = json.loads((self.folder / "expected.json").read_text(encoding="utf-8"))

    @property
    def family(self) -> str:
        matches = [name for name in FAMILIES if self.expected["format"].startswith(name)]
        if not matches:
            known = ", ".join(FAMILIES)
            raise AssertionError(
                f"fixture {self.folder.name} has the unknown format {self.expected['format']!r}; known are {known}"
            )
        return FAMILIES[max(matches, key=len)]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "expected.safetensors")

    @property
    def prompts(self) -> list[str]:
        return sorted({name.split(".")[0] for name in self.tensors if ".round" in name})

    @property
    def head_folder(self) -> Path:
        return self.folder / self.expected["head"]

    @property
    def checkpoint_folder(self) -> Path:
        """Where the head is: in a folder of its own, or with its target."""
        return self.head_folder if "head" in self.expected else self.target_folder

    @property
    def target_folder(self) -> Path:
        own, named = self.folder / "target", self.folder / self.expected["target"]
        return next((path for path in (own, named) if path.is_dir()), self.targets / named.name)

    @property
    def target(self) -> PreTrainedModel:
        return target_of(self.target_folder)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def names(self, prefix: str) -> set[str]:
        return {name for name in self.tensors if name.startswith(prefix)}


@cache
def target_of(folder: Path) -> PreTrainedModel:
    """A checkpoint's model, shared by the tests of a file: never change it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    SHARED.add(model)
    return model


class Comparison:
    """Compares tensors with those of a fixture within its tolerance, and records which were compared."""

    def __init__(self, fixture: Fixture) -> None:
        self.fixture = fixture
        self.compared: set[str] = set()

    def check(self, name: str, actual: torch.Tensor) -> None:
        expected = self.fixture.tensors[name]
        self.compared.add(name)
        if actual.dtype in (torch.int64, torch.bool) or not expected.is_floating_point():
            assert torch.equal(actual.to(expected.dtype).reshape(expected.shape), expected), (
                f"{name}: {actual} != {expected}"
            )
            return
        tolerance = self.fixture.expected["tolerance"]
        torch.testing.assert_close(
            actual.float().reshape(expected.shape),
            expected,
            atol=tolerance["atol"],
            rtol=tolerance["rtol"],
            msg=lambda text: f"{self.fixture.folder.name}, {name}: {text}",
        )

    def check_if_there(self, name: str, actual: torch.Tensor) -> None:
        if name in self.fixture.tensors:
            self.check(name, actual)

    def check_end(self, name: str, actual: torch.Tensor) -> None:
        """Compare as many of the last positions `[1, length, ...]` as both have, if the fixture has any."""
        if (expected := self.fixture.tensors.get(name)) is not None:
            common = min(expected.shape[1], actual.shape[1])
            self.fixture.tensors[name] = expected[:, -common:]
            self.check(name, actual[:, -common:])
            self.fixture.tensors[name] = expected

    def assert_complete(self, prompts: list[str]) -> None:
        """Fail on ground truth of these prompts that was not compared, apart from inputs."""
        names = {name for name in self.fixture.tensors if name.split(".")[0] in prompts}
        left = {name for name in names - self.compared if not self._is_input(name)}
        assert not left, f"{self.fixture.folder.name}: never compared: {sorted(left)}"

    def _is_input(self, name: str) -> bool:
        if name.rpartition(".")[2] in INPUTS or any(part in name for part in NOT_DRAFTING):
            return True
        # Recorded inside Transformers, where an assistant sees keys of rejected tokens; `clean` has the same without.
        number, _, rest = name.partition(".round")[2].partition(".")
        return f"{name.split('.')[0]}.round{number}.clean.{rest}" in self.fixture.tensors


def find_fixtures(folder: Path) -> list[Fixture]:
    """Every fixture in a folder, by its expected.json; targets lie in `folder/targets`."""
    return [Fixture(path.parent, folder / "targets") for path in sorted(folder.glob("**/expected.json"))]
