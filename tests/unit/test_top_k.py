"""The largest values of rows by blocks, against `torch.topk`."""

import pytest
import torch

from hf_specgen.top_k import BLOCK, MIN_ROW, top_k


@pytest.mark.parametrize("size", [10, MIN_ROW, MIN_ROW + 1, MIN_ROW + BLOCK - 1])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_values_as_by_sorting(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Would catch: a value of the last, incomplete block that is left out, or an index of another block."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(*shape, size, generator=generator).to(dtype)
    values[..., -1] = 100.0
    values[..., size // 2] = 50.0
    largest, indices = top_k(values, 8)
    assert torch.equal(largest, values.topk(8).values)
    assert torch.equal(values.gather(-1, indices), largest), "of equal values either may come first"


def test_several_values_of_one_block() -> None:
    """Would catch: one value for each block."""
    values = torch.zeros(MIN_ROW)
    values[300:308] = torch.arange(8.0, 0.0, -1)
    assert top_k(values, 8)[1].tolist() == list(range(300, 308))
