"""Masks of chain drafts are the masks that loops draw."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_specgen.targets.masks import chain_mask
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
def test_chain_mask_equals_the_loops(lengths: list[int], queries: int, window: int | None) -> None:
    """Would catch: one token too many or too few."""
    mask = chain_mask(lengths, queries, CPU, window)
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(any_call(), st.sampled_from([None, 1, 4, 30]))
def test_chain_mask_with_padding_equals_the_loops(call: dict[str, Any], window: int | None) -> None:
    """Would catch: padding that is seen, or hidden in another row."""
    visible = None if call["visible"] is None else torch.tensor(call["visible"])
    mask = chain_mask(call["lengths"], call["queries"], CPU, window, visible)
    expected = drawn(**call, window=window)
    assert mask.expand(len(expected), -1, -1, -1)[:, 0].int().tolist() == expected


def test_chain_mask_is_one_for_equally_long_rows_without_padding() -> None:
    assert chain_mask([5, 5, 5], 3, CPU).shape == (1, 1, 3, 8)
