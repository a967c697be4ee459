"""What a decoding step does outside of forward passes: operations, reads by the host, tensors built from host data.

On a GPU every operation is a launch, and every read waits until the device is done, so that these counts limit the
speed of a step there. They are the same on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    MedusaCandidates,
    NgramCandidates,
    RecyclingCandidates,
)
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.workloads import (
    EMBEDDED_DFLASH,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE,
    EMBEDDED_HEADS,
    domain_prompts,
    encode,
    load,
)

VIEWS = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "lift_fresh"),
    *("narrow", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
    *("unfold", "unsqueeze", "view"),
}
"""Operations that compute nothing."""
READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__")
"""Methods with which the host reads a tensor; of `tensor.cpu().numpy()` the second counts."""
BUILDERS = ("tensor", "from_numpy")
"""Functions that make tensors from host data."""
STRATEGIES: dict[str, tuple[Callable[[], Candidates], int]] = {
    "n-grams, k=8": (lambda: NgramCandidates(k=8), 27),
    "n-grams + recycling": (lambda: CombinedCandidates([NgramCandidates(k=8), RecyclingCandidates()]), 45),
    "Medusa, 16 nodes": (lambda: MedusaCandidates(EMBEDDED_HEADS, tree=16), 60),
    "DFlash, 16 nodes": (lambda: DFlashCandidates(EMBEDDED_DFLASH, k=7, tree=16), 60),
    "draft model, chain of 5": (lambda: DraftModelCandidates(EMBEDDED_DRAFT, k=5), 80),
    "draft model, 32 nodes": (lambda: DraftModelCandidates(EMBEDDED_DRAFT, k=6, tree=32), 120),
    "EAGLE-3, 32 nodes": (lambda: EagleCandidates(EMBEDDED_EAGLE, k=6, tree=32), 120),
    "EAGLE-3, default": (lambda: EagleCandidates(EMBEDDED_EAGLE), 120),
}
"""Each with the number of operations, views not counted, that a step should need at most."""


def step_operations(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Counts per step at batch 1, greedy, without the prefill."""
    model, tokenizer = load(WorkloadSettings())
    inputs = next(encode(tokenizer, domain_prompts(WorkloadSettings())["json"][:1], 1))
    rows = []
    for name, (build, goal) in STRATEGIES.items():
        candidates = build()
        arguments = {**inputs, "candidate_generator": candidates, "do_sample": False}
        cast(Any, model).generate(**arguments, max_new_tokens=24)  # checks, calibration
        with counting(model) as counts:
            cast(Any, model).generate(**arguments, max_new_tokens=24 if quick else 80)
        assert candidates.speculation is not None
        steps = candidates.speculation.steps
        rows.append(
            {"strategy": name, **{kind: round(count / steps, 1) for kind, count in counts.items()}, "goal": goal}
        )
    return rows


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[Counter[str]]:
    """Count what happens outside of modules, from the end of the first forward pass of `model` on."""
    counter = _Counter(model)
    before = {name: getattr(torch.Tensor, name) for name in READS}
    builders = {name: getattr(torch, name) for name in BUILDERS}
    hooks = [
        register_module_forward_pre_hook(lambda *_: counter.enter()),
        register_module_forward_hook(lambda module, *_: counter.leave(module), always_call=True),
    ]
    try:
        for name, method in before.items():
            setattr(torch.Tensor, name, counter.counted("host reads", method))
        for name, function in builders.items():
            setattr(torch, name, counter.counted("from host data", function))
        with counter:
            yield counter.counts
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)
        for name, function in builders.items():
            setattr(torch, name, function)
        for hook in hooks:
            hook.remove()


class _Counter(TorchDispatchMode):
    """Counts operations while no module runs."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.counts: Counter[str] = Counter({"operations": 0, "without views": 0, "host reads": 0, "from host data": 0})
        self._model, self._inside, self._has_begun = model, 0, False

    def enter(self) -> None:
        """A module begins."""
        self._inside += 1

    def leave(self, module: torch.nn.Module) -> None:
        """A module has ended."""
        self._inside -= 1
        self._has_begun |= module is self._model

    @property
    def _is_counting(self) -> bool:
        return self._has_begun and not self._inside

    def counted(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted, without what it calls itself."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[kind] += self._is_counting
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_counting:
            self.counts["operations"] += 1
            self.counts["without views"] += func.__name__.split(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))
