"""Tiny models and prompts on a GPU, and the comparison with plain `generate` there."""

import functools
from typing import Any

import torch

from hf_specgen import Candidates, Statistics
from tests.helpers import perturbed_copy, prompts
from tests.helpers.models import fresh_model

NEW_TOKENS = 24


@functools.cache
def model(architecture: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model on the GPU, shared by tests that do not change it."""
    return fresh_model(architecture, **overrides).to("cuda", dtype)


@functools.cache
def draft(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """A draft model for `model(architecture, dtype)`, some of whose tokens are accepted."""
    return perturbed_copy(fresh_model(architecture)).to("cuda", dtype)


def inputs(batch: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Left-padded random prompts on the GPU."""
    return {name: tensor.to("cuda") for name, tensor in prompts(batch, length).items()}


def same_tokens(target: Any, given: dict[str, torch.Tensor], candidates: Candidates, **arguments: Any) -> Statistics:
    """Assert that speculation gives plain `generate`'s tokens and leaves the random generator in the same state."""
    settings = {name: arguments.pop(name) for name in ("compile", "verification") if name in arguments}
    arguments = {"max_new_tokens": NEW_TOKENS, **arguments}
    torch.manual_seed(11)
    plain = target.generate(**given, **arguments)
    following = torch.rand(3, device="cuda")
    torch.manual_seed(11)
    speculation = {"candidate_generator": candidates, "return_dict_in_generate": True, **settings}
    output = target.generate(**given, **arguments, **speculation)
    assert torch.equal(torch.rand(3, device="cuda"), following), "the state of the random generator differs"
    assert output.sequences.tolist() == plain.tolist()
    statistics: Statistics = output.speculation
    return statistics
