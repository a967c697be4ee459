"""Compiled passes: the tokens of plain `generate`, few compilations, and refusals that name the true reason.

A backend that runs the traced operations as they are stands for a compiler; tests/slow has the real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_specgen import (
    Candidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
)
from hf_specgen.targets import captured, compiled
from tests.helpers import SAMPLING, perturbed_copy, prompts
from tests.helpers.captures import graphs_on_cpu
from tests.helpers.medusa import fitted_heads
from tests.helpers.models import fresh_model
from tests.helpers.stateful import stateful_model


class Backend:
    """Runs traced graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.offset = 0.0

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            first, *others = graph.forward(*arguments)
            return first + self.offset, *others

        return run


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    counting = Backend()
    monkeypatch.setattr(compiled, "BACKEND", counting)
    return counting


@pytest.fixture(scope="module", autouse=True)
def _forgotten_functions() -> Iterator[None]:
    """Frees all compiled functions after the last test; until then those of a shared model are reused."""
    yield
    torch._dynamo.reset()


def small(architecture: str = "llama", layers: int = 1, **overrides: Any) -> Any:
    return fresh_model(architecture, num_hidden_layers=layers, **overrides)


@pytest.fixture(scope="module")
def shared_between_tests() -> tuple[Any, Backend]:
    return small(), Backend()


@pytest.fixture
def shared(shared_between_tests: tuple[Any, Backend], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Backend]:
    """A model whose passes over one row are compiled in the first test that needs them, and the backend of all."""
    monkeypatch.setattr(compiled, "BACKEND", shared_between_tests[1])
    return shared_between_tests


@pytest.fixture(scope="module")
def target_of_trees() -> tuple[Any, Backend]:
    """A model that is compiled in the first of several tests, and the backend of all of them, which counts graphs."""
    return small(layers=2), Backend()


def same_tokens(model: Any, inputs: Any, candidates: Candidates, compile: Any = True, **arguments: Any) -> Any:
    """Assert that a compiled call gives the tokens of plain `generate`; returns its statistics."""
    arguments = {"max_new_tokens": 12, **arguments}
    torch.manual_seed(5)
    plain = model.generate(**inputs, **arguments)
    torch.manual_seed(5)
    settings = {"candidate_generator": candidates, "compile": compile, "return_dict_in_generate": True}
    ours = model.generate(**inputs, **arguments, **settings)
    assert torch.equal(plain, ours.sequences)
    return ours.speculation


def test_compiled_target_in_threads_compiled_once(shared: Any) -> None:
    """Would catch: threads that compile the same function twice or write to each other's slots.

    The first test with the shared model: here it is compiled.
    """
    model, backend = shared
    expected = model.generate(**prompts(1), max_new_tokens=10)

    def call(_: int) -> torch.Tensor:
        return model.generate(**prompts(1), max_new_tokens=10, candidate_generator=NgramCandidates(k=3), compile=True)

    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(ids, expected) for ids in pool.map(call, range(4)))
    assert 1 <= backend.graphs <= 2


def test_compiled_draft_model_same_tokens_and_compiled_once(backend: Backend) -> None:
    """Would catch: padding that is attended to, and a compilation for every length or call."""
    model = small()
    candidates = DraftModelCandidates(perturbed_copy(model), k=3, compile=True)
    statistics = same_tokens(model, prompts(2), candidates, compile=False)
    assert statistics.accepted > 0
    assert backend.graphs == 2  # passes over one token and over two to four
    assert statistics.seconds["compile"] > 10 * statistics.seconds["draft"] / 12  # compiling is no part of drafting
    same_tokens(model, prompts(2, length=20), candidates, compile=False, max_new_tokens=20)
    assert backend.graphs == 2


@pytest.mark.parametrize("mode", SAMPLING)
def test_compiled_target_with_trees_same_tokens(
    mode: str, target_of_trees: tuple[Any, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: masks of the wrong width, slots of another row, accepted paths that are not kept."""
    model, backend = target_of_trees
    monkeypatch.setattr(compiled, "BACKEND", backend)
    candidates = DraftModelCandidates(perturbed_copy(model), k=3, tree=6)
    statistics = same_tokens(model, prompts(3), candidates, **SAMPLING[mode])
    assert statistics.accepted > 0
    assert 1 <= backend.graphs <= 3, "in all modes together"


@pytest.mark.parametrize(("architecture", "layers"), [("mistral", 1), ("gemma2", 2)])
def test_compiled_target_with_sliding_windows_same_tokens(architecture: str, layers: int) -> None:
    """Would catch: a cache that drops slots while a compiled pass has fixed ones, and masks of several kinds.

    All layers of Mistral have a window, every second one of Gemma 2.
    """
    same_tokens(small(architecture, layers), prompts(1, length=16), NgramCandidates(k=3), max_new_tokens=16)


def test_compiled_target_returns_hidden_states() -> None:
    """Would catch: heads that draft from the states of padding tokens or of another layer, here the embedding."""
    model = small()
    candidates = MedusaCandidates(fitted_heads(model, prompts(2)), [[0], [1], [0, 0]], policy=FixedDepth())
    eager = same_tokens(model, prompts(2), candidates, compile=False)
    assert same_tokens(model, prompts(2), candidates).accepted == eager.accepted > 0


def test_compiled_target_returns_cache_for_next_turn(shared: Any) -> None:
    """Would catch: slots of padding in the cache that a caller receives."""
    (model, _), inputs = shared, prompts(1)
    settings = {"candidate_generator": NgramCandidates(k=3), "compile": True, "return_dict_in_generate": True}
    first = model.generate(**inputs, max_new_tokens=8, **settings)
    longer = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
    second = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=8, **settings)
    assert torch.equal(second.sequences, model.generate(longer, max_new_tokens=8))


def test_compiled_target_with_lasting_buffers_compiled_once(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch, without a GPU: buffers of another call, and graphs that are captured anew for every length."""
    monkeypatch.setattr(compiled, "GRAPH_DEVICES", ("cpu",))
    model = small()
    same_tokens(model, prompts(2), NgramCandidates(k=3))
    graphs = backend.graphs
    same_tokens(model, prompts(2, length=20), NgramCandidates(k=3), max_new_tokens=20)
    assert backend.graphs == graphs


def test_compiled_target_leaves_model_untouched(shared: Any) -> None:
    """Would catch: a compiled forward or hooks that later plain calls run through."""
    model, _ = shared
    same_tokens(model, prompts(1), NgramCandidates(k=3))
    untouched = dict(small().named_modules())
    for name, module in model.named_modules():
        assert vars(module).keys() == vars(untouched[name]).keys()
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert module._compiled_call_impl is None


def test_compiled_pass_with_other_logits_refused(backend: Backend) -> None:
    """Would catch: a miscompiled function that is used all the same."""
    backend.offset = 0.5
    with pytest.raises(ValueError, match=r"compiled pass of LlamaForCausalLM differs .* leave compile=True out"):
        small().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3), compile=True)


