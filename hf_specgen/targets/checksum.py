"""Computes a checksum of the weights of a layer, by which changed weights are noticed."""

from __future__ import annotations

import zlib

import torch

CHECKSUM_BLOCK = 63
"""Integers in a block. An odd number: if the same bit changes in all of them, their sum changes modulo 2**64."""


def checksum(weight: torch.Tensor) -> int:
    """A checksum of the sums of blocks of weights, read as integers; takes less time than multiplying with them.

    Weights that change places within a block have the same checksum; PyTorch's version shows those, except through
    `weight.data`.
    """
    flat, values = weight.reshape(-1), 8 // weight.element_size()  # weights in an integer of eight bytes
    flat = flat.clone() if flat.storage_offset() % values else flat  # a view as such integers needs an aligned offset
    numbers = flat[: len(flat) // values * values].view(torch.int64)
    sums = numbers[: len(numbers) // CHECKSUM_BLOCK * CHECKSUM_BLOCK].view(-1, CHECKSUM_BLOCK).sum(dim=1)
    rest = torch.cat([numbers[len(sums) * CHECKSUM_BLOCK :], flat[values * len(numbers) :].view(torch.uint8)])
    return zlib.crc32(rest.numpy().data, zlib.crc32(sums.numpy().data))
