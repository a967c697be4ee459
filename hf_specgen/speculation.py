"""`speculate()`, a decoding method for `generate(custom_generate=…)`: checks a call, then runs the decoding loop."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.default import default_candidates
from hf_specgen.candidates.native import NativeCandidates
from hf_specgen.decoding import speculative_decode
from hf_specgen.depth import Policy
from hf_specgen.monitoring.monitor import Monitor
from hf_specgen.speculative_output import EncoderDecoderSpeculativeOutput, SpeculativeOutput
from hf_specgen.state import Call
from hf_specgen.targets.compilable import Compile, check_setting
from hf_specgen.targets.encoder import check_cache
from hf_specgen.targets.packable import check_packable, is_packable
from hf_specgen.targets.support import check_model
from hf_specgen.verification import CoupledVerifier, RejectionVerifier, TypicalVerifier, Verifier

VERIFIERS = {"exact": CoupledVerifier, "rejection": RejectionVerifier, "typical": TypicalVerifier}
ALIASES = {"coupled": "exact"}
"""Earlier names of verification modes, still accepted."""


class Speculation:
    """A decoding method for `generate(custom_generate=…)`; made by `speculate`."""

    def __init__(
        self,
        candidates: Candidates,
        verification: str | Verifier,
        streamer: BaseStreamer | None = None,
        policy: Policy | None = None,
        monitor: Monitor | None = None,
        compile: Compile = False,
        pack_weights: bool | None = None,
    ):
        self.candidates, self.verification, self.streamer = candidates, verification, streamer
        self.policy, self.monitor, self.compile, self.pack_weights = policy, monitor, compile, pack_weights
        check_setting(compile)
        _as_verifier(verification)
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy such as Schedule({{1: 8, 4: 4, 16: 0}}), got {policy!r}")
        if monitor is not None and not isinstance(monitor, Monitor):
            raise TypeError(f"monitor must be a Monitor such as SpeculationMonitor(), got {monitor!r}")

    def checking(self, model: PreTrainedModel) -> None:
        """Called when `generate` has prepared a call, before it is checked."""

    def starting(self, call: Call) -> None:
        """Called when a call has passed all checks, before the first forward pass."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        inputs_tensor: torch.Tensor | None = None,  # `generate` passes the encoder's input under this name
        **model_kwargs: Any,
    ) -> SpeculativeOutput | EncoderDecoderSpeculativeOutput | torch.Tensor:
        assert generation_config is not None
        # A streamer given to `generate` has received the prompt already; that of `speculate` has not.
        streamer = compat.local_of_generate("streamer")
        if streamer is not None and self.streamer is not None:
            raise ValueError("both generate(streamer=…) and speculate(streamer=…) were given; leave one out")
        self.checking(model)
        check_model(model)
        _check_call(model, input_ids, generation_config, model_kwargs)
        if self.pack_weights:
            check_packable(model)
        if self.compile is True and self.pack_weights is False and any(map(is_packable, model.modules())):
            raise ValueError("compile=True packs weights on a CPU; leave it or pack_weights=False out")

        def start(call: Call) -> None:
            self.starting(call)
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())

        return speculative_decode(
            model,
            input_ids,
            candidates=self.candidates,
            verifier=_as_verifier(self.verification),
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer if self.streamer is None else self.streamer,
            policy=self.policy,
            monitor=self.monitor,
            on_start=start,
            inputs_tensor=inputs_tensor,
            compile=self.compile,
            pack_weights=self.pack_weights,
            **model_kwargs,
        )


