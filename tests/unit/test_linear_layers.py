"""Products of few tokens, and `prepacked`: the results of ordinary layers, and a model that is as before afterwards."""

import copy
import itertools
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_specgen import FixedDepth, NgramCandidates, linear_layers, prepacked
from hf_specgen.decoding import DecodingTimer
from hf_specgen.depth.step_times import THREAD
from hf_specgen.linear_layers import MAX_TOKENS, PASSES_PER_TIME, FastLinearLayers, LinearLayer
from hf_specgen.product_choice import CALLS_PER_TIME, COMPILING, SAMPLES, comparison_seconds
from tests.helpers import assert_same_tokens, fresh_model, prompts
from tests.helpers.interrupts import interrupted_at_each_line

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


class Clock:
    """A clock on which each reading takes a second, and products change how long their call takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float):
        """`seconds` by product: `mm` and `onednn`; ordinary ones take a second."""
        self.seconds = {"mm": 1.5, "onednn": 1.5, **seconds}
        self.calls = Counter[str]()
        self._now = 0.0
        monkeypatch.setattr(torch, "mm", self._timed("mm", torch.mm))
        monkeypatch.setattr(torch, "bmm", self._timed("mm", torch.bmm))
        onednn = torch.ops.mkldnn._linear_pointwise.default
        monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", self._timed("onednn", onednn))
        monkeypatch.setattr(time, "perf_counter", self._read)
        threads = next(numbers)  # what was chosen before is not used again
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def _timed(self, name: str, product: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._now += self.seconds[name] - 1
            self.calls[name] += 1
            return product(*arguments)

        return timed

    def _read(self) -> float:
        self._now += 1
        return self._now


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """On a machine where prepacked weights are faster: how many tokens each product with them has, in a module."""
    tokens, modules = list[int](), threading.local()
    Clock(monkeypatch, onednn=0.875)
    product = torch.ops.mkldnn._linear_pointwise.default

    def counting(x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if getattr(modules, "running", 0) and weight.is_mkldnn:
            tokens.append(x.numel() // x.shape[-1])
        return product(x, weight, *arguments)

    def count(change: int) -> Callable[..., None]:
        return lambda *_: setattr(modules, "running", getattr(modules, "running", 0) + change)

    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", counting)
    hooks = [register_module_forward_pre_hook(count(1)), register_module_forward_hook(count(-1), always_call=True)]
    yield tokens
    for hook in hooks:
        hook.remove()


def settle(model: nn.Module, x: torch.Tensor) -> None:
    """Call a model until the products of its layers have been chosen for this number of tokens."""
    for _ in range(64):
        model(x)


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
        settle(model, x)
        products.clear()
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
        settle(model, x)
        products.clear()
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
        settle(first, embedding.weight[3:4])
        for layer in (first, second):
            torch.testing.assert_close(layer(embedding.weight[3:4]), embedding.weight[3:4] @ first.weight.T)
    assert products


def test_hooks_gradients_autocast_copies_and_replaced_weights(products: list[int]) -> None:
    """Would catch: prepacked weights where their result has no gradient, another dtype, or other weights."""
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)
    with prepacked(model):
        with torch.no_grad():
            settle(model, x)
        products.clear()
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
    Clock(monkeypatch, onednn=1.1)
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


LAYERS = [nn.Linear(24, 40), nn.Linear(24, 7), nn.Linear(24, 40, bias=False), Conv1D(40, 24)]


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (2, 4), (1, 64)])
@pytest.mark.parametrize("product", [LinearLayer.transposed, LinearLayer.onednn, LinearLayer.onednn_transposed])
def test_products_same_results_as_the_layer(layer: nn.Module, shape: tuple[int, int], product: Any) -> None:
    """Would catch: a transposed result, rows or blocks in another order, a lost bias."""
    x = torch.randn(*shape, 24)
    output = product(LinearLayer(layer), x)
    torch.testing.assert_close(output, layer(x), atol=1e-5, rtol=1e-5)
    assert output.is_contiguous()
    if isinstance(layer, Conv1D):  # which takes no other strides
        return
    strided = torch.randn(24, shape[1], shape[0]).permute(2, 1, 0)
    torch.testing.assert_close(product(LinearLayer(layer), strided), layer(strided), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("seconds", [{"mm": 0.5}, {"onednn": 0.5}, {}], ids=str)
def test_fastest_product_is_used_after_a_few_times_of_each(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a slower product that stays, times of one number of tokens for others, endless timing."""
    clock = Clock(monkeypatch, **seconds)
    model = nn.Sequential(nn.Linear(8, 8))
    with FastLinearLayers(model).in_use():
        settle(model, torch.ones(1, 4, 8))
        settle(model, torch.ones(1, 9, 8))
        clock.calls.clear()
        for tokens in (4, 12) * 10:
            model(torch.ones(1, tokens, 8))
    assert clock.calls == dict.fromkeys(seconds, 20)
    model(torch.ones(1, 4, 8))
    assert clock.calls == dict.fromkeys(seconds, 20), "outside of the context"
    with FastLinearLayers(model).in_use():
        model(torch.ones(1, MAX_TOKENS + 1, 8))
        assert clock.calls == dict.fromkeys(seconds, 20), "of many tokens"
    with FastLinearLayers(model).in_use(5):
        settle(model, torch.ones(1, 5, 8))
    assert min(clock.calls["mm"], clock.calls["onednn"]) >= 2, "each is checked and timed for another number of tokens"


