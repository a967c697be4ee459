"""A model that is changed between calls gives the tokens of plain `generate`, or is refused while it differs."""

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import AttentionInterface, BartConfig, BartForCausalLM, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specgen import DraftModelCandidates, FixedDepth, LayerSkipCandidates, NgramCandidates, attached
from hf_specgen.compat import CACHE
from hf_specgen.linear_layers import LinearLayer, restore
from hf_specgen.targets.fingerprint import computation
from hf_specgen.targets.model_parts import decoder_layers
from hf_specgen.targets.watched_hooks import WatchedHooks
from tests.helpers import assert_same_tokens, fresh_model, perturbed_copy, prompts, tiny_model

PROMPT = torch.tensor([[1, 5, 9, 23, 5, 9, 23, 5, 9]])
CALL = {"input_ids": PROMPT, "max_new_tokens": 16, "do_sample": False}
VECTOR = 2 * torch.randn(64, generator=torch.Generator().manual_seed(3))


def llama() -> Any:
    return fresh_model("llama", initializer_range=0.2)


def outcome(model: Any, strategy: Any = None) -> str:
    """Whether a call is refused, or gives the tokens of plain `generate`."""
    expected = model.generate(**CALL)
    try:
        tokens = model.generate(**CALL, candidate_generator=strategy or NgramCandidates(k=4))
    except ValueError as error:
        assert "cannot verify draft tokens" in str(error)
        return "refused"
    return "same" if torch.equal(tokens, expected) else "wrong"


def steer(states: torch.Tensor, is_active: bool = True) -> torch.Tensor:
    """Add a vector at the last position of a pass, as activation steering does."""
    return torch.cat([states[:, :-1], states[:, -1:] + VECTOR * is_active], dim=1)


def first(values: Any) -> torch.Tensor:
    return values[0] if isinstance(values, tuple) else values


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    yield
    handle.remove()


def hook_of_layer(model: Any) -> Any:
    return removed(model.model.layers[0].register_forward_hook(lambda *given: steer(first(given[2]))))


def hook_when_decoding(model: Any) -> Any:
    def add(module: Any, args: Any, output: Any) -> Any:
        states = first(output)
        return states + VECTOR if states.shape[1] == 1 else output

    return removed(model.model.layers[1].mlp.register_forward_hook(add))


def pre_hook_of_output_matrix(model: Any) -> Any:
    return removed(model.lm_head.register_forward_pre_hook(lambda module, args: (steer(args[0]),)))


def hook_of_embeddings(model: Any) -> Any:
    return removed(model.model.embed_tokens.register_forward_hook(lambda *given: steer(given[2])))


def hook_of_all_modules(model: Any) -> Any:
    def add(module: Any, args: Any, output: Any) -> Any:
        return steer(output) if module is model.model.norm else None

    return removed(torch.nn.modules.module.register_module_forward_hook(add))


@contextmanager
def replaced_forward(model: Any) -> Iterator[None]:
    norm = model.model.norm
    norm.forward = lambda states: steer(type(norm).forward(norm, states))
    yield
    del norm.forward


@contextmanager
def replaced_module(model: Any) -> Iterator[None]:
    norm = model.model.norm
    model.model.norm = torch.nn.Sequential(norm, Steering())
    yield
    model.model.norm = norm


@contextmanager
def replaced_forward_of_the_class(model: Any) -> Iterator[None]:
    norm_class = type(model.model.norm)
    forward = norm_class.forward
    norm_class.forward = lambda self, states: steer(forward(self, states))
    yield
    norm_class.forward = forward


@contextmanager
def replaced_attention(model: Any) -> Iterator[None]:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
        output, weights = sdpa_attention_forward(module, query, key, value, mask, **settings)
        return (output * 2 if query.shape[2] == 1 else output), weights

    registered = AttentionInterface().get("sdpa")
    AttentionInterface.register("sdpa", attention)
    yield
    AttentionInterface.register("sdpa", registered)


