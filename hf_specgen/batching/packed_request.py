"""A request of continuous batching: a call of its own, whose tokens are processed in packed steps of all requests.

`Request` has the `DecodingSteps` of a `generate` call with one row. In place of a `Target` and an `OutputCollector`
they get a `RequestTarget` and `RequestOutputs`: passes and cache are those of Transformers, which returns the tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.batching import transformers_batching
from hf_specgen.call import Call, GenerationState
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.decoding import DecodingSteps
from hf_specgen.depth import FixedDepth
from hf_specgen.settings import Settings
from hf_specgen.targets.hidden_states import StepStates
from hf_specgen.targets.row_layout import UNLIMITED
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.processors import ScoreProcessors

logger = logging.getLogger("hf_specgen")


@dataclass(frozen=True)
class RequestContext:
    """What all requests of a batch processor share."""

    model: PreTrainedModel  # the target
    config: GenerationConfig  # of the manager
    settings: Settings  # of each call
    seed: int  # request ``req_<i>`` is sampled with `seed + i`
    aux_layers: Sequence[int]  # whose hidden states drafters read
    last_position: int  # that the model and its cache can process
    logits_processors: Sequence[Any]  # of the manager, which applies them to the target's logits
    verifies_chains_only: bool  # whether the attention takes no mask


class RequestTarget:
    """The target for the steps and the drafter of one request: a `DecodingTarget` whose passes are packed steps.

    The cache is that of Transformers, which `PackedSteps` rolls back. The hidden states and the accepted path of each
    step are kept here.
    """

    def __init__(self, context: RequestContext, prompt_length: int):
        self.device = compat.input_device(context.model)
        self.rows = [0]
        self.first_positions = (prompt_length,)
        self.last_position = context.last_position
        self.verifies_chains_only = context.verifies_chains_only
        # A `Target` may have these limits, packed steps do not.
        self.slot_limit = UNLIMITED
        self.max_draft_tokens = inf
        self.max_row_skew = inf
        self.path: Sequence[int] = ()  # the accepted nodes of the last step
        self._step_states = StepStates(tuple(context.aux_layers))
        self._prompt_states: list[torch.Tensor] = []  # of each chunk of the prompt so far; empty after the prefill

    def pass_shape(self, tokens: int) -> tuple[int, int]:
        return 1, tokens

    def forward_again(self, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        """Raise a `ValueError`: a packed step cannot be repeated without the drafts."""
        raise ValueError(
            "a draft token has states that are not finite; answer the request by generate(), which repeats such a step "
            "without drafts"
        )

    def restart_prefill(self) -> None:
        """Discard the hidden states of a prefill that was not completed: all chunks of the prompt come again."""
        self._prompt_states = []

    def receive(self, states: Sequence[torch.Tensor], num_logits: int) -> None:
        """Receive the hidden states `[1, tokens, hidden]` of the request's tokens in a packed step, by captured layer.

        `num_logits` is how many of these tokens have logits: the pending token and the draft, or the last token of a
        prompt; 0 if the prompt continues in a later step.
        """
        if not states:
            return
        is_prefilled = any(self._step_states.kept)  # whether the prefill was committed
        if not is_prefilled:
            # A chunk of the prompt. Layer -1, the input of the output matrix, may have fewer tokens than others: those
            # with logits. All layers are cut to these.
            self._prompt_states.append(_last_states(states, min(layer.shape[1] for layer in states)))
            if num_logits:  # the last chunk
                self._step_states = self._step_states.after_prefill(torch.cat(self._prompt_states, dim=1))
                self._prompt_states = []
        elif num_logits:
            # A draft, or the last chunk of a text that is processed again, as the request was evicted from the cache:
            # the states of the tokens before are known.
            self._step_states = self._step_states.after_pass(_last_states(states, num_logits))

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the accepted path, and the hidden states along it; `PackedSteps` rolls the cache back."""
        self.path = paths[0] or []
        if self._step_states.layers:
            self._step_states = self._step_states.after_commit(paths)

    def last_states(self, aux_layers: Sequence[int]) -> torch.Tensor:
        return self._step_states.last_of(aux_layers)

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        return self._step_states.committed(aux_layers)


