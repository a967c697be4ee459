"""Packed weights: the tokens of plain `generate`, in the calls that ask for them only."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import hf_specgen
from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.targets import packed_weights as packing
from hf_specgen.targets import packing as choice
from hf_specgen.targets.checksum import checksum
from tests.helpers import SAMPLING, Oracle, assert_same_tokens, fresh_model, prompts, shared_draft, tiny_model
from tests.helpers.medusa import random_heads

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies bfloat16 with AVX-512 only"
)


def strategy(name: str) -> Candidates:
    model = tiny_model("llama")
    return {
        "ngram": lambda: NgramCandidates(k=4, tree=12),
        "draft": lambda: DraftModelCandidates(shared_draft(model), k=4, tree=8),
        "skip": lambda: LayerSkipCandidates(1, k=3),
        "medusa": lambda: MedusaCandidates(random_heads(model)),
    }[name]()


@pytest.fixture
def multiplications(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Receives the number of rows of every multiplication with packed weights."""
    rows: list[int] = []
    original = packing._PackedLayer.linear

    def counting(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(len(x))
        return original(self, x, weight, bias)

    monkeypatch.setattr(packing._PackedLayer, "linear", counting)
    monkeypatch.setattr(packing, "SMALL_MATRIX", 0)  # one token is multiplied with packed weights too
    packing._models.clear()
    yield rows
    packing._models.clear()


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Receives every model whose layers are switched to packed weights."""
    models: list[nn.Module] = []
    original = packing._PackedModel.switch_on

    def recording(self: Any) -> None:
        models.append(self.model())
        original(self)

    monkeypatch.setattr(packing._PackedModel, "switch_on", recording)
    return models


def own_forwards(model: nn.Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["ngram", "draft", "skip", "medusa"])
def test_packed_weights_same_tokens(name: str, batch: int, sampling: str, multiplications: list[int]) -> None:
    model, candidates = tiny_model("llama"), strategy(name)
    torch.manual_seed(3)
    expected = model.generate(**prompts(batch), max_new_tokens=20, **SAMPLING[sampling])
    torch.manual_seed(3)
    arguments = {"max_new_tokens": 20, "candidate_generator": candidates, "pack_weights": True}
    ids = model.generate(**prompts(batch), **arguments, **SAMPLING[sampling])
    assert torch.equal(ids, expected)
    assert multiplications and own_forwards(model) == 0


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "gemma2", "qwen3_moe"])
def test_packed_weights_of_other_architectures_same_tokens(architecture: str) -> None:
    """Biases, output matrices that are shared with the embeddings, experts, layers that are no linear layers."""
    model = fresh_model(architecture)
    expected = model.generate(**prompts(2), max_new_tokens=14)
    oracle = Oracle(expected[:, 12:], 0.6, branching=True)
    ids = model.generate(**prompts(2), max_new_tokens=14, candidate_generator=oracle, pack_weights=True)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("tokens", [1, 2, 9, 70])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_equals_linear(tokens: int, bias: bool) -> None:
    layer = nn.Linear(48, 80, bias=bias)
    with torch.no_grad():
        packed, x = packing._PackedLayer(layer), torch.randn(2, tokens, 48)
        torch.testing.assert_close(packed.linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize("change", ["in place", "data", "one value", "another parameter"])
def test_packed_linear_after_a_change_of_weights_uses_the_new_ones(change: str) -> None:
    """Would catch: a call with the weights from before training, or from before an adapter was merged."""
    layer = nn.Linear(16, 24)
    with torch.no_grad():
        packed, x = packing._PackedLayer(layer), torch.randn(3, 16)
        if change == "in place":
            layer.weight.mul_(2)
        elif change == "data":  # as PEFT merges adapters: no version counter shows it
            layer.weight.data += torch.randn(24, 16)
        elif change == "one value":
            layer.weight.data[3, 7] += 1
        else:
            layer.weight = nn.Parameter(torch.randn(24, 16))
        packed.refresh()
        torch.testing.assert_close(packed.linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize("columns", [slice(1, 2), slice(1, None, 2), slice(None)], ids=["one", "every other", "all"])
@pytest.mark.parametrize("factor", [-1, 2])
@pytest.mark.parametrize("shape", [(32, 128), (64, 63 * 2 * 4), (256, 1024)], ids=str)
def test_checksum_of_weights_whose_same_bit_changes_is_another(
    shape: tuple[int, int], factor: int, columns: slice
) -> None:
    """Would catch: sign bits and exponents of many weights that add up to nothing modulo 2**64."""
    weight = torch.rand(shape) + 0.5
    before = checksum(weight)
    weight[:, columns] *= factor
    assert checksum(weight) != before


@pytest.mark.parametrize("setting", ["pack_weights", "compile"])
def test_weights_changed_between_calls_are_packed_again(setting: str) -> None:
    """Would catch: a second call with the weights of the first one."""
    model = fresh_model("llama", num_hidden_layers=1)
    arguments = {"max_new_tokens": 8, "candidate_generator": NgramCandidates(k=2), setting: True}
    for _ in range(2):
        expected = model.generate(**prompts(1), max_new_tokens=8)
        assert torch.equal(model.generate(**prompts(1), **arguments), expected)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data += 0.5 * torch.randn(layer.mlp.down_proj.weight.shape)


def test_model_that_was_cast_after_a_packed_call_is_refused() -> None:
    model = fresh_model("llama")
    arguments = {"max_new_tokens": 4, "candidate_generator": NgramCandidates(), "pack_weights": True}
    model.generate(**prompts(1), **arguments)
    with pytest.raises(ValueError, match="float16 on cpu"):
        model.half().generate(**prompts(1), **arguments)
    model.float().generate(**prompts(1), **arguments)


def test_packed_weights_after_an_exception_leave_the_model() -> None:
    class Failing(NgramCandidates):
        def start(self, call: Any) -> Any:
            raise RuntimeError("no draft")

    model = fresh_model("llama")
    with pytest.raises(RuntimeError, match="no draft"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=Failing(), pack_weights=True)
    assert own_forwards(model) == 0 and packing._scope.models is None


def test_packed_weights_in_one_thread_leave_other_threads_to_ordinary_layers(multiplications: list[int]) -> None:
    """Would catch: plain calls of another thread that are rounded in another way."""
    model, inside, done = tiny_model("llama"), threading.Event(), threading.Event()

    def other() -> None:
        with packing.packed_weights():
            packing.pack(model)
            inside.set()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    multiplications.clear()  # those of the check
    try:
        assert own_forwards(model) > 0
        with torch.no_grad():
            model(**prompts(1))
    finally:
        done.set()
        thread.join()
    assert multiplications == [] and own_forwards(model) == 0


def test_packed_weights_of_two_calls_are_taken_away_after_the_last_one() -> None:
    model = tiny_model("llama")
    with packing.packed_weights():
        packing.pack(model)
        with packing.packed_weights():
            packing.pack(model)
        assert own_forwards(model) > 0
    assert own_forwards(model) == 0


def test_packed_weights_of_float16_raise() -> None:
    model = fresh_model("llama").half()
    with pytest.raises(ValueError, match=r"on a CPU, in float32.*float16 on cpu.*leave it out"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(), pack_weights=True)


@needs_bfloat16
@pytest.mark.parametrize("change", [None, "one value", "through data"])
@pytest.mark.parametrize("width", [48, 49, 51])
def test_packed_bfloat16_linear_equals_linear(width: int, change: str | None) -> None:
    """Widths of which a row, or the whole matrix, is no multiple of eight bytes."""
    layer = nn.Linear(width, 33).bfloat16()
    packed, x = packing._PackedLayer(layer), torch.randn(2, 5, width).bfloat16()
    if change == "one value":
        layer.weight.data[-1, -1] += 1
    elif change == "through data":
        layer.weight.data += torch.randn(33, width).bfloat16()
    with torch.no_grad():
        packed.refresh()
        torch.testing.assert_close(packed.linear(x, layer.weight, layer.bias), layer(x), rtol=2e-2, atol=2e-2)


@needs_bfloat16
def test_packed_weights_of_bfloat16_run_target_and_drafter(multiplications: list[int]) -> None:
    model = fresh_model("llama").bfloat16()
    draft = DraftModelCandidates(fresh_model("llama", num_hidden_layers=1).bfloat16(), k=3)
    model.generate(**prompts(1), max_new_tokens=6, candidate_generator=draft, pack_weights=True)
    assert multiplications and own_forwards(model) == 0


@pytest.mark.parametrize("wanted", [None, True, False])
def test_target_and_drafter_that_are_small_are_packed_by_default(
    wanted: bool | None, switched: list[nn.Module]
) -> None:
    model, draft = fresh_model("llama"), fresh_model("llama", num_hidden_layers=1)
    candidates = DraftModelCandidates(draft, k=3)
    expected = model.generate(**prompts(2), max_new_tokens=8)
    ids = model.generate(**prompts(2), max_new_tokens=8, candidate_generator=candidates, pack_weights=wanted)
    assert torch.equal(ids, expected)
    assert switched == ([] if wanted is False else [model, draft])


def test_large_target_is_not_packed_by_default(switched: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a second copy of the weights that nobody asked for and that does not fit into memory."""
    monkeypatch.setattr(choice, "MAX_BYTES", 1000)
    model, draft = fresh_model("llama"), fresh_model("llama", num_hidden_layers=1)
    assert_same_tokens(model, prompts(1), DraftModelCandidates(draft, k=3), max_new_tokens=8)
    assert switched == [draft]


def test_large_drafter_is_not_packed_by_default(switched: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SMALL_DRAFTER", 1000)
    model, draft = fresh_model("llama"), fresh_model("llama", num_hidden_layers=1)
    assert_same_tokens(model, prompts(1), DraftModelCandidates(draft, k=3), max_new_tokens=8)
    assert switched == [model]


@pytest.mark.parametrize("is_large", [True, False])
def test_drafter_that_shares_layers_with_its_target_is_packed_only_with_it(
    is_large: bool, switched: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a target of which some layers are packed and round differently from one call to the next."""
    if is_large:
        monkeypatch.setattr(choice, "MAX_BYTES", 1000)
    model, draft = fresh_model("llama"), fresh_model("llama", num_hidden_layers=1)
    draft.lm_head = model.lm_head
    before = len(packing.packed_layers)
    assert_same_tokens(model, prompts(1), DraftModelCandidates(draft, k=3), max_new_tokens=8)
    assert switched == ([] if is_large else [model, draft])
    linear_layers = {one for parent in (model, draft) for one in parent.modules() if isinstance(one, nn.Linear)}
    assert len(packing.packed_layers) - before == (0 if is_large else len(linear_layers))


def test_target_whose_weights_change_is_no_longer_packed_by_default(switched: list[nn.Module]) -> None:
    """Would catch: packing all weights in every call of a training loop."""
    model = fresh_model("llama")
    layer = model.model.layers[0].mlp.down_proj
    for _ in range(3):
        assert_same_tokens(model, prompts(1), NgramCandidates(k=2), max_new_tokens=8)
        layer.weight.data += 0.5 * torch.randn(layer.weight.shape)
    assert switched == [model] and own_forwards(model) == 0
    model.generate(**prompts(1), max_new_tokens=8, candidate_generator=NgramCandidates(k=2), pack_weights=True)
    assert switched == [model, model]


def test_target_that_cannot_be_packed_runs_with_ordinary_weights(
    switched: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(packing._PackedLayer, "refresh", without_memory)
    assert_same_tokens(fresh_model("llama"), prompts(1), NgramCandidates(k=2), max_new_tokens=8)
    assert switched == []


def test_call_without_packed_weights_beside_one_with_them_uses_ordinary_layers(multiplications: list[int]) -> None:
    """Would catch: a call whose target is packed because another thread's call packs the same model."""
    model = fresh_model("llama")
    with packing.packed_weights(), ThreadPoolExecutor(1) as other:
        packing.pack(model)
        multiplications.clear()  # those of the check
        arguments = {"max_new_tokens": 6, "candidate_generator": NgramCandidates(k=3), "pack_weights": False}
        other.submit(lambda: model.generate(**prompts(1), **arguments)).result()
        assert multiplications == []


def test_packed_layer_under_autocast_is_cast(multiplications: list[int]) -> None:
    layers = nn.Sequential(nn.Linear(8, 6))
    with packing.packed_weights(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        packing.pack(layers)
        assert layers(torch.randn(3, 8)).dtype == torch.bfloat16


def test_packed_layer_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing._PackedLayer, "linear", lambda self, x, weight, bias: linear(x, weight, bias) + 1)
    with pytest.raises(ValueError, match="compute something else"), torch.no_grad():
        packing._PackedLayer(nn.Linear(8, 8))


def test_attached_model_uses_packed_weights(multiplications: list[int]) -> None:
    model = fresh_model("llama")
    expected = model.generate(**prompts(1), max_new_tokens=8)
    with hf_specgen.attached(model, NgramCandidates(), pack_weights=True):
        assert torch.equal(model.generate(**prompts(1), max_new_tokens=8), expected)
    assert multiplications


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_layer_copied_while_a_call_runs_is_ordinary(duplicate: Any) -> None:
    layers = nn.Sequential(nn.Linear(8, 6))
    with packing.packed_weights():
        packing.pack(layers)
        copied = duplicate(layers)
        assert not isinstance(copied[0].forward, packing._PackedLayer)
    x = torch.randn(3, 8)
    assert torch.equal(copied(x), layers(x))


def test_packed_weights_that_are_a_view_at_an_odd_place() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(17)[1:].view(4, 4))
    with torch.no_grad():
        x = torch.randn(3, 4)
        torch.testing.assert_close(packing._PackedLayer(layer).linear(x, layer.weight, layer.bias), layer(x))


def test_packed_weights_are_freed_with_their_model() -> None:
    model = fresh_model("llama")
    before = len(packing.packed_layers)
    packing.packed_model(model)
    assert len(packing.packed_layers) > before
    del model
    assert len(packing.packed_layers) == before


def test_packed_draft_model_same_draft_tokens_accepted() -> None:
    model = tiny_model("llama")
    draft = DraftModelCandidates(shared_draft(model), k=4)
    ordinary = assert_same_tokens(model, prompts(2), draft, max_new_tokens=20)
    output = model.generate(
        **prompts(2), max_new_tokens=20, candidate_generator=draft, pack_weights=True, return_dict_in_generate=True
    )
    assert [[step.accepted for step in row] for row in output.speculation.rows] == [
        [step.accepted for step in row] for row in ordinary.rows
    ]


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_whose_rows_change_places_are_packed_again(through_data: bool) -> None:
    """Would catch: a checksum without order."""
    model = fresh_model("llama")
    arguments = {**prompts(1), "max_new_tokens": 8}
    model.generate(**arguments, candidate_generator=NgramCandidates(), pack_weights=True)
    with torch.no_grad():
        weight = model.lm_head.weight.data if through_data else model.lm_head.weight
        weight.copy_(weight.flip(0))
    expected = model.generate(**arguments)
    ours = model.generate(**arguments, candidate_generator=NgramCandidates(), pack_weights=True)
    assert torch.equal(ours, expected)


def test_operator_with_a_part_of_a_packed_matrix_computes_that_part() -> None:
    layer = nn.Linear(8, 6, bias=False)
    with torch.no_grad():
        packing.packed_model(nn.Sequential(layer))
        x = torch.randn(3, 8)
        part = torch.ops.hf_specgen.packed_linear(x, layer.weight[:2], None)
    torch.testing.assert_close(part, linear(x, layer.weight[:2]))


def test_model_that_two_threads_pack_first_is_packed_once() -> None:
    """Would catch: layers of the second thread that replace those of the first, and are freed."""
    model = fresh_model("llama")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(torch.no_grad()(lambda _: packing.packed_model(model)), range(2))
    assert first is second
    assert all(packing.packed_layers[layer.module.weight.data_ptr()] is layer for layer in first._layers.values())


def test_copy_made_while_a_call_runs_can_be_packed(multiplications: list[int]) -> None:
    layers = nn.Sequential(nn.Linear(8, 6))
    with packing.packed_weights():
        packing.pack(layers)
        copied = copy.deepcopy(layers)
    multiplications.clear()
    with packing.packed_weights(), torch.no_grad():
        packing.pack(copied)
        multiplications.clear()
        copied(torch.randn(3, 8))
    assert multiplications
