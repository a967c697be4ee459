"""Requests of `generate_batch`, and the settings that its tests share."""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_specgen import AdaptiveDepth, AutoCandidates, CombinedCandidates, DraftModelCandidates, NgramCandidates
from tests.helpers.paths import BENCHMARK_ASSETS, DRAFT_LM

NEW = 16
SMALL = {"page_size": 16, "num_blocks": 160, "max_batch_tokens": 256}
GREEDY = {"do_sample": False, "eos_token_id": [11, 60]}
GPU_LIKE = AdaptiveDepth(str(BENCHMARK_ASSETS.parent / "profiles" / "gpu_like.json"))


def asset(name: str, **settings: Any) -> Any:
    """A strategy with a bundled head."""
    return AutoCandidates.from_pretrained(str(BENCHMARK_ASSETS / name), **settings)


HEADS = {
    "medusa": lambda: asset("medusa-heads"),
    "eagle trees": lambda: asset("eagle3-head", k=4, tree=8),
    "draft model": lambda: DraftModelCandidates(str(DRAFT_LM), k=4, tree=8, draft_window=40),
    "dspark and n-grams": lambda: CombinedCandidates([NgramCandidates(), asset("dspark-head")]),
}
"""Strategies for the bundled target that read its hidden states, or run a network of their own."""


def requests(count: int, shortest: int = 3) -> list[list[int]]:
    """Random prompts of mixed lengths that repeat themselves."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(shortest, 3 * shortest + 10, (count,), generator=generator).tolist()
    return [2 * torch.randint(1, 60, (size,), generator=generator).tolist() for size in sizes]


def config(**settings: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": NEW, "pad_token_id": 0, **GREEDY, **settings})


def run(model: Any, prompts: list[list[int]], batching: Any = None, settings: Any = None, **arguments: Any) -> Any:
    """The tokens of each request by `generate_batch`."""
    small = {**SMALL, **(batching or {})}
    results = model.generate_batch(
        prompts,
        generation_config=settings or config(),
        continuous_batching_config=ContinuousBatchingConfig(**small),
        **arguments,
    )
    assert not any(result.error for result in results.values())
    return [result.generated_tokens for result in results.values()]


def started(model: Any, settings: Any = None) -> Any:
    """A manager for requests of any callers."""
    batching = ContinuousBatchingConfig(**(settings or SMALL))
    manager = model.init_continuous_batching(generation_config=config(), continuous_batching_config=batching)
    manager.start()
    return manager