@torch.no_grad()
def test_layers_whose_ordinary_product_is_the_fastest_are_left_but_for_a_few_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Would catch: a detour for each layer of each pass on machines where nothing is gained, or a choice for ever."""
    clock = Clock(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = FastLinearLayers(model)

    def number_of_replaced(tokens: int | None) -> int:
        with layers.in_use(tokens):
            return sum("forward" in vars(module) for module in model)

    assert number_of_replaced(1) == 2, "nothing is chosen yet"
    with layers.in_use(1):
        settle(model, torch.ones(1, 1, 8))
    for tokens in (1, None):
        replaced = [number_of_replaced(tokens) for _ in range(2 * PASSES_PER_TIME)]
        assert replaced.count(2) == 2 and replaced.count(0) == 2 * PASSES_PER_TIME - 2
    assert 2 in [number_of_replaced(7) for _ in range(2)], "of another number of tokens"
    clock.seconds["mm"] = 0.5
    for _ in range(4 * CALLS_PER_TIME * PASSES_PER_TIME):
        with layers.in_use(1):
            model(torch.ones(1, 1, 8))
    assert number_of_replaced(1) == number_of_replaced(1) == 2, "as another product is the fastest now"


@torch.no_grad()
def test_layers_are_left_until_products_that_compile_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a detour until that comparison, or a comparison that waits for passes with a detour."""
    clock = Clock(monkeypatch, onednn=0.5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = FastLinearLayers(model)
    replaced = []
    for _ in range(4 * PASSES_PER_TIME):
        with layers.in_use(1):
            replaced.append("forward" in vars(model[0]))
            model(torch.ones(1, 1, 8))
    passes = int(2 / COMPILING) // len(model)  # until two products take that part of the time of the layers
    assert replaced.count(False) >= passes - 2 * SAMPLES
    assert all(replaced[passes + PASSES_PER_TIME :]) and clock.calls["onednn"] > len(replaced), "it is the fastest"


@torch.no_grad()
def test_products_without_a_kernel_are_compared_once_for_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a comparison for each number of tokens, and none for a single one, which has another product."""
    clock = Clock(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8))
    products = []
    with FastLinearLayers(model).in_use():
        for tokens in (4, 5, 6, 1):
            clock.calls.clear()
            model(torch.ones(1, tokens, 8))
            products.append(clock.calls["mm"])
    assert products == [1, 0, 0, 1]


@torch.no_grad()
def test_time_of_a_comparison_is_no_time_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: T(q) that is too long for sizes whose products were compared in their first pass."""
    product, threads = torch.mm, next(numbers)

    def slow(*arguments: Any) -> torch.Tensor:
        began = time.thread_time()
        while time.thread_time() < began + 0.1:
            pass
        return product(*arguments)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # a shape without a choice
    monkeypatch.setattr(torch, "mm", slow)
    model, timer = nn.Sequential(nn.Linear(8, 8)), DecodingTimer()
    with FastLinearLayers(model).in_use(), timer.part("forward"):
        model(torch.ones(1, 2, 8))
    assert timer.step["forward"] >= 0.1 > 2 * timer.step[THREAD]


@torch.no_grad()
def test_products_compared_by_two_threads_at_once_are_compared_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a thread that finds no products left to compare, as another one has just compared them."""
    Clock(monkeypatch)
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(2, 8)
    expected = model(x)
    other = threading.Thread(target=lambda: torch.no_grad()(settle)(model, x))
    thread_time = time.thread_time

    def interrupted() -> float:
        if other.ident is None:
            other.start()
            other.join()
        return thread_time()

    monkeypatch.setattr(time, "thread_time", interrupted)  # read as a comparison begins
    with FastLinearLayers(model).in_use():
        settle(model, x)
        torch.testing.assert_close(model(x), expected)
    assert other.ident is not None


@torch.no_grad()
def test_model_that_was_used_and_is_compiled_then_is_compiled_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a compilation for each set of layers that have another product than the ordinary one."""
    Clock(monkeypatch)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8 + i, 9 + i) for i in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    for tokens in range(1, 5):  # for each number of tokens other layers are left as they are
        with FastLinearLayers(model).in_use(tokens):
            for layer in itertools.islice(model.layers, tokens):
                settle(layer, torch.ones(tokens, int(layer.in_features)))
    compiled = list[Any]()

    def compiler(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model.compile(backend=compiler, dynamic=True)
    model(torch.ones(2, 8))
    assert len(compiled) == 1
    for tokens in (2, 3, 4) * PASSES_PER_TIME:
        with FastLinearLayers(model).in_use(tokens):
            model(torch.ones(tokens, 8))
    assert len(compiled) == 2


@torch.no_grad()
def test_time_of_finding_a_product_counts_as_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a product that gains less than the detour to it costs."""
    clock = Clock(monkeypatch, mm=0.5)
    is_autocast_enabled = torch.is_autocast_enabled

    def slow(*arguments: Any) -> bool:
        time.perf_counter()
        return is_autocast_enabled(*arguments)

    monkeypatch.setattr(torch, "is_autocast_enabled", slow)
    model = nn.Sequential(nn.Linear(8, 8))
    with FastLinearLayers(model).in_use():
        settle(model, torch.ones(1, 8))
        clock.calls.clear()
        model(torch.ones(1, 8))
    assert not clock.calls


@torch.no_grad()
def test_slow_product_is_timed_once_until_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: first passes that take long, as slow products are timed again and again."""
    clock = Clock(monkeypatch, mm=2.5, onednn=0.5)
    model, before = nn.Sequential(nn.Linear(8, 8)), comparison_seconds()
    with FastLinearLayers(model).in_use():
        settle(model, torch.ones(1, 8))
        after = comparison_seconds()
        settle(model, torch.ones(1, 8))
    assert clock.calls["mm"] == 2, "checked and timed"
    assert clock.calls["onednn"] > 2 * SAMPLES
    assert before < after == comparison_seconds(), "compared once"


@torch.no_grad()
def test_input_of_another_width_raises_as_without_the_products() -> None:
    """Would catch: two tokens of half the width that are multiplied as one token."""
    model = nn.Sequential(nn.Linear(8, 8))
    with FastLinearLayers(model).in_use():
        settle(model, torch.ones(1, 1, 8))
        settle(model, torch.ones(1, 2, 8))
        for shape in ((1, 2, 4), (1, 1, 16)):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(shape))