def test_compilation_error_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an error of the compiler that does not say which setting caused it."""

    def failing(graph: Any, inputs: Any, **options: Any) -> Any:
        raise RuntimeError("no registers left")

    monkeypatch.setattr(compiled, "BACKEND", failing)
    with pytest.raises(ValueError, match=r"cannot be compiled \(.*no registers left.*leave compile=True out"):
        small().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3), compile=True)


def already_compiled() -> Any:
    model = small()
    model.compile(backend="eager")
    return model


def offloaded() -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(small(), execution_device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (already_compiled, "is compiled already"),
        (offloaded, "weights that are offloaded"),
        (lambda: stateful_model("lfm2"), "convolutions, recurrent states"),
    ],
)
def test_model_that_cannot_be_compiled_refused(make: Any, reason: str) -> None:
    """Would catch: an error from inside the compiler, or a call that silently runs eagerly."""
    with pytest.raises(ValueError, match=reason):
        make().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3), compile=True)


def test_compiled_layer_skip_refused() -> None:
    """Would catch: a part of the layers that is compiled as if it were the model."""
    with pytest.raises(ValueError, match="part of the target's layers"):
        small(layers=2).generate(
            **prompts(1), max_new_tokens=4, candidate_generator=LayerSkipCandidates(1, k=2), compile=True
        )


def test_missing_compiler_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a page of compiler errors where one sentence would do."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
        small().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3), compile=True)


def test_compiled_draft_of_compiled_target_same_tokens(backend: Backend) -> None:
    """Would catch: a draft that runs eagerly because the target, which the user compiled, does."""
    model = already_compiled()
    candidates = DraftModelCandidates(perturbed_copy(small()), k=1, compile=True)
    ids = model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
    assert torch.equal(ids, small().generate(**prompts(1), max_new_tokens=4))
    assert backend.graphs >= 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return graphs_on_cpu(monkeypatch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_captured_target_and_draft_same_tokens(captures: list[Any], batch: int, sampling: str) -> None:
    """Would catch: inputs, slots or masks of another step in a replayed pass."""
    model = small(layers=2)
    draft = DraftModelCandidates(perturbed_copy(model, 0.02), k=4, tree=8, compile="graphs")
    for length in (9, 14):
        same_tokens(model, prompts(batch, length=length), draft, compile="graphs", **SAMPLING[sampling])
        graphs = len(captures)
    assert len(captures) == graphs > 2


def test_captured_target_is_captured_anew_after_a_change(captures: list[Any]) -> None:
    """Would catch: the graph of another adapter, or of weights that have been freed."""
    model = small()
    same_tokens(model, prompts(1), NgramCandidates(k=3), compile="graphs")
    before = len(captures)
    same_tokens(model, prompts(1), NgramCandidates(k=3), compile="graphs")
    assert len(captures) == before
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    same_tokens(model, prompts(1), NgramCandidates(k=3), compile="graphs")
    assert len(captures) > before
    before = len(captures)
    model.model.layers[0].self_attn.scaling *= 2
    same_tokens(model, prompts(1), NgramCandidates(k=3), compile="graphs")
    assert len(captures) > before


def test_captured_passes_without_a_gpu_refused() -> None:
    with pytest.raises(ValueError, match=r'is on \'cpu\', and compile="graphs" captures CUDA graphs; use compile=True'):
        small().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(), compile="graphs")


@pytest.mark.parametrize("value", ["graph", 1, None])
def test_unknown_value_of_compile_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r'compile must be True, False or "graphs"'):
        small().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(), compile=value)


def test_failed_capture_refused_with_its_reason(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(run: Any, memory: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "capture", failing)
    with pytest.raises(ValueError, match=r'cannot be captured .*not permitted.*leave compile="graphs" out'):
        small().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(), compile="graphs")


def test_compiled_call_that_forbids_packed_weights_refused() -> None:
    arguments = {"candidate_generator": NgramCandidates(), "compile": True, "pack_weights": False}
    with pytest.raises(ValueError, match="compile=True packs weights on a CPU; leave it or pack_weights=False out"):
        small().generate(**prompts(1), max_new_tokens=4, **arguments)


def test_memory_of_a_failed_capture_is_not_used_again(captures: list[Any]) -> None:
    memory = captured.GraphMemory(None)
    memory.is_broken = True
    passes = compiled.CompiledPasses(None, captures_graphs=True)
    passes._memory = memory
    passes._function(small(), (), set())
    assert passes._memory is not memory and not passes._memory.is_broken
