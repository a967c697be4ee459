"""Grouped attention: the same attention, in our own forward passes only; every architecture is in tests/slow."""

import itertools
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specgen.targets.attention import fold_mask, grouped_attention, grouped_sdpa
from tests.helpers import Oracle, plain_and_speculative, prompts, reference, tiny_model

# A row of a step: cached slots, parents of the draft's nodes, padding in front.
STEPS: dict[str, dict[str, Any]] = {
    "one query": {"rows": [(6, (), 0)]},
    "chain": {"rows": [(6, (-1, 0, 1), 0)]},
    "ragged batch": {"rows": [(6, (-1, 0), 0), (3, (-1, 0), 0), (1, (-1, 0), 0)]},
    "padding": {"rows": [(6, (-1, 0), 0), (6, (-1, 0), 4)]},
    "tree": {"rows": [(5, (-1, -1, 0, 0, 1, 4), 0)]},
    "trees": {"rows": [(5, (-1, -1, 0), 1), (2, (-1, 0, 0), 0)]},
    "window": {"rows": [(9, (-1, 0, 0), 0), (4, (-1, 0, 1), 2)], "window": 3},
}
HEADS = [(2, 2), (1, 4), (3, 5)]


def step_mask(rows: list[tuple[int, tuple[int, ...], int]], window: int | None = None) -> torch.Tensor:
    """`[batch, 1, queries, keys]`, drawn by the slow reference."""
    width = max(length for length, _, _ in rows) + 1 + len(rows[0][1])
    drawn = [
        reference.row_mask(length, parents, width, [slot >= padding for slot in range(length)], window)
        for length, parents, padding in rows
    ]
    return torch.tensor(drawn, dtype=torch.bool)[:, None]


