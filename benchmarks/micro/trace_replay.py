"""Strategies that need no model, measured on what a large model once wrote.

A scripted target "predicts" a recorded text: at each position its logits point to the next recorded token. It runs in
the real decoding loops, ours and Transformers', so that what is counted is what those loops really do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks.common import PEERS, Rows, ours
from hf_specgen import NgramHistory
from hf_specgen.evaluation.workloads import WorkloadSettings, load

TRACES = Path(__file__).parent / "assets" / "traces"


class ScriptedTarget(PreTrainedModel, GenerationMixin):
    """A "model" that writes what it is told to.

    Args:
        vocab_size: of the tokenizer that the scripts are encoded with.
    """

    config_class = LlamaConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules: list[str] = []

    def __init__(self, vocab_size: int):
        super().__init__(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                max_position_embeddings=10**6,
                eos_token_id=None,
            )
        )
        self.anchor = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.script = torch.zeros(1, dtype=torch.long)
        self.forwards = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits that are 1 at the recorded token after each position, 0 elsewhere."""
        self.forwards += 1
        assert position_ids is not None
        states = torch.zeros(*input_ids.shape, 1)[:, None]
        past_key_values.update(states, states, 0)
        following = self.script[(position_ids + 1).clamp(max=len(self.script) - 1)]
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size).scatter_(2, following[..., None], 1.0)
        return CausalLMOutputWithPast(logits=cast(Any, logits), past_key_values=past_key_values)


def tokens_per_forward(
    scripts: Sequence[tuple[list[int], list[int]]], vocab_size: int, arguments: Callable[[], dict[str, Any]]
) -> float:
    """Tokens written per forward pass of the target (the prompt's own included), over all scripts.

    Args:
        scripts: prompt and answer of each recording, as token ids.
        vocab_size: of their tokenizer.
        arguments: what `generate` is to be called with, made anew for each script.

    Raises:
        AssertionError: if something else than the recorded text comes out.
    """
    target = ScriptedTarget(vocab_size)
    tokens = 0
    for prompt, answer in scripts:
        target.script = torch.tensor(prompt + answer)
        ids = cast(Any, target).generate(torch.tensor([prompt]), max_new_tokens=len(answer), **arguments())
        assert ids[0].tolist() == prompt + answer, "the loop did not write the recorded text"
        tokens += len(answer)
    return tokens / target.forwards


def load_scripts(name: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """The recordings of one trace file as token ids."""
    rows = [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return [(encode(row["prompt"]), encode(row["response"])) for row in rows]


def traces(repeats: int, quick: bool = False, texts: int | None = None) -> Rows:
    """Tokens per forward pass on recorded outputs of a 7B model; counted, so once is enough."""
    _, tokenizer = load(WorkloadSettings())
    rows: Rows = []
    for name in ("cnn", "hagrid"):
        scripts = load_scripts(name, tokenizer)[: 5 if quick else texts]
        history = NgramHistory()
        sides: dict[str, Callable[[], dict[str, Any]]] = {c.name: c.arguments for c in PEERS}
        sides["ours k=10"] = partial(ours, k=10)
        sides["ours k=10, 4 branches"] = partial(ours, k=10, branches=4)
        sides["ours k=10, 4 branches, history"] = partial(ours, k=10, branches=4, history=history)
        values = {side: tokens_per_forward(scripts, len(tokenizer), arguments) for side, arguments in sides.items()}
        for side, value in values.items():
            rows.append(
                {
                    "trace": name,
                    "variant": side,
                    "tokens/forward": value,
                    "over lookup n=2": value / values["lookup n=2"],
                }
            )
    return rows
