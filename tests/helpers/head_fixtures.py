"""Ground truth for draft heads: folders with a checkpoint and the numbers that its original implementation computes."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen.heads.eagle import Eagle3Head, EagleConfig
from hf_specgen.heads.head_text import HeadText
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.heads.path_head import PathDrafter
from tests.fuzz.heads import steer
from tests.helpers.models import SHARED
from tests.helpers.paths import HEAD_FIXTURES

FAMILIES = {
    "eagle1_original": "autoregressive",
    "eagle3_original": "autoregressive",
    "eagle3_mla": "autoregressive",
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
    "lilicorr": "lattice",
    "modelopt_domino": "path",
    "speculators_mtp": "mtp_recursive",
    "mtp_transformers": "mtp",
    "mtp_qwen": "mtp_recursive",
    "gemma4_assistant": "assistant",
    "medusa": "medusa",
    "pard": "parallel_draft",
}
"""How a format drafts, by the beginning of its name; the longest match counts."""

RECORDED = {"autoregressive": "chain.", "mtp_recursive": "chain.", "path": "greedy.", "parallel_draft": "slots."}
RECORDED |= {"parallel": "block.", "block": "block.", "assistant": "clean.", "medusa": "heads.", "mtp": ""}
RECORDED |= {"lattice": "greedy."}
"""By family, under which prefix a fixture has the drafts of a round."""


class Drafted(NamedTuple):
    """What the original drafted in a round: logits `[depths, vocab]`, or `[depths, candidates]` of these alone."""

    logits: torch.Tensor
    candidates: torch.Tensor | None
    is_normalised: bool
    tokens: list[int]


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
            name = self.expected["format"]
            raise AssertionError(f"{self.folder.name} has the unknown format {name!r}; known are {', '.join(FAMILIES)}")
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

    @property
    def rounds(self) -> list[int]:
        """The numbers of the recorded rounds, from 1 on."""
        numbers = {int(name.split(".")[1].removeprefix("round")) for name in self.tensors if ".round" in name}
        return sorted(numbers)

    def text(self, prompt: str, number: int) -> list[int]:
        """The known tokens when a round drafts, of which the target has not processed the last one."""
        ids = self.get(f"{prompt}.round{number}.input_ids")[0].tolist()
        if number > 1 or self.family in ("mtp", "assistant"):
            return ids
        return [*ids, int(self.get(f"{prompt}.round{number}.next_token"))]

    def drafted(self, prompt: str, number: int, part: str = "") -> Drafted:
        """What the original drafted; `part`: along another path than the greedy one."""
        prefix = f"{prompt}.round{number}."
        own = prefix + (part or RECORDED[self.family])
        name = next(name for name in ("logits", "scores", "q") if own + name in self.tensors)
        logits, tokens = self.get(own + name), self.get(own + "tokens").flatten().tolist()
        if self.family == "medusa":  # of all positions
            logits = logits[:, -1]
        logits = logits.reshape(-1, logits.shape[-1])[-len(tokens) :]
        candidates = None if name == "logits" else self.get(f"{prefix}selector.candidates")[0]
        return Drafted(logits, candidates, name == "q", tokens)


@cache
def target_of(folder: Path) -> PreTrainedModel:
    """A checkpoint's model, shared by the tests of a file: never change it."""
    model = copy.deepcopy(_loaded(folder))
    SHARED.add(model)
    return model


@cache
def _loaded(folder: Path) -> PreTrainedModel:
    """The model of which each file gets a copy of its own, in a fifth of the time of loading; it never runs."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def find_fixtures(folder: Path) -> list[Fixture]:
    """Every fixture in a folder, by its expected.json; targets lie in `folder/targets`."""
    return [Fixture(path.parent, folder / "targets") for path in sorted(folder.glob("**/expected.json"))]


FIXTURES = {fixture.folder.name: fixture for fixture in find_fixtures(HEAD_FIXTURES)}
"""Those of this repository."""


def small_eagle(**options: Any) -> Eagle3Head:
    """A random EAGLE-3 head for a target of width 16 with 40 tokens, of which it proposes 12."""
    layer = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes = {"hidden_size": 16, "vocab_size": 40, "target_hidden_size": 16, "num_aux_hidden_states": 3}
    settings: dict[str, Any] = sizes | {"draft_vocab_size": 12, "own_lm_head": True} | options
    return Eagle3Head(EagleConfig(layer=LayerConfig(hidden_size=16, **layer), **settings))


def features_of(bound: Any, hidden_states: Any) -> torch.Tensor:
    """What a bound head reads of a target's `hidden_states`: `[batch, length, layers * hidden]`."""
    states = [hidden_states[layer] for layer in bound.aux_hidden_state_layers]
    return torch.cat(states, dim=-1).to(next(bound.head.parameters()))


def steered(candidates: Any, texts: Sequence[Sequence[int]]) -> Any:
    """A strategy whose head prefers most tokens of these texts, one for each row; its last session is `session`."""
    begin = candidates.begin
    known = [[token if place % 5 and place % 7 else None for place, token in enumerate(text)] for text in texts]

    def recorded(*arguments: Any) -> Any:
        candidates.session = steer(begin(*arguments), known)
        return candidates.session

    candidates.begin = recorded
    return candidates


@torch.no_grad()
def reread(session: Any, row: int, count: int) -> Any:
    """The reference: the drafter of a head that has read the first `count` positions of a row's text, in one pass."""
    call, bound = session.batch.call, session.drafter.bound
    text = torch.tensor([call.state.prompts[row] + call.state.generated[row]])
    features = features_of(bound, call.model(text[:, :-1], output_hidden_states=True).hidden_states)[0, :count]
    fresh: Any = type(session.drafter)(bound, None, 1)
    new = HeadText([features], [text[0, 1 : 1 + count].tolist()], [True])
    if fresh.is_one_pass and not isinstance(fresh, PathDrafter):
        fresh.forward_depths(new, 2)
    else:
        fresh.forward_text(new)
    return fresh


class Corrected(NamedTuple):
    """Logits `[paths, positions, draft_vocab]` along given paths, and logits of the confidence head, or None."""

    logits: torch.Tensor
    confidence: torch.Tensor | None


def corrected(bound: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> Corrected:
    """Logits of a block head with a correction along given paths (teacher forcing), with gradients.

    `hidden` are the outputs `[paths, block, hidden]` of the whole block; `tokens` `[paths, length]` the anchor and the
    tokens after it, the i-th of which is the one before what the i-th proposing position predicts.
    """
    head, first = bound.head, bound.head.config.first_proposing_position
    state, queries = head.first_state(hidden, tokens[:, 0], bound.embed), []
    proposing = hidden[:, first : first + tokens.shape[1]]
    for depth in range(proposing.shape[1]):
        query, state = head.step(proposing[:, depth], tokens[:, depth], state, depth, bound.embed)
        queries.append(query)
    base = bound.logits(proposing)
    logits = base + torch.stack(queries, dim=1) @ head.keys().T
    if head.max_candidates is not None:
        kept = base.topk(min(head.max_candidates, base.shape[-1]), dim=-1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    confidence = getattr(head, "confidence_logits", lambda *_: None)
    return Corrected(logits, confidence(proposing, tokens[:, : proposing.shape[1]]))