@contextmanager
def hooks_that_compress_the_cache(model: Any, longest: int = 1) -> Iterator[None]:
    """Each layer drops half of its keys and values after a longer pass, as libraries of cache compression do."""

    def compress(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs[CACHE].layers[module.layer_idx]
        if first(output).shape[1] > longest:
            half = layer.keys.shape[2] // 2
            layer.keys, layer.values = layer.keys[:, :, half:], layer.values[:, :, half:]

    handles = [layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in model.model.layers]
    yield
    for handle in handles:
        handle.remove()


class Steering(torch.nn.Module):
    """Steers while its attribute says so."""

    is_active = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return steer(states, self.is_active)


class Counting(torch.nn.Module):
    """Counts its passes."""

    passes = 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return states


CHANGES: list[Callable[[Any], Any]] = [
    hook_of_layer,
    hook_when_decoding,
    pre_hook_of_output_matrix,
    hook_of_embeddings,
    hook_of_all_modules,
    replaced_forward,
    replaced_module,
    replaced_forward_of_the_class,
    replaced_attention,
    hooks_that_compress_the_cache,
]


@pytest.mark.parametrize("change", CHANGES)
def test_self_check_model_changed_after_the_first_call_is_refused_until_undone(change: Callable[[Any], Any]) -> None:
    """Would catch: a result of the first call that is believed after a hook was added, or for ever after a refusal."""
    model = llama()
    assert outcome(model) == "same"
    with change(model):
        assert outcome(model) == "refused"
        assert outcome(model) == "refused"
    assert outcome(model) == "same"


@pytest.mark.parametrize("chunk", [None, 8])
def test_hooks_that_compress_the_cache_of_long_texts_alone_are_refused(chunk: int | None) -> None:
    """Would catch: a cache that no equivalence test compresses, while the call does after its prompt."""
    model, call = llama(), {**CALL, "prefill_chunk_size": chunk}
    with hooks_that_compress_the_cache(model, longest=6):
        with pytest.raises(ValueError, match=r"puts other keys or values into the cache.*; remove it"):
            model.generate(**call, candidate_generator=NgramCandidates(k=4))
        with attached(model, NgramCandidates(k=4)), pytest.warns(UserWarning, match="puts other keys or values"):
            tokens = model.generate(**call)
        assert torch.equal(tokens, model.generate(**call))
    assert outcome(model) == "same"


def test_self_check_model_changed_before_the_first_call_is_checked_again_afterwards() -> None:
    """Would catch: a model that is refused for good because a hook was there in its first call."""
    model = llama()
    with hook_of_layer(model):
        assert outcome(model, DraftModelCandidates(perturbed_copy(model), k=3)) == "refused"
    assert outcome(model, DraftModelCandidates(perturbed_copy(model), k=3)) == "same"


@pytest.mark.parametrize("kind", ["closure", "attribute", "module", "argument"])
def test_self_check_hook_that_a_variable_switches_on_is_refused(kind: str) -> None:
    """Would catch: a hook that was off in the checked call, and is believed to be off after its switch was set."""
    model, settings, steering = llama(), {"is_active": False}, Steering()
    steering.is_active = False
    hooks: dict[str, Any] = {
        "closure": lambda *given: steer(first(given[2]), settings["is_active"]),
        "attribute": lambda *given: steering(first(given[2])),
        "argument": functools.partial(lambda options, *given: steer(first(given[2]), options["is_active"]), settings),
    }
    if kind == "module":
        model.model.norm = torch.nn.Sequential(model.model.norm, steering)
    else:
        model.model.layers[0].register_forward_hook(hooks[kind])
    assert outcome(model) == "same"
    settings["is_active"] = steering.is_active = True
    assert outcome(model) == "refused"
    settings["is_active"] = steering.is_active = False
    assert outcome(model) == "same"


class SlottedSwitch:
    """A switch in a slot, which is no entry of `__dict__`."""

    __slots__ = ("is_active",)


class SwitchedByClass:
    """A hook with a switch for all of its instances."""

    is_active = False

    def __call__(self, *given: Any) -> torch.Tensor:
        return steer(first(given[2]), self.is_active)


class SwitchedInside:
    """A hook that reads the switch of another object."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(is_active=False)

    def __call__(self, *given: Any) -> torch.Tensor:
        return steer(first(given[2]), self.settings.is_active)


@pytest.mark.parametrize("kind", ["slot", "class", "inner object", "deque"])
def test_self_check_hook_with_a_switch_outside_of_its_attributes_is_refused(kind: str, monkeypatch: Any) -> None:
    """Would catch: a switch that is read from a slot, a class, an object of an object or a deque, and not noticed."""
    model, slotted, inside, switches = llama(), SlottedSwitch(), SwitchedInside(), deque([False])
    slotted.is_active = False
    hooks: dict[str, Any] = {
        "slot": lambda *given: steer(first(given[2]), slotted.is_active),
        "class": SwitchedByClass(),
        "inner object": inside,
        "deque": lambda *given: steer(first(given[2]), switches[0]),
    }
    model.model.layers[0].register_forward_hook(hooks[kind])
    assert outcome(model) == "same"
    slotted.is_active = inside.settings.is_active = switches[0] = True
    monkeypatch.setattr(SwitchedByClass, "is_active", True)
    assert outcome(model) == "refused"


def test_self_check_hook_that_counts_passes_and_changes_results_is_refused() -> None:
    """Would catch: a hook that steers from its twentieth pass on, while an equivalence test makes five passes."""
    model, passes = llama(), {"count": 0}

    def steer_later(module: Any, args: Any, output: Any) -> Any:
        passes["count"] += 1
        return first(output) + VECTOR if passes["count"] > 20 else output

    handle = model.model.layers[0].register_forward_hook(lambda *given: steer_later(*given))
    with pytest.raises(ValueError, match="a variable of its own in every pass"):
        model.generate(**CALL, candidate_generator=NgramCandidates(k=4))
    handle.remove()
    norm = model.model.norm
    norm.forward = lambda states: steer_later(norm, (), type(norm).forward(norm, states))
    with pytest.raises(ValueError, match="a variable of its own in every pass"):
        model.generate(**CALL, candidate_generator=NgramCandidates(k=4))
    del norm.forward

    def count(module: Any, args: Any, output: Any) -> None:
        passes["count"] += 1

    model.model.layers[0].register_forward_hook(count)
    assert outcome(model) == "same", "a hook that only counts changes no token"

    def steer_by_count(module: Any, args: Any, output: Any) -> Any:
        return first(output) + VECTOR if passes["count"] > 20 else None

    def steer_in_place(module: Any, args: Any, output: Any) -> None:
        first(output).add_(VECTOR * (passes["count"] > 20))

    for layer, hook in ((0, steer_by_count), (1, steer_by_count), (1, steer_in_place)):
        handle = model.model.layers[layer].register_forward_hook(hook)
        passes["count"] = 0
        assert outcome(model) == "refused", "another hook counts for it"
        handle.remove()
    assert outcome(model) == "same"


def test_self_check_module_that_counts_its_passes_is_checked_once() -> None:
    """Would catch: an equivalence test in every call, since the model itself changes an attribute."""
    model, counter = llama(), Counting()
    model.model.norm = torch.nn.Sequential(model.model.norm, counter)
    assert outcome(model) == "same"
    for strategy in (None, FixedDepth()):
        before = counter.passes
        model.generate(**CALL, candidate_generator=NgramCandidates(k=4, policy=strategy))
        assert counter.passes - before <= CALL["max_new_tokens"]
    assert outcome(model) == "same"


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_self_check_sees_a_switch_behind_a_hook_that_records(kind: str) -> None:
    """Would catch: records that move all later values of a fingerprint, so that none of them counts any more."""
    model = llama()
    records: Any = {} if kind == "dict" else []
    where = {"positions": "all"}

    def record(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if kind == "dict":
            records["logits"] = output.detach()
        else:
            records.append(output.shape)

    def steering(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + VECTOR if where["positions"] == "all" else steer(output)

    model.lm_head.register_forward_hook(record)
    model.model.layers[0].register_forward_hook(steering)
    assert [outcome(model) for _ in range(2)] == ["same", "same"]
    where["positions"] = "last"
    assert outcome(model) == "refused"
    where["positions"] = "all"
    assert outcome(model) == "same"


def test_self_check_hook_whose_counter_becomes_something_else_same_tokens() -> None:
    """Would catch: an error where a place that passes have changed is no collection any more."""
    model, counter = llama(), cast(Any, {"passes": 0})

    def count(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if isinstance(counter, dict):
            counter["passes"] += 1

    model.lm_head.register_forward_hook(count)
    for counter in ({"passes": 0}, 5, "abc", {"passes": 0}):  # noqa: B007
        assert outcome(model) == "same"


@pytest.mark.parametrize("kind", ["hook", "module"])
def test_self_check_sees_a_switch_where_a_counter_was(kind: str) -> None:
    """Would catch: the place of a counter that was removed or moved, and is left out of the comparison ever after."""
    model, steering = llama(), Steering()
    passes, is_active = 0, False

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def steer_if_active(module: Any, inputs: Any, output: Any) -> Any:
        return steer(first(output), is_active)

    norm, layer, steering.is_active = model.model.norm, model.model.layers[0], False
    if kind == "hook":
        handle = layer.register_forward_hook(count)
    else:
        model.model.norm = torch.nn.Sequential(norm, Counting())
        model.model.norm[1].passes = 0
    assert [outcome(model) for _ in range(2)] == ["same", "same"]
    if kind == "hook":
        handle.remove()
        layer.register_forward_hook(steer_if_active)
    else:
        model.model.norm = torch.nn.Sequential(norm, steering)
    assert [outcome(model) for _ in range(2)] == ["same", "same"]
    is_active = steering.is_active = True
    assert outcome(model) == "refused"


@pytest.mark.parametrize("kind", ["number", "attribute", "key", "collection", "global"])
def test_self_check_sees_a_switch_beside_a_value_that_the_first_pass_adds(kind: str) -> None:
    """Would catch: all variables of a hook left out of the comparison once a pass has set one that was None."""
    model, scale = llama(), None
    settings: dict[str, Any] = {"is_active": False}
    options: Any = None

    class Hook:
        is_active = False
        scale = None

        def __init__(self) -> None:
            self.is_active = False

        def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
            if self.scale is None:
                self.scale = 1.0
            return steer(first(output), self.is_active)

    def of_closure(module: Any, inputs: Any, output: Any) -> Any:
        nonlocal scale, options
        if kind == "number" and scale is None:
            scale = 1.0
        if kind == "collection" and options is None:
            options = settings
        if kind == "global":
            globals().setdefault("SCALE", 1.0)
            return steer(first(output) * SCALE, settings["is_active"])  # type: ignore[name-defined]  # noqa: F821
        if kind == "key":
            settings.setdefault("scale", 1.0)
        return steer(first(output), settings["is_active"])

    hook = Hook()
    model.model.layers[0].register_forward_hook(hook if kind == "attribute" else of_closure)
    try:
        # Plain decoding comes first in `outcome`, and here the check.
        model.generate(**CALL, candidate_generator=NgramCandidates(k=4))
        assert outcome(model) == "same"
        settings["is_active"] = hook.is_active = True
        assert outcome(model) == "refused"
    finally:
        globals().pop("SCALE", None)


@pytest.mark.parametrize("collection", [list, dict, set])
def test_self_check_hook_that_records_is_checked_at_most_twice(collection: Any) -> None:
    """Would catch: an equivalence test in every call for a hook that appends to a collection in every pass."""
    model, records, passes = llama(), collection(), Counting()

    def record(module: Any, inputs: Any, output: torch.Tensor) -> None:
        passes.passes += 1
        if collection is list:
            records.append(output.shape[1])
        elif collection is dict:
            records[len(records)] = output.shape[1]
        else:
            records.add(output.shape[1])

    model.model.embed_tokens.register_forward_hook(record)
    counts = []
    for _ in range(4):
        before = passes.passes
        model.generate(**CALL, candidate_generator=NgramCandidates(k=4, policy=FixedDepth()))
        counts.append(passes.passes - before)
    assert max(counts[2:]) <= CALL["max_new_tokens"], counts


@pytest.mark.parametrize("position", [3, 7, 20])
def test_self_check_hook_of_long_passes_is_refused(position: int) -> None:
    """Activation patching at a position of the prompt: would catch draft tokens that are patched in its place."""
    model = llama()

    def patch(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] <= position:
            return output
        changed = output.clone()
        changed[:, position] = VECTOR
        return changed

    model.model.layers[0].register_forward_hook(patch)
    assert outcome(model, NgramCandidates(k=32)) == "refused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_check_hook_that_computes_something_once_same_tokens(dtype: torch.dtype) -> None:
    """Would catch: a vector that the check leaves in float32, at which later plain calls raise too; a false refusal."""

    class Steering:
        vector = VECTOR
        kept: torch.Tensor | None = None

        def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                self.kept = self.vector.to(output.device, output.dtype)
            return output + self.kept

    model = llama().to(dtype)
    model.model.layers[0].register_forward_hook(steering := Steering())
    ours = model.generate(**CALL, candidate_generator=NgramCandidates(k=4))
    assert steering.kept is not None and steering.kept.dtype == dtype
    assert dtype != torch.float32 or torch.equal(ours, model.generate(**CALL))


def test_self_check_that_refuses_leaves_the_random_generator() -> None:
    """Would catch: an attached call that samples from another state after the refusal."""
    model = llama()

    class Noise:
        calls = 0

        def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return output + 0.01 * torch.randn_like(output)

    model.model.embed_tokens.register_forward_hook(Noise())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="cannot verify draft tokens"):
        model.generate(**CALL, candidate_generator=NgramCandidates(k=4))
    assert torch.equal(torch.get_rng_state(), state)


def test_self_check_hook_that_adds_the_same_everywhere_drafts() -> None:
    """Would catch: a refusal of all hooks, though steering at every position is computed in any pass."""
    model = llama()
    model.model.layers[0].register_forward_hook(lambda *given: first(given[2]) + VECTOR)
    strategy = DraftModelCandidates(perturbed_copy(model), k=3)
    assert outcome(model, strategy) == "same"
    assert strategy.speculation.accepted > 0


def test_computation_of_adapters_is_that_of_the_active_one() -> None:
    """Would catch: an adapter that is believed to compute as the one before, or an equivalence test in every call."""
    settings = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(llama(), peft.LoraConfig(**settings), adapter_name="one").eval()
    model.add_adapter("two", peft.LoraConfig(**settings))
    states = []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        assert outcome(model) == "same"
        states.append(computation(model.get_base_model()))
    assert states[0] == states[2] != states[1]
    with model.disable_adapter():
        assert computation(model.get_base_model()) not in states


def test_computation_is_equal_in_later_calls() -> None:
    """Would catch: an equivalence test in every call, since a call itself changes what its result belongs to."""
    for architecture in ("llama", "gemma2", "mixtral"):
        model = fresh_model(architecture)
        before = computation(model)
        model.generate(**CALL, candidate_generator="auto")
        assert computation(model) == before


def test_computation_has_attributes_that_are_set_before_those_of_every_module() -> None:
    """Would catch: attributes that are told apart by their order alone; BART's positions set `offset` first of all."""
    sizes = {"d_model": 32, "vocab_size": 50, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    model = BartForCausalLM(BartConfig(**sizes))
    before = computation(model)
    positions = next(module for module in model.modules() if hasattr(module, "offset"))
    positions.offset += 1
    assert computation(model) != before


def test_watched_hooks_leave_linear_layers_of_a_pass_in_another_thread() -> None:
    """Would catch: a fast linear layer that stays in the model, since a self-check wrapped it meanwhile."""
    model = llama()
    layer = LinearLayer(model.lm_head)
    vars(model.lm_head)["forward"] = layer.forward  # a pass of another thread begins
    with WatchedHooks(model):
        restore([layer])  # and ends
        assert "forward" not in vars(model.lm_head)
    assert "forward" not in vars(model.lm_head)


def test_computation_refers_to_no_model() -> None:
    """Would catch: a model that is never freed, since the results of its check keep it."""
    model = llama()
    held = sys.getrefcount(model)
    state = computation(model)
    assert sys.getrefcount(model) == held and state


@pytest.mark.parametrize("is_prepared", [False, True])
def test_self_check_mixed_precision_drafts(is_prepared: bool) -> None:
    """Would catch: rounding to bfloat16 inside of forward taken for wrong scores, so that rollouts run plainly."""
    model = llama()
    strategy = DraftModelCandidates(perturbed_copy(model), k=3)
    if is_prepared:
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_prepared):
        model.generate(**CALL, candidate_generator=strategy)
    assert strategy.speculation.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_self_check_refuses_the_same_models_in_half_precision(dtype: torch.dtype) -> None:
    """Would catch: an error of the size of rounding that is accepted in the dtype in which people load models."""
    model = llama().to(dtype)

    def err(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        is_draft = 1 < output.shape[1] < 6
        return output + 0.02 * output.flip(-1) if is_draft else output

    model.model.norm.register_forward_hook(err)
    with pytest.raises(ValueError, match="cannot verify draft tokens"):
        model.generate(**CALL, candidate_generator=NgramCandidates(k=3))


def test_self_check_in_half_precision_leaves_the_weights() -> None:
    """Would catch: a check in float32 that converts the model."""
    model = llama().to(torch.bfloat16)
    before = {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict(keep_vars=True).items()}
    model.generate(**CALL, candidate_generator=NgramCandidates(k=3))
    assert before == {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict(keep_vars=True).items()}


def test_self_check_beside_threads_that_draw_random_numbers_refuses_nothing() -> None:
    """Would catch: another thread's random numbers taken for dropout, by which models were refused for good."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(3):
            assert outcome(llama()) == "same"
    finally:
        stop.set()
        thread.join()


class AsksAnotherModel(LlamaForCausalLM):
    """A model whose forward pass generates with another one, as a router or a guard model may."""

    other: Any = None

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if self.other is not None:
            self.other.generate(**{**CALL, "max_new_tokens": 1}, candidate_generator=NgramCandidates(k=2))
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


def test_self_check_of_a_model_inside_that_of_another_ends() -> None:
    """Would catch: one lock for all models, for which a nested call waits for ever."""
    model = AsksAnotherModel(tiny_model("llama").config).eval()
    model.__dict__["other"] = llama()
    outcomes: list[str] = []
    thread = threading.Thread(target=lambda: outcomes.append(outcome(model)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert outcomes == ["same"]


class Coarse(torch.Tensor):
    """A quantised weight, as torchao's: its products round the activations by the largest one of the pass."""

    bits = 4

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.linear:
            return super().__torch_function__(function, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if args[1].bits < 16:
                step = args[0].abs().amax() / (2 ** (args[1].bits - 1) - 1)
                args = ((args[0] / step).round() * step, *args[1:])
            return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", ["class", "setting"])
def test_weights_quantised_in_place_are_checked_again(change: str) -> None:
    """Would catch: the result of before, as neither the modules nor their attributes have changed."""
    model = llama()
    layers = [module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]

    def quantise(bits: int) -> None:
        for layer in layers:
            layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Coarse), requires_grad=False)
            layer.weight.bits = bits

    if change == "setting":
        quantise(16)  # exact
    assert outcome(model) == "same"
    quantise(4)
    assert outcome(model) == "refused"


@pytest.mark.parametrize("tree", [None, 8])
def test_hook_of_the_first_layers_on_passes_over_several_tokens_is_refused(tree: int | None) -> None:
    """Would catch: a check whose early passes have one token each, while the passes of trees have several."""
    model = fresh_model("llama")

    def steer(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1.0 if output.shape[1] > 1 else output

    candidates = LayerSkipCandidates(1, k=3, tree=tree, policy=FixedDepth(3))
    refused = pytest.raises(ValueError, match="LlamaForCausalLM cannot draft with its own first layers")
    with decoder_layers(model)[0].register_forward_hook(steer), refused:
        model.generate(**prompts(1), max_new_tokens=8, do_sample=False, candidate_generator=candidates)
    assert_same_tokens(model, prompts(1), candidates, max_new_tokens=8)
