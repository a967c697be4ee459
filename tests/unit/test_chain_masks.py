"""Masks of chain drafts: cut from the template, they are the masks that loops draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_specgen.targets.chain_masks import ChainMasks
from tests.helpers import reference

CPU = torch.device("cpu")


def drawn(
    lengths: list[int], queries: int, window: int | None = None, visible: list[list[bool]] | None = None
) -> list[list[list[int]]]:
    """The masks of all rows, by the slow reference."""
    chain, width = tuple(range(-1, queries - 2)), max(lengths) + queries
    rows = enumerate(lengths)
    return [reference.row_mask(length, chain, width, visible and visible[row], window) for row, length in rows]


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("queries", [1, 2, 5, 20])
@pytest.mark.parametrize("lengths", [[0], [1], [40], [7, 7], [9, 2, 40]])
def test_cut_equals_the_loops(lengths: list[int], queries: int, window: int | None) -> None:
    """Would catch: one token too many or too few, in a template of any size."""
    mask = ChainMasks(CPU, window).cut(lengths, queries)
    expected = drawn(lengths, queries, window)
    assert mask.expand(len(lengths), -1, -1, -1)[:, 0].int().tolist() == expected


@st.composite
def any_call(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 50), min_size=batch, max_size=batch))
    prompt = draw(st.integers(1, min(lengths)))
    paddings = [draw(st.integers(0, prompt - 1)) for _ in range(batch)]
    visible = [[slot >= padding for slot in range(prompt)] for padding in paddings]
    return {"lengths": lengths, "queries": draw(st.integers(1, 40)), "visible": draw(st.sampled_from([None, visible]))}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(any_call(), min_size=2, max_size=4), st.sampled_from([None, 1, 4, 30]))
def test_cut_does_not_depend_on_earlier_calls(calls: list[dict[str, Any]], window: int | None) -> None:
    """Would catch: a template that grows in one direction and loses its place, or padding written into it."""
    masks = ChainMasks(CPU, window)
    for call in calls:
        visible = None if call["visible"] is None else torch.tensor(call["visible"])
        mask = masks.cut(call["lengths"], call["queries"], visible)
        expected = drawn(**call, window=window)
        assert mask.expand(len(expected), -1, -1, -1)[:, 0].int().tolist() == expected


def test_cut_is_one_view_for_equally_long_rows_without_padding() -> None:
    masks = ChainMasks(CPU)
    first, second = masks.cut([5, 5, 5], 3), masks.cut([6, 6, 6], 3)
    assert first.shape == (1, 1, 3, 8) and second.shape == (1, 1, 3, 9)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@pytest.mark.parametrize("window", [None, 1, 4, 5])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("lengths", [[0], [4], [4, 4], [4, 3]])
def test_is_all_seen_agrees_with_the_mask(lengths: list[int], queries: int, window: int | None) -> None:
    masks = ChainMasks(CPU, window)
    assert masks.is_all_seen(lengths, queries) == bool(masks.cut(lengths, queries).all())
