"""`prepacked`: the results of ordinary layers, in the block only, and a model that is exactly as before afterwards."""

import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.pytorch_utils import Conv1D

from hf_specgen import NgramCandidates, prepacked
from tests.helpers import assert_same_tokens, fresh_model, prompts
from tests.helpers.interrupts import interrupted_at_each_line

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """On a machine where prepacked weights are faster: how many tokens each product with them has, in a module."""
    tokens, modules = list[int](), threading.local()
    product = with_times(monkeypatch, 0.9)

    def counting(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if getattr(modules, "running", 0):
            tokens.append(x.numel() // x.shape[-1])
        return product(x, *arguments)

    def count(change: int) -> Callable[..., None]:
        return lambda *_: setattr(modules, "running", getattr(modules, "running", 0) + change)

    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", counting)
    hooks = [register_module_forward_pre_hook(count(1)), register_module_forward_hook(count(-1), always_call=True)]
    yield tokens
    for hook in hooks:
        hook.remove()


def with_times(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Any:
    """Make a product with prepacked weights take `seconds` on the clock, and a pass of ordinary layers one second."""
    product, now = torch.ops.mkldnn._linear_pointwise.default, [0.0]

    def timed(*arguments: Any) -> torch.Tensor:
        now[0] += seconds - 1
        return product(*arguments)

    def read() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", timed)
    monkeypatch.setattr(time, "perf_counter", read)
    threads = next(numbers)  # what was decided before is not used again
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    return timed


numbers = itertools.count(1000)


def attributes(model: nn.Module) -> list[tuple[str, ...]]:
    return [tuple(vars(module)) for module in model.modules()]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.Linear(24, 40), nn.Linear(24, 40, bias=False), Conv1D(40, 24)], ids=str)
def test_prepacked_layer_same_results(layer: nn.Module, dtype: torch.dtype, products: list[int]) -> None:
    """Would catch: a transposed matrix or a lost bias."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies bfloat16 with AVX-512 only")
    model = nn.Sequential(copy.deepcopy(layer)).to(dtype)
    x = torch.randn(2, 3, 24, dtype=dtype)
    expected = model(x)
    with prepacked(model):
        torch.testing.assert_close(model(x), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    assert products == [6]
    assert torch.equal(model(x), expected) and products == [6]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_prepacked_speculative_call_same_tokens_as_plain_in_the_block(architecture: str, products: list[int]) -> None:
    """Would catch: a speculative call that uses the prepacked weights and a plain one that does not."""
    model = fresh_model(architecture)
    with prepacked(model):
        assert_same_tokens(model, prompts(2), NgramCandidates(k=4), max_new_tokens=16)
    assert products


def test_prepacked_model_is_restored_after_an_exception(products: list[int]) -> None:
    """Would catch: a model that keeps the copies of its weights after a failed call."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = attributes(model)
    with pytest.raises(KeyError), prepacked(model):
        assert attributes(model) != before
        raise KeyError
    assert attributes(model) == before


def test_prepacked_model_is_restored_after_ctrl_c_at_any_line(products: list[int]) -> None:
    """Would catch: layers that were replaced before there was anything to restore them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = attributes(model)

    def work() -> None:
        with prepacked(model):
            model(torch.ones(1, 8))

    for line in interrupted_at_each_line(prepacked, work):
        assert attributes(model) == before, line


@torch.no_grad()
def test_nested_blocks_and_threads_last_until_the_outermost_ends(products: list[int]) -> None:
    """Would catch: an inner block that restores the layers of the outer one."""
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)

    def nested(_: int) -> None:
        with prepacked(model), torch.no_grad():
            model(x)

    with prepacked(model):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(nested, range(4)))
        model(x)
    assert len(products) == 5 and "forward" not in vars(model[0])


@torch.no_grad()
def test_shared_weights_are_prepacked_and_embeddings_are_untouched(products: list[int]) -> None:
    """Would catch: an output matrix left out because it is the embedding's, or replaced for the embedding too."""
    embedding, first, second = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
    first.weight = second.weight = embedding.weight
    model = nn.ModuleList([embedding, first, second, first])
    with prepacked(model):
        for layer in (first, second):
            torch.testing.assert_close(layer(embedding.weight[3:4]), embedding.weight[3:4] @ first.weight.T)
    assert products


def test_hooks_gradients_autocast_copies_and_replaced_weights(products: list[int]) -> None:
    """Would catch: prepacked weights where their result has no gradient, another dtype, or other weights."""
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)
    with prepacked(model):
        model(x).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        with torch.no_grad():
            copied = copy.deepcopy(model)
            copied[0].weight.zero_()
            assert torch.equal(copied(x)[0], copied[0].bias)
            assert not products
            seen: list[Any] = []
            model[0].register_forward_hook(lambda *given: seen.append(given))
            model(x)
            assert len(products) == len(seen) == 1
            model[0].weight = nn.Parameter(torch.zeros(8, 8))
            assert torch.equal(model(x)[0], model[0].bias)
    assert model[0].weight.grad is None and "forward" not in vars(model[0])


def test_prepacking_that_is_slower_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: prepacked weights that are used although they were timed to be slower."""
    with_times(monkeypatch, 1.1)
    model = nn.Sequential(nn.Linear(8, 8))
    before = attributes(model)
    with prepacked(model):
        assert attributes(model) == before


def test_layers_that_cannot_be_prepacked_are_left_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Would catch: weights of a dtype that oneDNN does not multiply, a silent block, or a warning for each block."""
    model = nn.Sequential(nn.Linear(8, 8)).double()
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "hf_specgen"):
        for _ in range(2):
            with prepacked(model):
                assert "forward" not in vars(model[0])
    assert len([one for one in caplog.records if "prepacked() does nothing" in one.message]) == 1
