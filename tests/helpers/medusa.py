"""Medusa heads for tiny models: random ones, and ones that were fitted to the model's own output."""

from typing import Any

import torch

from hf_specgen.heads import MedusaHeads
from hf_specgen.targets.model_parts import output_matrix
from tests.fuzz.heads import inputs_of, medusa_heads
from tests.helpers.comparison import plain_output


def random_heads(model: Any, num_heads: int = 3, **shape: Any) -> MedusaHeads:
    """New heads with perturbed weights."""
    generator = torch.Generator().manual_seed(2)
    heads = MedusaHeads.from_target(model, num_heads=num_heads, **shape)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return heads.eval()


def hidden_states(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[batch, length, hidden]` what the output matrix reads at each position of a text."""
    return inputs_of(output_matrix(model), model, ids, mask)


def fitted_heads(
    model: Any, inputs: dict[str, torch.Tensor], num_heads: int = 3, *, reads_path: bool = False, **sampling: Any
) -> MedusaHeads:
    """Heads that often predict the output for these inputs and the seed of `plain_and_speculative`."""
    text, _ = plain_output(model, inputs, max_new_tokens=40, eos_token_id=None, **sampling)
    start = inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(text[:, start:])], dim=1)
    return medusa_heads(model, text, mask, num_heads, reads_path, start=start - 1)