@torch.no_grad()
def test_product_that_was_slow_at_first_is_chosen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a choice for ever, from the times of a moment when other programs delayed a product."""
    clock = Clock(monkeypatch)
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)
    with FastLinearLayers(model).in_use():
        settle(model, x)
        clock.calls.clear()
        model(x)
        assert not clock.calls
        clock.seconds["mm"] = 0.5
        for _ in range(4 * CALLS_PER_TIME + 4):
            model(x)
        clock.calls.clear()
        model(x)
    assert clock.calls == {"mm": 1}


@torch.no_grad()
@pytest.mark.parametrize("fault", ["raises", "other values"])
def test_product_that_a_machine_lacks_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: wrong results of a library, or a call that ends where the library has no such operator."""
    Clock(monkeypatch)
    calls = Counter[str]()

    def broken(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        calls["broken"] += 1
        if fault == "raises":
            raise NotImplementedError
        return x @ weight.T * 1.01

    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", broken)
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False)), torch.ones(2, 8)
    expected = model(x)
    with FastLinearLayers(model).in_use():
        for _ in range(2 * CALLS_PER_TIME):
            assert torch.allclose(model(x), expected, atol=1e-5)
    assert calls["broken"] == 2, "each of the two products by oneDNN is tried once"


def test_products_are_ordinary_where_others_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a lost gradient, another dtype, old weights, or results of a moment in a repeatable mode."""
    clock = Clock(monkeypatch, mm=0.5)
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)
    others = nn.Sequential(nn.Linear(8, 8)).double()
    with FastLinearLayers(model, others).in_use():
        with torch.no_grad():
            settle(model, x)
            others(x.double())
        clock.calls.clear()
        model(x).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        with torch.no_grad():
            torch.use_deterministic_algorithms(True)
            try:
                model(x)
            finally:
                torch.use_deterministic_algorithms(False)
            model[0].weight = nn.Parameter(torch.zeros(8, 8))
            assert torch.equal(model(x)[0], model[0].bias)
            copied = copy.deepcopy(model)
            copied[0].weight.zero_()
            assert torch.equal(copied(x)[0], copied[0].bias)
    assert not clock.calls


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("seconds", [{"mm": 0.5}, {"onednn": 0.5}], ids=str)
def test_speculative_call_with_other_products_same_tokens(
    architecture: str, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: passes that do not use the products, and a model that is not as before between them."""
    clock = Clock(monkeypatch, **seconds)
    model = fresh_model(architecture)
    before = attributes(model)
    states: list[bool] = []
    strategy = NgramCandidates(k=4, policy=FixedDepth())

    def look(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        states.append(attributes(model) == before)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    assert_same_tokens(model, prompts(2), strategy, max_new_tokens=100, stopping_criteria=[look])
    assert states and all(states) and clock.calls[next(iter(seconds))] > 10


def test_layers_are_restored_after_ctrl_c_at_any_line() -> None:
    """Would catch: layers that were replaced before there was anything to restore them."""
    model = nn.Sequential(nn.Linear(8, 15), nn.Linear(15, 8))  # of shapes without a choice so far
    before = attributes(model)
    layers = FastLinearLayers(model)

    def work() -> None:
        with layers.in_use():
            model(torch.ones(1, 8))

    for line in interrupted_at_each_line(FastLinearLayers.in_use, work):
        assert attributes(model) == before, line


def test_threads_and_prepacked_weights_do_not_remove_layers_of_each_other(products: list[int]) -> None:
    """Would catch: prepacked weights that are left out since another thread is in a pass, or removed when it ends."""
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)
    with FastLinearLayers(model).in_use():
        first = vars(model[0])["forward"]
        with FastLinearLayers(model).in_use():
            assert vars(model[0])["forward"] == first
        assert vars(model[0])["forward"] == first
        block = prepacked(model)
        block.__enter__()
    with torch.no_grad():
        settle(model, x)
    assert products
    with FastLinearLayers(model).in_use():
        assert vars(model[0])["forward"] != first
    block.__exit__(None, None, None)
    assert "forward" not in vars(model[0])


