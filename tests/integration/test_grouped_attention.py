"""Grouped attention: the same attention, in our own forward passes only; every architecture is in tests/slow."""

import copy
import itertools
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from hf_specgen.compat import CACHE
from hf_specgen.targets.attention import fold_mask, grouped_attention, grouped_sdpa
from tests.fuzz.models import tiny_model as tiny_model_of_fuzz
from tests.helpers import Oracle, fresh_model, plain_and_speculative, prompts, reference, tiny_model
from tests.helpers.calls import with_sessions
from tests.helpers.comparison import assert_same_tokens
from tests.helpers.models import stateful_model

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


def test_dispatch_on_a_device_that_was_not_tried_is_left_to_transformers(folded_calls: list[int]) -> None:
    """Would catch: folded queries on MPS, XPU or an NPU; "meta" stands for such a device."""
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    tensors = [tensor.to("meta") for tensor in states(2, 2, 1, 3, 9)]
    with grouped_attention():
        for mask in (MASK.to("meta"), None):
            ours, _ = AttentionInterface()["sdpa"](module, *tensors, mask)
            assert ours.shape == (1, 3, 4, 16) and ours.device.type == "meta"
    assert folded_calls == []


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
    """Would catch: a flag on model or process: one thread generates while another one runs passes in the context."""
    model, inputs = tiny_model("qwen3"), prompts(3)
    arguments = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    before = model.generate(**inputs, **arguments)
    others: list[Any] = []
    generate = lambda: others.append((threading.get_ident(), model.generate(**inputs, **arguments)))  # noqa: E731
    thread = threading.Thread(target=generate)
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
    inputs, oracle = prompts(batch, length=1100), partial(Oracle, accuracy=0.6)
    plain, output = plain_and_speculative(model, inputs, oracle, max_new_tokens=24)
    assert folded_calls and torch.equal(plain, output.sequences)


# Behind the end of a position table, and where rotary frequencies change; up to its end: `test_cases.py`

TABLE = {"gpt2": "n_positions", "opt": "max_position_embeddings", "llama": "max_position_embeddings"}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ALWAYS = partial(Oracle, accuracy=1.0)


def sharp_model(architecture: str, positions: int, **overrides: Any) -> Any:
    """A model with a table of `positions` positions, and attention that is sharp enough to show a wrong position."""
    model = fresh_model(architecture, **{TABLE[architecture]: positions}, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 4
    return model


def assert_same_logits(model: Any, inputs: dict[str, torch.Tensor], candidates: Any, **arguments: Any) -> Any:
    """Assert that tokens and logits are those of plain `generate`; returns the speculative output."""
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(2)
    plain = model.generate(**inputs, **arguments)
    if not isinstance(candidates, Candidates):
        candidates = candidates(plain.sequences[:, inputs["input_ids"].shape[1] :])
    torch.manual_seed(2)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates)
    assert torch.equal(plain.sequences, ours.sequences)
    for expected, got in zip(plain.logits, ours.logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # float32, sums in another order
    return ours


def test_causal_mask_of_a_fixed_size_ends_drafts_same_logits() -> None:
    """Would catch: a tree whose nodes take more cache slots than the layers' causal mask has, at few positions."""
    model = tiny_model_of_fuzz("gpt_neo", positions=90)
    candidates = partial(Oracle, accuracy=0.7, branching=True)
    assert assert_same_logits(model, prompts(2), candidates, max_new_tokens=78).speculation.drafted > 0


@pytest.mark.parametrize("candidates", [NgramCandidates, DraftModelCandidates], ids=["n-grams", "draft model"])
def test_causal_mask_of_a_fixed_size_ends_large_trees_same_logits(candidates: Any) -> None:
    """Would catch: a limit of 64 cache slots for a draft where a tree of a fixed size has more nodes."""
    model = tiny_model_of_fuzz("gpt_neo", positions=190)
    drafter = [copy.deepcopy(model)] if candidates is DraftModelCandidates else []
    strategy = candidates(*drafter, k=10, tree=120)
    output = assert_same_logits(model, prompts(2), lambda _: strategy, max_new_tokens=170)
    assert 0 < output.speculation.drafted < 120 * output.speculation.steps


@pytest.mark.parametrize("tree", ["auto", 9])
def test_search_for_a_target_that_verifies_chains_only_has_no_siblings(tree: Any) -> None:
    """Would catch: siblings that count in the size of a draft and in its expected tokens, and are removed later."""
    drafts = list[Any]()

    def record(session: Any) -> None:
        make = session.draft
        session.draft = lambda depths: drafts.append(make(depths)) or drafts[-1]

    model = stateful_model("mamba")
    strategy = with_sessions(NgramCandidates(k=9, tree=tree), record)
    assert_same_tokens(model, prompts(2), strategy, max_new_tokens=30)
    assert any(draft.nodes for draft in drafts)
    assert all(parents == tuple(range(-1, len(parents) - 1)) for draft in drafts for parents in draft.parents)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "candidates",
    [ALWAYS, LayerSkipCandidates(1, k=3), LayerSkipCandidates(1, k=3, tree=6)],
    ids=["oracle", "layer-skip", "layer-skip tree"],
)
def test_prompt_behind_position_table_same_logits(sampling: dict, candidates: Any) -> None:
    """Rotary positions continue behind the table. Would catch: draft tokens that are read at its last position."""
    arguments = {"max_new_tokens": 10, **sampling}
    ours = assert_same_logits(sharp_model("llama", 16), prompts(2, length=24), candidates, **arguments)
    assert ours.speculation.drafted > 0


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_draft_model_whose_table_ends_with_the_prompt_same_logits(architecture: str) -> None:
    """Would catch: rows that the draft has no positions for being read with the others."""
    draft = sharp_model(architecture, 12)
    candidates = DraftModelCandidates(draft, k=3)
    assert_same_logits(sharp_model(architecture, 40), prompts(3, length=12), candidates, max_new_tokens=12)


