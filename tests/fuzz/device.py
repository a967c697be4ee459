"""The device that the models of all cases are on."""

import torch

_device = torch.device("cpu")


def device() -> torch.device:
    """Of models and prompts."""
    return _device


def use_device(name: str) -> None:
    """Put the models of all later cases on this device. Kernels that round to fewer bits are switched off."""
    global _device
    _device = torch.device(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def seed(number: int) -> None:
    """Seed the random generator that `generate` draws from; see `tests.helpers.comparison.seed`."""
    if _device.type == "cuda":
        torch.cuda.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def random_state() -> torch.Tensor:
    """The state of the random generator that `generate` draws from."""
    return torch.cuda.get_rng_state(_device) if _device.type == "cuda" else torch.get_rng_state()
