"""The argmax over a vocabulary is torch's, also where numpy computes it."""

import pytest
import torch

from hf_specgen.verification.sampling import INVALID, argmax, argmax_lists, exponential_race


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 17, 501), (3, 2, 64), (4, 1)])
def test_argmax_of_scores_with_ties_is_that_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Would catch: the last of equal maxima, another dimension."""
    scores = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
    assert argmax_lists(scores) == scores.argmax(dim=-1).tolist()


@pytest.mark.parametrize("values", [(1.0, float("nan"), 9.0, float("nan")), (-float("inf"),) * 4, (-0.0, 0.0, -0.0)])
def test_argmax_of_special_values_is_that_of_torch(values: tuple[float, ...]) -> None:
    scores = torch.tensor([values])
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
    assert argmax_lists(scores) == scores.argmax(dim=-1).tolist()


def test_argmax_of_scores_with_gradients_is_that_of_torch() -> None:
    """Would catch: numpy asked for a tensor that autograd tracks, which raises."""
    scores = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
    assert argmax(scores).tolist() == argmax_lists(scores) == [1]


def test_argmax_of_a_view_reads_the_view_only() -> None:
    """Would catch: the memory of a slice read as if it were contiguous."""
    scores = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(2))[:, 1::2, 3:30]
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))


def test_exponential_race_with_nan_is_invalid() -> None:
    weights = torch.tensor([[[0.1, 0.9], [0.5, float("nan")]]])
    assert exponential_race(weights, torch.ones(1, 2, 2)).tolist() == [[1, INVALID]]