def states(
    kv_heads: int, groups: int, batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value in the memory layouts that a model's projections and the cache's buffers have."""
    query = torch.randn(batch, queries, kv_heads * groups, 16).transpose(1, 2)
    key, value = (torch.randn(batch, kv_heads, keys + 5, 16)[:, :, :keys] for _ in range(2))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def attention_of_one_query_and_head_at_a_time(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The reference, in float64: `[batch, queries, heads, value_dim]`."""
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for row, head, place in itertools.product(range(batch), range(heads), range(queries)):
        seen = mask[row, 0, place]
        keys = key[row, head // groups, seen].double()
        weights = (keys @ query[row, head, place].double() * scaling).softmax(dim=0)
        output[row, place, head] = weights @ value[row, head // groups, seen].double()
    return output


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("kv_heads", "groups"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_sdpa_equals_the_loops(step: str, kv_heads: int, groups: int, dtype: torch.dtype) -> None:
    """Would catch: heads folded in another order than the mask, or a head that reads another group's keys."""
    mask = step_mask(**STEPS[step])
    batch, _, queries, keys = mask.shape
    query, key, value = states(kv_heads, groups, batch, queries, keys, dtype)
    output = grouped_sdpa(query, key, value, fold_mask(mask, groups, dtype), scaling=0.3)
    expected = attention_of_one_query_and_head_at_a_time(query, key, value, mask, scaling=0.3)
    # bfloat16 rounds to 2**-9: the weights before they are multiplied with the values, then the output.
    tolerance = 2e-6 if dtype == torch.float32 else 2 * 2**-9 * float(value.abs().max())
    assert output.dtype == dtype and output.is_contiguous()
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=0)


def test_dispatch_of_a_query_that_sees_nothing_agrees_with_transformers() -> None:
    """Would catch: nan, or an average of everything, for the padding of a batch."""
    mask = step_mask([(6, (-1, 0), 0)])
    mask[..., 1, :] = False
    module, tensors = SimpleNamespace(num_key_value_groups=4), states(2, 4, 1, 3, 9)
    with grouped_attention():
        ours, _ = AttentionInterface()["sdpa"](module, *tensors, mask)
    torch.testing.assert_close(ours, sdpa_attention_forward(module, *tensors, mask)[0], atol=1e-6, rtol=0)


MASK = step_mask([(6, (-1, 0), 0)])
LEFT_TO_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "heads are not grouped": {"groups": 1},
    "several queries without a mask": {"mask": None},
    "a mask for each head": {"mask": MASK.repeat(1, 4, 1, 1)},
    "a mask that broadcasts over queries": {"mask": MASK[:, :, :1]},
    "dropout": {"dropout": 0.5},
    "a position bias": {"position_bias": torch.randn(1, 4, 3, 9)},
    "attention sinks": {"s_aux": torch.zeros(4)},
    "attention weights are wanted": {"output_attentions": True},
}


@pytest.mark.parametrize("case", LEFT_TO_TRANSFORMERS)
def test_dispatch_of_any_other_call_is_left_to_transformers(case: str, folded_calls: list[int]) -> None:
    """Would catch: an argument that changes the result and that folding ignores."""
    kwargs = {"mask": MASK, "groups": 2, **LEFT_TO_TRANSFORMERS[case]}
    groups, mask = kwargs.pop("groups"), kwargs.pop("mask")
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    tensors = states(4 // groups, groups, 1, 3, 9)
    torch.manual_seed(1)
    with grouped_attention():
        ours, _ = AttentionInterface()["sdpa"](module, *tensors, mask, **kwargs)
    torch.manual_seed(1)
    own, _ = sdpa_attention_forward(module, *tensors, mask, **kwargs)
    assert folded_calls == []
    assert torch.equal(ours, own)


def test_grouped_attention_outside_of_the_context_is_bitwise_transformers_own(folded_calls: list[int]) -> None:
    """Would catch: a registration that changes results outside of the context, also after an exception inside."""
    with pytest.raises(KeyError), grouped_attention():
        raise KeyError
    module, tensors = SimpleNamespace(num_key_value_groups=2, is_causal=True), states(2, 2, 1, 3, 9)
    wrapped = AttentionInterface()["sdpa"]
    assert wrapped is not sdpa_attention_forward
    for mask in (MASK, None):
        assert torch.equal(wrapped(module, *tensors, mask)[0], sdpa_attention_forward(module, *tensors, mask)[0])
    assert folded_calls == []


def test_grouped_attention_in_one_thread_is_not_seen_by_another(folded_calls: list[int]) -> None:
    """Would catch: a flag on the model, the config or the process instead of the thread.

    Both threads use one model. The other one generates while this one stands inside of the context, and runs forward
    passes there, from the first to the last of its steps.
    """
    model, inputs = tiny_model("qwen3"), prompts(3)
    arguments = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    before = model.generate(**inputs, **arguments)
    others: list[Any] = []
    thread = threading.Thread(
        target=lambda: others.append((threading.get_ident(), model.generate(**inputs, **arguments)))
    )
    with torch.no_grad(), grouped_attention():
        thread.start()
        while thread.is_alive() or not folded_calls:
            model(torch.ones(1, 3, dtype=torch.long), attention_mask=MASK[..., :3, 6:])
        thread.join()
    ((ident, during),) = others
    assert ident not in folded_calls and set(folded_calls) == {threading.get_ident()}
    assert torch.equal(torch.stack(before.logits), torch.stack(during.logits))


def test_grouped_attention_does_not_enter_compiled_models(folded_calls: list[int]) -> None:
    """Would catch: a graph with grouped attention in it, or one that is compiled again outside of the context."""
    module, tensors = SimpleNamespace(num_key_value_groups=2), states(2, 2, 1, 3, 9)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with grouped_attention():
        compiled = torch.compile(AttentionInterface()["sdpa"], fullgraph=True, backend=backend)
        inside, _ = compiled(module, *tensors, MASK)
    outside, _ = compiled(module, *tensors, MASK)
    own, _ = sdpa_attention_forward(module, *tensors, MASK)
    assert folded_calls == [] and len(graphs) == 1
    assert torch.equal(inside, own) and torch.equal(outside, own)


@pytest.mark.parametrize("batch", [1, 2])
def test_grouped_attention_keeps_the_tokens_of_a_long_text(batch: int, folded_calls: list[int]) -> None:
    """Would catch: an error that begins where the kernel divides the keys into blocks (of 512 on a CPU)."""
    model = tiny_model("llama", max_position_embeddings=2048)
    plain, output = plain_and_speculative(
        model, prompts(batch, length=1100), partial(Oracle, accuracy=0.6), max_new_tokens=24
    )
    assert folded_calls and torch.equal(plain, output.sequences)
