"""Tests that cuDNN's attention is off during calls on a GPU, and on again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from hf_specgen.targets.cudnn_attention import without_cudnn_attention

kernels = torch.backends.cuda


@pytest.fixture(autouse=True)
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that uses CUDA, as far as this module can tell; PyTorch's settings are restored."""
    before = kernels.cudnn_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    kernels.enable_cudnn_sdp(True)
    yield
    kernels.enable_cudnn_sdp(before[0])
    kernels.enable_mem_efficient_sdp(before[1])
    kernels.enable_math_sdp(before[2])


def test_it_is_off_inside_and_on_again_after_an_exception() -> None:
    with pytest.raises(KeyError), without_cudnn_attention():
        assert not kernels.cudnn_sdp_enabled()
        raise KeyError
    assert kernels.cudnn_sdp_enabled()


def test_what_a_user_has_turned_off_stays_off() -> None:
    kernels.enable_cudnn_sdp(False)
    with without_cudnn_attention():
        pass
    assert not kernels.cudnn_sdp_enabled()


def test_it_stays_on_where_no_other_kernel_may_be_used() -> None:
    kernels.enable_mem_efficient_sdp(False)
    kernels.enable_math_sdp(False)
    with without_cudnn_attention():
        assert kernels.cudnn_sdp_enabled()


def test_nothing_is_switched_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with without_cudnn_attention():
        assert kernels.cudnn_sdp_enabled()


def test_overlapping_calls_of_two_threads_restore_it_when_the_last_one_ends() -> None:
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with without_cudnn_attention():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=call)
    with without_cudnn_attention():
        thread.start()
        assert entered.wait(10)
    assert not kernels.cudnn_sdp_enabled()
    leave.set()
    thread.join()
    assert kernels.cudnn_sdp_enabled()