def _last_states(states: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """`[1, tokens, layers * hidden]` the states of the last tokens, of all layers side by side."""
    return torch.cat([layer[:, layer.shape[1] - tokens :] for layer in states], dim=-1)


def _draft_processors(processors: Sequence[Any], state: Any) -> ScoreProcessors:
    """The logits processors of a request, for drafters: Transformers itself applies them to the target's logits.

    All of them read the scores alone, or the manager does not speculate.
    """
    of_request = transformers_batching.processors_of_request(processors, state)
    settings = (id(processors), *sorted(state.logit_processor_kwargs.items()))
    return ScoreProcessors(tuple(of_request), settings)


class RequestOutputs:
    """The `StepOutputs` of a request: tokens are emitted at once, without other rows or stopping criteria."""

    criteria = None
    needs_plain_steps = False

    def __init__(self, state: GenerationState):
        self._state = state

    @property
    def emitted_positions(self) -> int:
        return len(self._state.generated[0])

    def add(self, result: VerificationResult) -> None:
        """Stop the row if its text has ended; the tokens of `result` are in the state already."""
        self._state.stopped[0] = self._state.has_ended(0)


class Request:
    """The steps of one request, Transformers' `RequestState`, and `tree`, its draft in the present step.

    If the strategy refuses the request with a `ValueError`, it is decoded without drafts; `refusal` is then the reason.
    After any other exception of the strategy the request fails: `error` is raised by `verify`.
    """

    def __init__(self, state: Any, context: RequestContext):
        self._request_state = state
        prompt = transformers_batching.prompt_length(state)
        tokens = state.initial_tokens + state.generated_tokens
        # The maximum length of the whole text, also after an eviction: `initial_tokens` then includes the generated
        # tokens, and `max_new_tokens` is reduced by their number.
        limit = UNLIMITED if state.max_new_tokens is None else len(state.initial_tokens) + state.max_new_tokens
        self.target = RequestTarget(context, prompt)
        self.tree = DraftTree.empty(1)
        ids = torch.tensor([tokens[:prompt]], device=self.target.device)
        generation = GenerationState(ids, None, transformers_batching.end_tokens(state), limit)
        generation.append(0, tokens[prompt:])
        settings = context.settings
        call = Call(
            context.model,
            generation,
            context.config,
            settings.candidates.settings(),
            draft_processors=_draft_processors(context.logits_processors, state),
            settings=settings,
            seed=(context.seed + transformers_batching.request_number(state)) % 2**63,
        )
        self.refusal = ""
        self.error: Exception | None = None
        try:
            self._begin(call, settings)
        except Exception as error:
            if isinstance(error, ValueError):
                self.refusal = str(error)
            else:
                self.error = error
            # Any strategy that refuses no request will do, since it never drafts.
            self._begin(call, replace(settings, start=NgramCandidates().start, policy=FixedDepth(0)))

    def _begin(self, call: Call, settings: Settings) -> None:
        """Start the sessions; after an exception, those that were started before it have ended."""
        with ExitStack() as stack:
            self.steps = DecodingSteps(call, self.target, settings, lambda _: RequestOutputs(call.state), stack)
            self._stack = stack.pop_all()

    @property
    def generated(self) -> list[int]:
        """The generated tokens."""
        return self.steps.state.generated[0]

    def resume_as(self, state: Any) -> bool:
        """Continue with a new `RequestState` of this request; False if it is another request with this `request_id`.

        A request that is evicted from the cache gets a new `RequestState`, whose prompt includes the generated tokens.
        If that happens in its prefill, the prefill starts again.
        """
        if state is not self._request_state:
            text = self.steps.state.prompts[0] + self.generated
            if not transformers_batching.was_evicted(state) or state.initial_tokens != text:
                return False
            self._request_state = state
            self.target.restart_prefill()
        return True

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """A context whose exception is kept as `error`."""
        try:
            yield
        except Exception as error:
            self.error = error

    def verify(self, scores: torch.Tensor) -> list[int]:
        """Verify the draft by the scores `[1 + nodes, vocab]`; returns the tokens that are appended."""
        if self.error is not None:
            raise self.error
        before = len(self.generated)
        if before:  # else this was the last pass over the prompt, which has no draft
            self.steps.end_step(self.tree, scores[None])
        else:
            self.steps.end_prefill(scores[None])
        return self.generated[before:]

    def logprobs(self, scores: torch.Tensor, tokens: Sequence[int]) -> list[float]:
        """The logarithmic probabilities of what `verify` has returned for these scores."""
        rows = scores[[0, *(1 + node for node in self.target.path)]]
        chosen = torch.tensor(tokens, device=rows.device)[:, None]
        logprobs: list[float] = rows.softmax(dim=-1).gather(1, chosen)[:, 0].log().tolist()
        return logprobs

    def end(self) -> Statistics:
        """End the sessions, whose exceptions are logged; returns the statistics of the request."""
        try:
            self._stack.close()
        except Exception as error:
            logger.error("sessions of a request of continuous batching have failed to end", exc_info=error)
        return self.steps.finished_statistics()


def warn_of_refusal(earlier: set[str], reason: str) -> None:
    """Log a warning of a request without drafts, unless there was one for this reason, which is added to `earlier`.

    Reasons that differ in a number are one reason.
    """
    kind = re.sub(r"\d+", "", reason)
    if kind not in earlier:
        logger.warning("a request of continuous batching is answered without drafts: %s", reason)
    earlier.add(kind)
