"""Medusa heads for tiny models: random ones, and ones that were fitted to the model's own output."""

from typing import Any

import torch

from hf_specgen.heads import MedusaHeads
from hf_specgen.targets.model_parts import output_matrix
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
    read: list[torch.Tensor] = []
    handle = output_matrix(model).register_forward_pre_hook(lambda module, arguments: read.append(arguments[0]))
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    handle.remove()
    return read[0]


def fitted_heads(model: Any, inputs: dict[str, torch.Tensor], num_heads: int = 3, **sampling: Any) -> MedusaHeads:
    """Heads that often predict the output for these inputs and the seed of `plain_and_speculative`.

    Output matrices by ridge regression from the hidden states of that output to the tokens h + 2 places later.
    """
    text, _ = plain_output(model, inputs, max_new_tokens=40, eos_token_id=None, **sampling)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(text[:, inputs["input_ids"].shape[1] :])], dim=1)
    states = hidden_states(model, text, mask)
    start = inputs["input_ids"].shape[1] - 1
    heads = MedusaHeads.from_target(model, num_heads=num_heads, own_outputs=True)
    vocab = heads.config.vocab_size
    for head in range(num_heads):
        x = states[:, start : -(head + 2)].flatten(0, 1).double()
        y = torch.nn.functional.one_hot(text[:, start + head + 2 :].flatten(), vocab).double()
        solution = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=torch.double), x.T @ y)
        heads.lm_heads[head].weight.data = 20 * solution.T.float()
    return heads.eval()
