"""Decoding under JSON schemas: tokens a step with and without grammar drafts, and the time of verification.

The schemas and prompts are those of `benchmarks/workloads/schemas.jsonl`. The libraries are installed with
`pip install 'hf-specgen[integrations]'`; those that are missing are left out, and without any there are no rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import Candidates, NgramCandidates
from hf_specgen.evaluation.workloads import encode, load

SCHEMAS = Path(__file__).parents[1] / "workloads" / "schemas.jsonl"
NEW_TOKENS = 80
Processor = Callable[[dict[str, Any]], Any]
"""Makes the logits processor of a call from a JSON schema."""
STRATEGIES: dict[str, Callable[[], Candidates]] = {
    "n-grams, chain of 10": lambda: NgramCandidates(k=10),
    "n-grams, tree of 64": lambda: NgramCandidates(k=16, tree=64),
}


class Task(NamedTuple):
    """A prompt, encoded, and the schema of its answer."""

    name: str
    inputs: dict[str, torch.Tensor]
    schema: dict[str, Any]


def grammar_drafts(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Tokens a step over all schemas, by library and strategy; all outputs are those of plain `generate`."""
    model, tokenizer = load(device="cpu")
    chosen = list(_tasks(tokenizer))[: 2 if quick else None]
    rows = []
    for library, processor in _libraries(model, tokenizer):
        plain = {task.name: _generate(model, task, processor) for task in chosen}
        for name, build in STRATEGIES.items():
            values = []
            for grammar_drafts in (False, True):
                candidates, tokens, steps = build(), 0, 0
                for task in chosen:
                    arguments = {"candidate_generator": candidates, "grammar_drafts": grammar_drafts}
                    generated = _generate(model, task, processor, **arguments)
                    assert generated == plain[task.name], f"{library}, {task.name}: the output differs"
                    assert candidates.speculation is not None
                    tokens, steps = tokens + len(generated), steps + candidates.speculation.steps
                values.append(tokens / steps)
            without, with_grammar = values
            row = {"grammar": library, "strategy": name, "schemas": len(chosen), "tokens/step without": without}
            rows.append({**row, "tokens/step": with_grammar, "ratio": with_grammar / without})
    return rows


def grammar_verification(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Milliseconds of a step by part, with a grammar over those without one; the fastest of the repeats.

    A step is verified by the target's forward pass and by what follows it: logits processors, accepted tokens. Both
    sides draft chains of 10 tokens from the same prompts; they generate different texts.
    """
    model, tokenizer = load(device="cpu")
    chosen = list(_tasks(tokenizer))[: 1 if quick else 8]
    if not (libraries := list(_libraries(model, tokenizer))):
        return []
    free = _step_milliseconds(model, chosen, None, repeats)
    rows = [{"grammar": "none", **free}]
    for library, processor in libraries:
        times = _step_milliseconds(model, chosen, processor, repeats)
        ratio = (times["forward ms"] + times["verify ms"]) / (free["forward ms"] + free["verify ms"])
        rows.append({"grammar": library, **times, "forward + verify over none": ratio})
    return rows


def _step_milliseconds(
    model: PreTrainedModel, tasks: list[Task], processor: Processor | None, repeats: int
) -> dict[str, float]:
    runs = []
    for _ in range(1 + repeats):  # the first one is warm-up: some libraries compile their kernels
        seconds, steps = dict.fromkeys(("draft", "forward", "verify"), 0.0), 0
        for task in tasks:
            candidates = NgramCandidates(k=10)
            _generate(model, task, processor, candidate_generator=candidates)
            assert candidates.speculation is not None
            steps += candidates.speculation.steps
            for part in seconds:
                seconds[part] += candidates.speculation.seconds[part]
        runs.append({f"{part} ms": 1000 * value / steps for part, value in seconds.items()})
    return min(runs[1:], key=lambda run: run["forward ms"] + run["verify ms"])


def _generate(model: PreTrainedModel, task: Task, processor: Processor | None, **arguments: Any) -> list[int]:
    processors = {} if processor is None else {"logits_processor": [processor(task.schema)]}
    length = task.inputs["input_ids"].shape[1]
    ids = cast(Any, model).generate(
        **task.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **processors, **arguments
    )
    return cast(list[int], ids[0, length:].tolist())


def _tasks(tokenizer: PreTrainedTokenizerBase) -> Iterator[Task]:
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield Task(row["name"], next(encode(tokenizer, [row["prompt"]], 1)), row["schema"])


def _libraries(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, Processor]]:
    """The installed libraries, with the processors that they make by default."""
    vocab = model.config.get_text_config().vocab_size
    if find_spec("llguidance") and find_spec("outlines"):
        import llguidance.hf
        from outlines.backends.llguidance import LLGuidanceLogitsProcessor

        tokens = llguidance.hf.from_tokenizer(cast(Any, tokenizer), n_vocab=vocab)

        def with_llguidance(schema: dict[str, Any]) -> Any:
            grammar = llguidance.grammar_from("json_schema", json.dumps(schema))
            return LLGuidanceLogitsProcessor(grammar, tokens, "torch")

        yield "llguidance", with_llguidance
    if find_spec("xgrammar"):
        import xgrammar
        from xgrammar.contrib.hf import LogitsProcessor

        compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab))

        @cache
        def compiled(schema: str, any_whitespace: bool) -> Any:
            return compiler.compile_json_schema(schema, any_whitespace=any_whitespace)

        yield "xgrammar", lambda schema: LogitsProcessor(compiled(json.dumps(schema), True))
        yield ("xgrammar, any_whitespace=False", lambda schema: LogitsProcessor(compiled(json.dumps(schema), False)))