def speculate(
    candidate_generator: CandidateGenerator | Literal["auto"],
    *,
    verification: str | Verifier = "exact",
    streamer: BaseStreamer | None = None,
    policy: Policy | None = None,
    monitor: Monitor | None = None,
    compile: Compile = False,
    pack_weights: bool | None = None,
) -> Speculation:
    """A decoding method for `generate(custom_generate=…)`, which needs no patched `generate`.

    Args:
        candidate_generator: proposes draft tokens, e.g. `NgramCandidates()`; "auto" for `CombinedCandidates()`, the
            best strategy that needs neither a model nor training.
        verification: "exact" (the tokens of plain `generate`, also when sampling with a seed), "rejection" (the same
            distribution, but not the same seed), "typical" (LOSSY: accepts what the target finds plausible), or a
            `Verifier`.
        streamer: receives the prompt, then every confirmed column, as a streamer given to `generate` does.
        policy: chooses the draft depth of this call, step by step; the strategy's own policy if left out.
        monitor: receives every step.
        compile: True compiles the target's forward passes with `torch.compile`, once per model and shape; takes 10 to
            60 seconds for each of a few shapes. Fused kernels may round differently from plain decoding. On a CPU also
            takes the memory of `pack_weights`. "graphs" captures the passes as CUDA graphs instead, in a second each.
        pack_weights: on a CPU in float32 or bfloat16, keep a second copy of the weights in the layout that matrix
            multiplication reads, for the target and the drafter: forward passes over a few tokens take about half as
            long, and may round differently from plain decoding. By default if the linear layers of the target take at
            most 1 GiB; True for any size, False for never.

    Returns:
        a callable for `custom_generate=`.

    Raises:
        ValueError, TypeError: for an unknown verification, or something that is no candidate generator, policy or
            monitor.

    Example:
        >>> from hf_specgen import NgramCandidates, speculate
        >>> method = speculate(NgramCandidates(k=5))  # model.generate(**inputs, custom_generate=method)
    """
    return Speculation(
        as_candidates(candidate_generator), verification, streamer, policy, monitor, compile, pack_weights
    )


def as_candidates(generator: Any) -> Candidates:
    """The strategy that a user gave: one of ours, a generator of Transformers, or "auto".

    Raises:
        TypeError: for anything else.
    """
    if isinstance(generator, str) and generator == "auto":
        return default_candidates()
    if isinstance(generator, Candidates):
        return generator
    if isinstance(generator, CandidateGenerator):
        return NativeCandidates(generator)
    expected = '"auto" or a CandidateGenerator such as NgramCandidates(k=5)'
    raise TypeError(f"candidate_generator must be {expected}, got {generator!r}")


def _as_verifier(verification: Any) -> Verifier:
    if isinstance(verification, Verifier):
        return verification
    if isinstance(verification, str) and ALIASES.get(verification, verification) in VERIFIERS:
        return VERIFIERS[ALIASES.get(verification, verification)]()
    modes = ", ".join(map(repr, VERIFIERS))
    raise ValueError(f"verification must be {modes} or a Verifier, got {verification!r}")


def _remedy(mode: GenerationMode) -> str:
    """What to change in a call that asks for a decoding method other than greedy search, sampling and beam search."""
    settings = {
        GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
        GenerationMode.DOLA_GENERATION: "dola_layers",
        GenerationMode.ASSISTED_GENERATION: "assistant_early_exit",
    }
    return f"leave out {settings[mode]}=" if mode in settings else "choose one of them"


def _check_call(
    model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Raise for everything that would otherwise be ignored or go wrong later."""
    embeddings = "decoder_inputs_embeds" if model.config.is_encoder_decoder else "inputs_embeds"
    if model_kwargs.get(embeddings) is not None:
        raise ValueError("candidate_generator= needs the prompt as input_ids, not as " + embeddings)
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(
            f"the prompt is empty: input_ids has shape {tuple(input_ids.shape)}; give at least one token per row"
        )
    mode = config.get_generation_mode()
    if config.prompt_lookup_num_tokens is not None:
        raise ValueError("both candidate_generator= and prompt_lookup_num_tokens= were given; leave one out")
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        remedy = f"set num_beams=1 instead of {config.num_beams}" if config.num_beams > 1 else _remedy(mode)
        raise ValueError(
            f"candidate_generator= works with greedy search and sampling, not with {mode.value}; {remedy} or leave "
            "candidate_generator out"
        )
    if not model_kwargs.get("use_cache", True):
        raise ValueError("candidate_generator= needs the key/value cache; leave out use_cache=False")
    if config.output_attentions or config.output_hidden_states:
        raise ValueError(
            "output_attentions and output_hidden_states are not available with candidate_generator=; leave them out"
        )
    position_ids = model_kwargs.get("position_ids")
    if model.config.is_encoder_decoder:
        check_cache(model_kwargs.get("past_key_values"), type(model).__name__)
        return
    if position_ids is None or position_ids.dim() not in (2, 3):
        raise ValueError(
            "candidate_generator= works with models that take position_ids of shape [batch, tokens] or "
            f"[axes, batch, tokens], got {'none' if position_ids is None else tuple(position_ids.shape)}"
        )
