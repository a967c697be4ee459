"""Time of whole calls with eager and with compiled forward passes of draft model and target, at batch 1."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM

from benchmarks.harness.variants import PLAIN
from benchmarks.micro.spread import spread
from hf_specgen import DraftModelCandidates
from hf_specgen.evaluation.measure import Variant, measure_round
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT, WorkloadSettings, domain_prompts, encode, load

DEPTH, NEW_TOKENS = 5, 64


def compilation(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed of chains of 5 with a draft model: eager, with a compiled draft, and with both models compiled."""
    model, tokenizer = load(WorkloadSettings())
    draft = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=model.dtype).eval()
    eager, compiled = (DraftModelCandidates(draft, k=DEPTH, compile=compile) for compile in (False, True))
    variants = [
        PLAIN,
        Variant("eager", partial(dict, candidate_generator=eager)),
        Variant("compiled draft", partial(dict, candidate_generator=compiled)),
        Variant("both compiled", partial(dict, candidate_generator=compiled, compile=True)),
    ]
    prompts = domain_prompts(WorkloadSettings())
    inputs = [next(encode(tokenizer, turns[:1], 1)) for turns in prompts.values()]
    inputs = inputs[:1] if quick else inputs
    generation = {"max_new_tokens": 16 if quick else NEW_TOKENS, "do_sample": False}
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    identical = {variant.name: True for variant in variants}
    for turn in range(1 + (1 if quick else 2 * repeats)):
        samples = [measure_round(model, one, variants, generation, 0, first=turn) for one in inputs]
        for name in seconds:
            identical[name] &= all(sample[name].ids.equal(sample[PLAIN.name].ids) for sample in samples)
            if turn:  # the first one compiles
                seconds[name].append(sum(sample[name].seconds for sample in samples))
    return [
        {"variant": name, **spread(values, "seconds"), "over eager": sum(seconds["eager"]) / sum(values),
         "identical": identical[name]}
        for name, values in seconds.items()
    ]  # fmt: skip