def pruned_bias(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "bias", amount=0.5)


def bias_in_buffer(layer: nn.Linear) -> None:
    layer.bias = None
    del layer.bias
    layer.register_buffer("bias", torch.randn(8))


def strided_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.randn(16)[::2])


def bias_of_one_value(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.randn(1))


@torch.no_grad()
@pytest.mark.parametrize("seconds", [{"mm": 0.5}, {"onednn": 0.5}], ids=str)
@pytest.mark.parametrize("change", [pruned_bias, bias_in_buffer, strided_bias, bias_of_one_value])
@pytest.mark.parametrize("late", [False, True])
def test_layer_with_an_unusual_bias_same_results(
    change: Callable[[nn.Linear], None], seconds: dict[str, float], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a bias left out or read by other strides, as the product was compared in layers without one."""
    Clock(monkeypatch, **seconds)
    for bias in (True, False):
        usual = nn.Sequential(nn.Linear(8, 8, bias=bias))
        with FastLinearLayers(usual).in_use():
            settle(usual, torch.ones(3, 8))
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
    if late:
        layers = FastLinearLayers(model)
    change(model[0])
    expected = model(x)
    with (layers if late else FastLinearLayers(model)).in_use():
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(model[0])


class Doubling(TorchFunctionMode):
    """Doubles the results of linear layers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **kwargs or {})
        return 2 * output if function is functional.linear else output


