"""Tests that cuDNN's attention is off in passes on a GPU, and on again afterwards."""

import threading
from collections.abc import Iterator

import pytest
import torch

from hf_specgen.targets.attention import without_cudnn_attention

kernels, GPU = torch.backends.cuda, torch.device("cuda")


@pytest.fixture(autouse=True)
def kernels_restored() -> Iterator[None]:
    """PyTorch's settings are restored."""
    before = kernels.cudnn_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    kernels.enable_cudnn_sdp(True)
    yield
    kernels.enable_cudnn_sdp(before[0])
    kernels.enable_mem_efficient_sdp(before[1])
    kernels.enable_math_sdp(before[2])


def test_it_is_off_inside_and_on_again_after_an_exception() -> None:
    with pytest.raises(KeyError), without_cudnn_attention(GPU):
        assert not kernels.cudnn_sdp_enabled()
        raise KeyError
    assert kernels.cudnn_sdp_enabled()


def test_what_a_user_has_turned_off_stays_off() -> None:
    kernels.enable_cudnn_sdp(False)
    with without_cudnn_attention(GPU):
        pass
    assert not kernels.cudnn_sdp_enabled()


def test_it_stays_on_where_no_other_kernel_may_be_used() -> None:
    kernels.enable_mem_efficient_sdp(False)
    kernels.enable_math_sdp(False)
    with without_cudnn_attention(GPU):
        assert kernels.cudnn_sdp_enabled()


def test_nothing_is_switched_on_a_cpu() -> None:
    with without_cudnn_attention(torch.device("cpu")):
        assert kernels.cudnn_sdp_enabled()


def test_overlapping_passes_of_two_threads_restore_it_when_the_last_one_ends() -> None:
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with without_cudnn_attention(GPU):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=call)
    with without_cudnn_attention(GPU):
        thread.start()
        assert entered.wait(10)
    assert not kernels.cudnn_sdp_enabled()
    leave.set()
    thread.join()
    assert kernels.cudnn_sdp_enabled()
