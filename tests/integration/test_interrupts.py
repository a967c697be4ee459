"""Ctrl-C between any two statements leaves the model and the random generator as they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_specgen import MedusaCandidates, NgramCandidates, UnoCandidates, random_state
from hf_specgen.decoding import DecodingLoop, DecodingSteps
from hf_specgen.targets import hooks as hooks_of_targets
from hf_specgen.targets.hooks import thread_hooks
from tests.helpers import fresh_model, prompts
from tests.helpers.interrupts import interrupted_at_each_line
from tests.helpers.lora import write_lora
from tests.helpers.medusa import random_heads


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_of_a_thread_are_removed() -> None:
    """Would catch: a hook that was registered before its removal was, and stays."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def work() -> None:
        with thread_hooks(model, before=lambda *given: None, after=lambda *given: None):
            model(torch.ones(1, 2))

    for line in interrupted_at_each_line(thread_hooks, work):
        assert hooks(model) == 0, line
    for line in interrupted_at_each_line(hooks_of_targets._remove, work):
        assert hooks(model) == 0, line


@pytest.mark.parametrize("kind", ["uno", "medusa"])
def test_hooks_of_a_strategy_are_removed(kind: str, tmp_path: Path) -> None:
    """Would catch: a LoRA that goes on to change plain passes, or states of all later passes that are kept."""
    model = fresh_model("llama")
    uno = UnoCandidates(write_lora(model, tmp_path), k=3)
    strategy = uno if kind == "uno" else MedusaCandidates(random_heads(model), k=2)
    call = {**prompts(1), "max_new_tokens": 4, "do_sample": False}
    model.generate(**call, candidate_generator=strategy)
    for line in interrupted_at_each_line(thread_hooks, lambda: model.generate(**call, candidate_generator=strategy)):
        assert hooks(model) == 0, line


def kept() -> None:
    with random_state.kept(torch.device("cpu")):
        torch.rand(3)


def sampled(model: Any) -> Callable[[], Any]:
    call = {**prompts(1), "max_new_tokens": 4, "do_sample": True, "candidate_generator": NgramCandidates(k=2)}
    model.generate(**call)

    def work() -> None:
        torch.manual_seed(5)
        model.generate(**call)

    return work


@pytest.mark.parametrize("function", [random_state.kept, DecodingLoop.__init__, DecodingSteps.__init__])
def test_random_generator_is_given_back(function: Any) -> None:
    """Would catch: a state that a call has taken, and gives back only where it got as far as its first step."""
    work = kept if function is random_state.kept else sampled(fresh_model("llama"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lines = 0
    for line in interrupted_at_each_line(function, work):
        assert torch.equal(torch.get_rng_state(), before), line
        lines += 1
    assert lines >= 3
