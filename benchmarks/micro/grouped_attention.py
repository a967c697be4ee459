"""Time of one forward pass over several tokens at long contexts, with and without grouped attention.

A verification step of q tokens needs a mask. With grouped key/value heads, Transformers' SDPA function then copies keys
and values once per query head, in every layer: the copies grow with the context and soon cost more than the weights.
A plain step has one token and no mask. So what counts is the time of a step over that of a plain step, by context.

Two tables, both over a plain step: the whole model (four layers of the shape of Llama 3.2 1B: hidden size 2,048, 32
heads, 8 key/value heads, random weights and caches), and the attention of a single layer alone, which does not depend
on how fast the machine multiplies matrices. All variants of a context take turns in every repeat.

    python -m benchmarks.micro.long_context --repeats 30

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig

from hf_specgen.evaluation.provenance import provenance
from hf_specgen.targets.attention import grouped_attention
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.chain_masks import ChainMasks

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64

Row = dict[str, Any]
Steps = dict[tuple[str, int], Callable[[], float]]
"""What takes turns, by variant and number of tokens; each returns the seconds it took."""

VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "repeated": nullcontext,
    "grouped": grouped_attention,
}


def llama(dtype: torch.dtype) -> Any:
    """Four layers of the shape of Llama 3.2 1B, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=131_072,
        dtype=dtype,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def filled(cache: Cache, model: Any, context: int) -> Any:
    """The cache with `context` random keys and values in each layer."""
    for layer in range(model.config.num_hidden_layers):
        states = torch.randn(2, 1, KV_HEADS, context, HEAD_DIM, dtype=model.dtype)
        cache.update(states[0], states[1], layer)
    return cache


def model_steps(model: Any, context: int, queries: list[int]) -> Steps:
    """A plain step of the model, and steps over a chain of tokens of which nothing is kept."""
    plain, ours, masks = filled(DynamicCache(), model, context), filled(RaggedCache(), model, context), ChainMasks(CPU)

    def plain_step() -> float:
        """As plain `generate` does it: its own cache, the prompt's mask without padding."""
        mask = torch.ones(1, context + 1, dtype=torch.long)
        seconds = _timed(model, **_tokens(context, 1), attention_mask=mask, past_key_values=plain)
        plain.crop(-1)
        return seconds

    def step(q: int, variant: str) -> float:
        mask = None if masks.is_all_seen([context], q) else masks.cut([context], q)
        with VARIANTS[variant]():
            seconds = _timed(model, **_tokens(context, q), attention_mask=mask, past_key_values=ours)
        ours.set_lengths([context])
        return seconds

    own = {(variant, q): partial(step, q, variant) for q in queries for variant in VARIANTS}
    return {("plain", 1): plain_step, **own}


def attention_steps(dtype: torch.dtype, context: int, queries: list[int]) -> Steps:
    """The attention of one layer in those steps."""
    module, masks = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS), ChainMasks(CPU)
    longest = context + max(queries)
    key, value = (torch.randn(1, KV_HEADS, longest, HEAD_DIM, dtype=dtype) for _ in range(2))

    def step(q: int, variant: str, masked: bool) -> float:
        query = torch.randn(1, q, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
        width = context + q
        mask = masks.cut([context], q) if masked else None
        with VARIANTS[variant]():
            attention = AttentionInterface()["sdpa"]
            return _timed(attention, module, query, key[:, :, :width], value[:, :, :width], mask)

    own = {(variant, q): partial(step, q, variant, q > 1) for q in queries for variant in VARIANTS}
    return {("plain", 1): partial(step, 1, "repeated", False), **own}


def _tokens(context: int, queries: int) -> dict[str, torch.Tensor]:
    positions = torch.arange(context, context + queries)[None]
    return {"input_ids": torch.ones_like(positions), "position_ids": positions}


def _timed(function: Any, *args: Any, **kwargs: Any) -> float:
    begin = perf_counter()
    function(*args, **kwargs)
    return perf_counter() - begin


def interleave(steps: Steps, repeats: int) -> list[Row]:
    """Times of all variants, which take turns, and their ratios to the plain step."""
    times: dict[tuple[str, int], list[float]] = {variant: [] for variant in steps}
    for turn in range(repeats + 1):
        for variant, step in steps.items():
            seconds = step()
            if turn:  # the first turn warms up
                times[variant].append(seconds)
    plain = times["plain", 1]
    return [
        {
            "attention": name,
            "tokens": q,
            "median ms": 1000 * median(values),
            "fastest ms": 1000 * min(values),
            "median over plain": median(values) / median(plain),
            "fastest over plain": min(values) / min(plain),
        }
        for (name, q), values in times.items()
    ]


@torch.no_grad()
def main() -> None:
    """Measure, print the tables, then everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048, 8192], help="cached tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 9, 17], help="tokens of a step")
    parser.add_argument("--repeats", type=int, default=30, help="turns that every variant takes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = llama(dtype)
    parts: dict[str, Callable[[int], Steps]] = {
        "model": lambda context: model_steps(model, context, options.tokens),
        "attention": lambda context: attention_steps(dtype, context, options.tokens),
    }
    rows: list[Row] = []
    print("part      context attention tokens   median  fastest   over plain: median, fastest")
    for part, steps in parts.items():
        for context in options.contexts:
            for row in interleave(steps(context), options.repeats):
                rows.append({"part": part, "context": context, **row})
                print(f"{part:9} {context:>7} {row['attention']:>9} {row['tokens']:>6}", end=" ")
                print(f"{row['median ms']:>8.2f} {row['fastest ms']:>8.2f} ms", end=" ")
                print(f"{row['median over plain']:>18.2f} {row['fastest over plain']:>8.2f}", flush=True)
    print(json.dumps({"rows": rows, **provenance()}))


if __name__ == "__main__":
    main()
