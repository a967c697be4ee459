"""What a strategy needs from the target's forward passes, and the `Target` class that provides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.targets.captured_passes import captured_passes
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.encoder import takes_positions
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.replay import AlignedTexts
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

OUTPUT_STATE = -1
"""Stands for the input of the output matrix (after the final norm)."""


@dataclass(frozen=True)
class TargetRequirements:
    """What a strategy needs from the target's forward passes: hidden states, or layers that run separately.

    Args:
        aux_hidden_state_layers: indices into Transformers' `hidden_states`, whose states are captured; `OUTPUT_STATE`
            for the input of the output matrix, which for a
            prompt may be the last position alone.
        exit_layer: number of first layers that run separately to draft; None if not needed.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    exit_layer: int | None = None

    def __or__(self, other: TargetRequirements) -> TargetRequirements:
        """Both requirements together; raises for two different exit layers, or an exit layer beside hidden states."""
        exits = {self.exit_layer, other.exit_layer} - {None}
        aux_layers = tuple(dict.fromkeys(self.aux_hidden_state_layers + other.aux_hidden_state_layers))
        if len(exits) > 1 or (exits and aux_layers):
            raise ValueError(
                "these strategies run the target in different ways (an early exit, hidden states); keep one of them"
            )
        return TargetRequirements(aux_layers, exits.pop() if exits else None)


def check_decoder_only(model: PreTrainedModel, strategy: str) -> None:
    """Raise if a strategy that reads hidden states or divides the layers is used with an encoder-decoder model."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{strategy} does not work with {type(model).__name__}: it needs hidden states or an early exit, which are "
            "implemented for decoder-only models, whose layers read nothing beside the text; with an encoder-decoder "
            "use NgramCandidates, RecyclingCandidates or DraftModelCandidates"
        )


def make_target(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    compile: Compile = False,
) -> Target:
    """The target of one call, with captured passes if `compile` is "graphs"; raises if it cannot be made."""
    if "encoder_outputs" in model_kwargs:
        if requirements.aux_hidden_state_layers or requirements.exit_layer is not None:
            check_decoder_only(model, "this strategy")
        if compile:
            raise ValueError('compile="graphs" works with decoder-only models; leave it out for encoder-decoders')
        target_class = Target if takes_positions(model) else CommonLengthTarget
        return target_class(model, input_ids, config, model_kwargs)
    if compile and requirements.exit_layer is not None:
        raise ValueError(
            'compile="graphs" does not work with strategies that run a part of the target\'s layers (layer skip); '
            "leave it out, or use another candidate generator"
        )
    captured = captured_passes(model) if compile else None
    if requirements.exit_layer is not None:
        return EarlyExitTarget(model, input_ids, config, model_kwargs, requirements.exit_layer)
    if requirements.aux_hidden_state_layers:
        return HiddenStateTarget(model, input_ids, config, model_kwargs, requirements.aux_hidden_state_layers, captured)
    return Target(model, input_ids, config, model_kwargs, captured)


class CommonLengthTarget(Target):
    """A `Target` whose rows have one common length in the cache, for models that take no positions; verifies chains."""

    max_row_skew = 8
    """A row further ahead of the slowest one is left out of passes until then. With 8 rows and 85% of the draft tokens
    accepted, 80 tokens per row took 31 passes with a skew of 4, and 26 with 8, 16 and 32; the tokens processed per row
    were 222, 244, 408 and 459."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._rows = AlignedTexts(self.batch)
        self._has_pending = True

    @property
    def verifies_chains_only(self) -> bool:
        return True

    @property
    def supports_prefill_drafts(self) -> bool:
        return False

    def forward(
        self, tree: DraftTree, pending: Sequence[int] | torch.Tensor, active: Sequence[bool] | None = None
    ) -> torch.Tensor:
        self._has_pending = True
        drafts = [tokens[: len(parents)] for tokens, parents in zip(tree.tokens.tolist(), tree.parents, strict=True)]
        first = torch.as_tensor(pending).tolist()
        chains = [[token, *draft] for token, draft in zip(first, drafts, strict=True)]
        return self._replay(chains, 1 + tree.nodes, active)

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool] | None = None) -> torch.Tensor:
        self._has_pending = False
        return self._replay([tokens[tree.nodes - new :] for tokens in tree.tokens.tolist()], new, active)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        self._rows.commit([0 if path is None else self._has_pending + len(path) for path in paths])

    def rewind(self, read: Sequence[int]) -> None:
        self._rows.cut(read)

    def finish(self) -> Any:
        """Return the cache, once everything is in it; all rows have as many tokens."""
        lengths = [len(text) for text in self._rows.texts]
        if self._rows.cached != lengths:
            self._replay([[]] * self.batch, 1, None)
        self._set_length(max(lengths))
        return super().finish()

    def _set_length(self, length: int) -> None:
        """Cut the cache to the prompt and so many tokens after it."""
        self.cache.set_lengths([slot + length for slot in self._layout.prompt_slots])

    def _replay(self, new: list[list[int]], results: int, active: Sequence[bool] | None) -> torch.Tensor:
        """One pass over uncached tokens and `new` ones: `[batch, results, vocab]` logits after each of the new."""
        present = set(self.rows)
        takes_part = [row in present and (active is None or active[row]) for row in range(self.batch)]
        start, reads = self._rows.next_pass(
            [tokens if takes else None for tokens, takes in zip(new, takes_part, strict=True)]
        )
        self._set_length(start)
        # Padding on the right is overwritten by the next pass.
        filled = [tokens or [0] for tokens in reads]
        chains = DraftTree.chains([tokens[1:] for tokens in filled])
        inputs = {"input_ids": self._step_tokens(chains, [tokens[0] for tokens in filled])}
        logits = self._layout.scatter(self._run(self.model, chains, inputs, takes_part).logits, self.batch)
        first = torch.tensor([len(tokens) - len(added) for tokens, added in zip(filled, new, strict=True)])
        last = torch.tensor([len(tokens) - 1 for tokens in filled])
        places = (first[:, None] + torch.arange(results)).clamp(min=0).minimum(last[:, None]).to(logits.device)
        return logits[torch.arange(self.batch, device=logits.device)[:, None], places]
