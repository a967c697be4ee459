"""`Call`: the settings of one `generate` call, as candidates, verifier, policy and monitor receive them in `start`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from hf_specgen.state import GenerationState

Prediction = str | Sequence[int] | Sequence[str | Sequence[int] | None] | torch.Tensor
"""The expected output: text or token ids, for all rows of a call; or one such entry for each row, None for none."""
Compile = Literal["auto", "graphs", False] | None
"""Whether forward passes are captured as CUDA graphs: on a GPU where it works, always (or an error), or never."""


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder of a call's target reads, with one row for each row of the call.

    Args:
        values: the main input of the encoder: token ids `[batch, tokens]`, or features of audio or images.
    """

    values: torch.Tensor
    arguments: dict[str, Any]
    outputs: Any

    @classmethod
    def of_call(cls, values: torch.Tensor | None, batch: int, model_kwargs: dict[str, Any]) -> EncoderInput | None:
        """The encoder's input in a call; None if there is no encoder, or `generate` does not pass on what it read."""
        outputs = model_kwargs.get("encoder_outputs")
        # In place of ids that were not given, `generate` fills in -100.
        if values is None or outputs is None or (not values.is_floating_point() and bool((values < 0).any())):
            return None
        others = ("encoder_outputs", "past_key_values", "use_cache", "logits_to_keep")
        arguments = {
            name: value
            for name, value in model_kwargs.items()
            if name not in others and not name.startswith("decoder_") and value is not None
        }
        return cls(values.repeat_interleave(batch // len(values), dim=0), arguments, outputs)

    def texts(self, vocab_size: int) -> list[list[int]]:
        """The token ids that the encoder read, by row and without padding, as far as the decoder has such tokens."""
        if self.values.dim() != 2 or self.values.is_floating_point():
            return [[] for _ in range(len(self.values))]
        mask = self.arguments.get("attention_mask")
        kept = torch.ones_like(self.values) if mask is None or mask.shape != self.values.shape else mask
        kept = kept.bool() & (self.values >= 0) & (self.values < vocab_size)
        return [ids[keep].tolist() for ids, keep in zip(self.values, kept, strict=True)]


@dataclass(frozen=True)
class DraftingSettings:
    """What a policy or monitor may know of the strategy of a call.

    Args:
        k: maximum depth of a draft.
        key: identifies the strategy for what is remembered between calls, see `Candidates.profile_key`.
        negligible_cost: whether drafting takes a negligible time.
        has_free_drafts: whether some drafts take a negligible time, as in a combination with n-grams.
        sizes_trees: whether the strategy sizes each draft itself, so that a policy only decides whether to draft.
        name: the strategy as text, for log lines.
    """

    k: int = 64
    key: tuple[str | int | float | bool, ...] = ("any",)
    negligible_cost: bool = False
    sizes_trees: bool = False
    name: str = ""
    has_free_drafts: bool = False


@dataclass(frozen=True)
class Call:
    """One `generate` call: what verifier, policy and monitor receive in `start`. Read-only.

    Args:
        model: the target; None in simulations and inside Transformers' own assisted decoding.
        state: the tokens of every row, updated by every step.
        config: the generation config, as prepared by `generate`.
        drafting: settings of the strategy in use.
        logits_processor: the logits processors of the call, as prepared by `generate`.
        keeps_scores, keeps_logits: whether the caller asked for the processed scores, and for the raw logits.
        encoder: what the encoder of an encoder-decoder target reads; None for other targets.
        compiled: whether the target's forward passes after the prefill are captured as graphs.
        remembers: whether acceptance observed in earlier calls may be used, and that of this call kept.
        prediction: the expected output, see `NgramCandidates`.
        grammar_drafts: whether drafts obey the grammars of logits processors, see `hf_specgen.candidates.grammar`.
        seed: of the noise that the tokens are sampled with; None for torch's global random generator.
    """

    model: PreTrainedModel | None
    state: GenerationState
    config: GenerationConfig
    drafting: DraftingSettings = DraftingSettings()
    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    keeps_scores: bool = False
    keeps_logits: bool = False
    encoder: EncoderInput | None = None
    compiled: Compile = False
    remembers: bool = True
    prediction: Prediction | None = None
    grammar_drafts: bool = True
    seed: int | None = None

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self.config.do_sample)

    @property
    def temperature(self) -> float:
        """The sampling temperature; 0.0 for greedy decoding."""
        temperature = self.config.temperature
        return float(1.0 if temperature is None else temperature) if self.do_sample else 0.0

    @property
    def max_new_tokens(self) -> float:
        """How many tokens the call may generate per row; may be infinite."""
        return self.state.max_length - self.state.prompt_length

    @property
    def context_length(self) -> int:
        """Tokens in the longest row so far, prompt included."""
        rows = zip(self.state.prompts, self.state.generated, strict=True)
        return max(len(prompt) + len(text) for prompt, text in rows)

    def encoder_texts(self) -> list[list[int]]:
        """The token ids that the target's encoder read, by row; empty without an encoder, and for audio or images."""
        if self.encoder is None or self.model is None:
            return [[] for _ in range(self.state.batch)]
        embeddings = cast(Any, self.model).get_output_embeddings()
        return self.encoder.texts(0 if embeddings is None else len(embeddings.weight))
