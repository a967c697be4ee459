"""Heads that know a text: fitted to what plain `generate` wrote, so that their drafts are often accepted."""

from typing import Any

import numpy as np
import torch
from torch import nn

from hf_specgen.candidates.recycling import RecyclingTable
from hf_specgen.heads import MedusaHeads
from hf_specgen.targets.model_parts import decoder_layers, output_matrix
from hf_specgen.verification.top_tokens import TopTokens

PATH_WEIGHT = 0.01
"""Size of the weights with which heads read the path before their token: enough to change a draft."""


def medusa_heads(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, num_heads: int = 3, reads_path: bool = False, start: int = 0
) -> MedusaHeads:
    """Medusa heads: output matrices by ridge regression from its states to the tokens h + 2 places on.

    They learn from the text behind `start`.
    """
    matrix = output_matrix(model)
    states = inputs_of(matrix, model, ids, mask)
    heads = MedusaHeads.from_target(
        model, num_heads=num_heads, own_outputs=True, reads_token=reads_path, reads_path=reads_path
    )
    for token_map in heads.token_maps if reads_path else ():
        nn.init.normal_(
            token_map.weight, std=PATH_WEIGHT, generator=torch.Generator(matrix.weight.device).manual_seed(0)
        )
    for head in range(num_heads):
        distance = head + 2
        weight = _ridge(states[:, start:-distance], ids[:, start + distance :], matrix.weight.shape[0])
        heads.lm_heads[head].weight.data = weight.to(matrix.weight)
    return heads.eval()


def exit_adapter(model: Any, exit_layer: int, ids: torch.Tensor, mask: torch.Tensor) -> nn.Module | None:
    """A linear layer that reads the next token of a text from the state after its first layers, if that is a vector."""
    states = inputs_of(decoder_layers(model)[exit_layer], model, ids, mask)
    if states.dim() != 3:
        return None
    weight = _ridge(states[:, :-1], ids[:, 1:], output_matrix(model).weight.shape[0]).to(states)
    adapter = nn.Linear(*weight.T.shape, bias=False)
    adapter.weight.data = weight
    return adapter.eval()


def recycling_table(model: Any, ids: torch.Tensor) -> RecyclingTable:
    """A table in which the successors of a text's tokens are those of the text."""
    vocab_size = output_matrix(model).weight.shape[0]
    table = RecyclingTable(vocab_size)
    before, after = (part.flatten().cpu().numpy() for part in (ids[:, :-1], ids[:, 1:]))
    successors = np.stack([after, (after + 1) % vocab_size], axis=1)
    table.update(TopTokens(before, successors, np.tile([0.6, 0.2], (len(after), 1))))
    return table


def inputs_of(module: nn.Module, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[batch, length, hidden]` what a module reads while the model reads a text."""
    read: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read.append(args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, position_ids=positions)
    finally:
        handle.remove()
    return read[0].clone()


def _ridge(states: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    x = states.flatten(0, 1).double()
    y = nn.functional.one_hot(tokens.flatten(), vocab).double()
    solution = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device), x.T @ y)
    return 20 * solution.T
