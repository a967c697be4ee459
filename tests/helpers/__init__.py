"""Tiny models, ragged prompts, and candidate generators that know the answer."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LogitsProcessor

from hf_specgen import Candidates, DraftTree
from hf_specgen.candidates import DraftContext, Drafter

SPEC = json.loads((Path(__file__).parent / "assets" / "tiny_architectures.json").read_text())
ARCHITECTURES = sorted(SPEC["architectures"])
VOCAB = 99


@lru_cache(maxsize=4)
def tiny_model(architecture: str, **overrides: Any) -> Any:
    """A random model with 4 layers of width 64."""
    torch.manual_seed(0)
    arguments = SPEC["architectures"].get(architecture) or SPEC["not_yet"][architecture]
    config = CONFIG_MAPPING[architecture](**{**arguments, **overrides})
    implementation = "eager" if architecture in (*SPEC["eager_only"], "gpt_neo", "bloom") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def prompts(batch: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Random prompts of different lengths, left-padded; the pad id 0 also occurs as a real token."""
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.randint(1, VOCAB, (batch, length), generator=generator)
    input_ids[:, -3] = 0
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch):
        padding = 4 * row % (length - 3)
        input_ids[row, :padding] = 0
        attention_mask[row, :padding] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


class Oracle(Candidates):
    """Knows what plain `generate` writes, and guesses it right always, sometimes or never.

    `accuracy` is the share of right guesses; `branching` adds wrong siblings before the right node, so that the
    accepted path is never the first branch and the cache has to be compacted.
    """

    def __init__(self, answers: torch.Tensor, accuracy: float, k: int = 4, branching: bool = False):
        self.answers, self.accuracy, self.k, self.branching = answers.tolist(), accuracy, k, branching

    def bind(self, context: DraftContext, model: Any) -> Drafter:
        return _OracleDrafter(self)


class _OracleDrafter(Drafter):
    def __init__(self, oracle: Oracle):
        self._oracle = oracle
        self._random = torch.Generator().manual_seed(3)

    def draft(self, context: DraftContext) -> DraftTree:
        return DraftTree.from_nodes([self._row(row, context) for row in range(len(context.generated))])

    open = draft

    def _row(self, row: int, context: DraftContext) -> tuple[list[int], tuple[int, ...]]:
        done = len(context.generated[row])
        truth = self._oracle.answers[row][done : done + min(self._oracle.k, context.budget[row])]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for answer in truth:
            right = float(torch.rand((), generator=self._random)) < self._oracle.accuracy
            if self._oracle.branching:
                tokens.append((answer + 1) % VOCAB)
                parents.append(parent)
            tokens.append(answer if right else (answer + 2) % VOCAB)
            parents.append(parent)
            parent = len(tokens) - 1
        return tokens, tuple(parents)


class PrefixReader(LogitsProcessor):
    """Adds a bias that depends on everything in the row so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = torch.arange(1, input_ids.shape[1] + 1)
        favourite = (input_ids * position).sum(dim=1) % scores.shape[1]
        return scores.scatter_add(1, favourite[:, None], torch.full((len(scores), 1), 0.3))


class RowWisePrefixReader(PrefixReader):
    row_wise = True


class StatefulReader(LogitsProcessor):
    """Remembers every token it has seen; breaks if it is not called once per column, in order."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.memory is None:
            self.memory = torch.zeros_like(scores)
        else:
            assert input_ids.shape[1] == self.seen + 1
            self.memory = 0.5 * self.memory
            self.memory.scatter_add_(1, input_ids[:, -1:], torch.ones(len(scores), 1))
        self.seen = input_ids.shape[1]
        return scores - self.memory


def plain_and_speculative(model: Any, inputs: dict[str, Any], oracle: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    """Run both under one seed; returns the plain ids and the speculative output with its statistics.

    Processors with state are given as factories under `make_processors`.
    """
    make = kwargs.pop("make_processors", None)
    processors = {} if make is None else {"logits_processor": make()}
    torch.manual_seed(11)
    plain = model.generate(**inputs, **kwargs, **processors)
    after_plain = torch.rand(3)
    answers = plain[:, inputs["input_ids"].shape[1] :]
    processors = {} if make is None else {"logits_processor": make()}
    torch.manual_seed(11)
    output = model.generate(
        **inputs, **kwargs, **processors, candidate_generator=Oracle(answers, **oracle), return_dict_in_generate=True
    )
    assert torch.equal(torch.rand(3), after_plain), "the random generator does not stand where plain generate left it"
    return plain, output
