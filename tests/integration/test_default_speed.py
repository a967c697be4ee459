"""Default settings are not slower than plain decoding, by counted passes and given latencies."""

import pytest
import torch

from benchmarks.harness.loading import build
from benchmarks.harness.projection import Projection, latency_for, project
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.depth.latency import Bucket, DraftLatency
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.workloads import domain_prompts, encode
from hf_specgen.memory import memory

DRAFTERS = ("draft_model", "medusa", "eagle", "layer_skip")
MACHINES = {"free verification": (1.02, 0.05), "compute-bound": (4.0, 0.4)}
"""T(33) / T(1), and the time of a drafter pass in plain steps."""
STRATEGIES = ("auto", "draft")
CALLS, NEW_TOKENS = 1, 64


def machine(name: str) -> LatencyModel:
    widest, draft = MACHINES[name]
    curve = CostCurve((1, 33), (1.0, widest), context=256, batch=1)
    return LatencyModel((Bucket(curve, {kind: DraftLatency(seconds=(draft,)) for kind in DRAFTERS}),))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_default_settings_are_not_slower_than_plain(reference_model, tokenizer, strategy: str, name: str) -> None:
    """Sampled prose, which drafts hardly foresee, and copied code, on a machine for drafts and on one against them.

    Would catch: a default that drafts where plain decoding is faster. A call may lose 1.5 plain steps before it knows.
    """
    memory.clear()
    (family,) = build([strategy], [], reference_model, machine(name))
    (arguments,) = family.with_defaults().settings.values()
    speedups = {}
    for domain in ("edit", "prose"):
        texts = domain_prompts(WorkloadSettings(prompts_per_domain=CALLS))[domain]
        total = Projection()
        for seed, inputs in enumerate(encode(tokenizer, texts, 1)):
            candidates = arguments()["candidate_generator"]
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": 0.8} if domain == "prose" else {"do_sample": False}
            reference_model.generate(**inputs, **sampling, max_new_tokens=NEW_TOKENS, candidate_generator=candidates)
            total += project(candidates.speculation, latency_for(candidates, machine(name)))
        speedups[domain] = total.speedup
    print(strategy, name, speedups)
    assert min(speedups.values()) > 0.95