def test_padding_behind_position_table_same_logits() -> None:
    """Would catch: padding of an ended row that is read at the table's last position, so that its scores differ."""
    model, inputs = sharp_model("llama", 16), prompts(3, length=14)
    ids = model.generate(**inputs, max_new_tokens=10)[:, 14:]
    end = int(ids[1, 2])
    assert end not in ids[0].tolist(), "another row has to continue"
    assert_same_logits(model, inputs, NgramCandidates(k=3), max_new_tokens=10, eos_token_id=[end], pad_token_id=0)


def test_given_cache_with_whole_prompt_same_tokens() -> None:
    """Plain `generate` then reads the prompt again. Would catch: a draft taken for the uncached rest of the prompt."""
    model, inputs = tiny_model("llama"), prompts(1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(input_ids=inputs["input_ids"], **{CACHE: cache})
    oracle = ALWAYS(model.generate(**inputs, max_new_tokens=8)[:, 12:])
    plain = model.generate(**inputs, max_new_tokens=8, **{CACHE: caches[0]})
    ours = model.generate(**inputs, max_new_tokens=8, **{CACHE: caches[1]}, candidate_generator=oracle)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(("parameters", "length", "new"), [(DYNAMIC, 10, 6), (LONG, 10, 6), (LONG, 40, 8)])
@pytest.mark.parametrize(
    "candidates", [partial(Oracle, accuracy=0.7), LayerSkipCandidates(1, k=4)], ids=["oracle", "layer-skip"]
)
def test_text_on_one_side_of_frequency_change(parameters: dict, length: int, new: int, candidates: Any) -> None:
    """Would catch: padding of shorter drafts that crosses the change, and changes the frequencies of all rows."""
    model = sharp_model("llama", 64 if parameters is LONG else 16, rope_parameters=parameters)
    assert_same_logits(model, prompts(2, length=length), candidates, max_new_tokens=new)


@pytest.mark.parametrize(("parameters", "length"), [(DYNAMIC, 10), (DYNAMIC, 20), (LONG, 10), (LONG, 18)])
def test_text_across_frequency_change_raises(parameters: dict, length: int) -> None:
    """The last case has one row before the change, and one behind it."""
    model = sharp_model("llama", 64 if parameters is LONG else 16, rope_parameters=parameters)
    with pytest.raises(ValueError, match="changes its rotary frequencies"):
        model.generate(**prompts(2, length=length), max_new_tokens=12, candidate_generator=NgramCandidates())
