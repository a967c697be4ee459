"""Keeps cuDNN's attention out of the forward passes of a call on a GPU.

cuDNN builds an execution plan for each new pair of query and key lengths. On an H100, where PyTorch prefers cuDNN in
half precision, that takes 20 to 60 ms, while a pass of 32 layers takes 24 ms; and nearly every step of speculative
decoding has a pair of lengths that was not there before. PyTorch's other kernels need no plan.

Which kernels may be used is a setting of the process. The first call that runs turns cuDNN's attention off, the last
one turns it on again; another thread that runs a model meanwhile uses PyTorch's other kernels too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()


class _Calls:
    """The calls of all threads that run without cuDNN's attention.

    Attributes:
        running: how many there are.
        switched: whether the first of them turned it off.
    """

    running, switched = 0, False


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """In this context attention on a GPU uses PyTorch's other kernels, unless they are all turned off.

    Example:
        >>> import torch
        >>> with without_cudnn_attention():
        ...     switched_off = not torch.backends.cuda.cudnn_sdp_enabled()
        >>> switched_off or not torch.cuda.is_initialized()
        True
    """
    if not torch.cuda.is_initialized():
        yield
        return
    with _lock:
        _Calls.running += 1
        if _Calls.running == 1 and _is_dispensable():
            torch.backends.cuda.enable_cudnn_sdp(False)
            _Calls.switched = True
    try:
        yield
    finally:
        with _lock:
            _Calls.running -= 1
            if _Calls.running == 0 and _Calls.switched:
                torch.backends.cuda.enable_cudnn_sdp(True)
                _Calls.switched = False


def _is_dispensable() -> bool:
    """Whether cuDNN's attention is turned on, and another kernel that works for every model."""
    kernels = torch.backends.cuda
    return kernels.cudnn_sdp_enabled() and (kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled())