@torch.no_grad()
@pytest.mark.parametrize("change", ["class", "function", "mode", "argument"])
def test_functions_that_a_user_replaced_are_used(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: products beside the function that another library put in place of that of PyTorch."""
    clock = Clock(monkeypatch, mm=0.5)
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(3, 8)
    layers = FastLinearLayers(model)
    with layers.in_use():
        settle(model, x)
    expected, forward, linear = 2 * model(x), nn.Linear.forward, functional.linear
    clock.calls.clear()
    if change == "class":
        monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: 2 * forward(layer, x))
    if change == "function":
        monkeypatch.setattr(functional, "linear", lambda *given: 2 * linear(*given))
    for replaced in (layers, FastLinearLayers(model)):
        with replaced.in_use():
            if change == "argument":
                assert torch.equal(2 * model[0](input=x), expected)
            elif change == "mode":
                with Doubling():
                    assert torch.equal(model(x), expected)
            else:
                assert torch.equal(model(x), expected)
    assert not clock.calls


def test_compiled_methods_of_a_model_are_compiled_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a method that is compiled anew in each call, and from the eighth on not at all."""
    Clock(monkeypatch)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    compiled: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    block, x = Block(), torch.randn(1, 3, 8)
    run = torch.compile(Block.run, backend=compiler, fullgraph=True)
    with torch.no_grad():
        expected = run(block, x)
        for _ in range(12):
            with FastLinearLayers(block).in_use():
                torch.testing.assert_close(run(block, x), expected)
    assert len(compiled) == 2


@torch.no_grad()
def test_model_that_is_pickled_or_converted_in_a_block(products: list[int]) -> None:
    """Would catch: pickles that need this package, and copies of weights in another dtype than the model by now."""
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8)
    expected = model(x)
    with prepacked(model):
        settle(model, x)
        pickled = pickle.dumps(model)
        again = copy.deepcopy(copy.deepcopy(model))
        products.clear()
        assert torch.equal(pickle.loads(pickled)(x), expected) and b"hf_specgen" not in pickled
        assert torch.equal(again(x), expected) and torch.equal(pickle.loads(pickle.dumps(again))(x), expected)
        torch.testing.assert_close(model.double()(x.double()), expected.double())
    assert not products
    with FastLinearLayers(again).in_use():
        assert torch.allclose(again(x), expected)
    assert "forward" not in vars(again[0])


def test_layers_are_restored_after_ctrl_c_while_they_are_restored() -> None:
    """Would catch: a model that keeps the rest of the layers for ever."""
    model = nn.Sequential(nn.Linear(8, 13), nn.Linear(13, 8))  # of shapes without a choice so far
    before = attributes(model)
    layers = FastLinearLayers(model)

    def work() -> None:
        with layers.in_use():
            pass

    lines = [attributes(model) == before for _ in interrupted_at_each_line(linear_layers._remove, work)]
    assert len(lines) >= 3 and all(lines)
