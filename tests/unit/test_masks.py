"""Masks as 0/1 matrices for small cases, and against the slow reference for random ones."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from hf_specgen import DraftTree, compat
from hf_specgen.targets.masks import StepLayout, StepMasks, additive, chunked_mask, full_mask, sliding_mask
from tests.helpers import reference, tiny_model

thorough = settings(max_examples=200, deadline=None, derandomize=True)


def layout(
    lengths: Sequence[int],
    parents: Sequence[Sequence[int]],
    visible: Sequence[Sequence[bool]] | None = None,
) -> StepLayout:
    """A step of rows with equally many nodes."""
    return StepLayout(
        lengths=lengths,
        depths=torch.tensor([[reference.depth(row, node) for node in range(-1, len(row))] for row in parents]),
        ancestors=torch.tensor([reference.ancestor_matrix(row) for row in parents], dtype=torch.bool),
        visible=None if visible is None else torch.tensor(visible, dtype=torch.bool),
    )


@st.composite
def any_step(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], list[list[bool]] | None]:
    """Lengths, parents, and padding (left, never the whole prompt) of a batch."""
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(1, 9), min_size=batch, max_size=batch))
    parents = [draw(reference.any_parents(st.just(nodes))) for _ in range(batch)]
    prompt = draw(st.integers(1, min(lengths)))
    paddings = [draw(st.integers(0, prompt - 1)) for _ in range(batch)]
    visible = [[slot >= padding for slot in range(prompt)] for padding in paddings]
    return lengths, parents, draw(st.sampled_from([None, visible]))


@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
@thorough
@given(step=any_step(), size=st.integers(1, 8))
def test_masks_agree_with_the_reference(kind: str, step: tuple, size: int) -> None:
    lengths, parents, visible = step
    fast = layout(lengths, parents, visible)
    mask = {"full": full_mask, "window": sliding_mask, "chunk": chunked_mask}[kind]
    limits = {} if kind == "full" else {kind: size}
    slow = [
        reference.row_mask(length, tree, fast.width, visible and visible[row], **limits)
        for row, (length, tree) in enumerate(zip(lengths, parents, strict=True))
    ]
    assert mask(fast, *limits.values())[:, 0].int().tolist() == slow


def test_masks_do_not_change_the_layout() -> None:
    """Would catch: an in-place operation on a tensor that the next layer's mask is made of."""
    step = layout([2, 1], [(-1,), (-1,)], visible=[[0], [1]])
    first, second = ([full_mask(step), sliding_mask(step, 2), chunked_mask(step, 2)] for _ in range(2))
    assert all(torch.equal(*masks) for masks in zip(first, second, strict=True))
    assert step.visible is not None and step.visible.tolist() == [[False], [True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_has_finite_softmax_in_every_dtype(dtype: torch.dtype) -> None:
    """Would catch: a bool given to eager attention (which adds it), or -inf, whose softmax is nan in an empty line."""
    mask = torch.tensor([[True, False], [False, False]])
    numbers = additive(mask, dtype)
    assert numbers.dtype == dtype
    assert numbers.tolist() == [[0, torch.finfo(dtype).min], [torch.finfo(dtype).min] * 2]
    assert bool(numbers.softmax(dim=-1).isfinite().all())
    assert mask.tolist() == [[True, False], [False, False]]


def test_eager_attention_gets_a_mask_in_plain_steps_too() -> None:
    """Would catch: None, which attention written by hand adds to its scores."""
    model = tiny_model("gemma2")
    assert compat.attention_implementation(model.config) == "eager"
    made = StepMasks(model, None).of_step(DraftTree.empty(2), (5, 5), 0, 0)
    for kind in ("full_attention", "sliding_attention"):
        assert made[kind].shape[:2] == (2, 1)


CHAINS = {"equal": ([7, 7], 0), "different": ([9, 2, 40], 0), "padded": ([6, 6], 2), "one": ([1], 0)}


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("rows", CHAINS)
@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_chains_equal_the_reference(window: int | None, rows: str, queries: int) -> None:
    """Would catch: one token too many or too few; no mask for a row with padding, or behind a window."""
    lengths, padding = CHAINS[rows]
    model = SimpleNamespace(config=LlamaConfig(sliding_window=window), dtype=torch.float32)
    model.config._attn_implementation = "sdpa"
    model.get_input_embeddings = lambda: torch.nn.Embedding(2, 2)
    visible = None if not padding else torch.tensor([[slot >= padding for slot in range(6)], [True] * 6])
    made = StepMasks(cast(Any, model), visible).of_step(
        DraftTree.chains([[0] * (queries - 1)] * len(lengths)), tuple(lengths), 0, 0
    )
    chain, width = tuple(range(-1, queries - 2)), max(lengths) + queries
    expected = [
        reference.row_mask(length, chain, width, None if visible is None else visible[row].tolist(), window)
        for row, length in enumerate(lengths)
    ]
    if made is None:
        made = torch.ones(1, 1, 1, width, dtype=torch.bool)
    assert made.expand(len(lengths), -1, -1, -1)[:, 0].int().tolist() == expected
