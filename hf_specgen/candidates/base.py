"""What a candidate strategy is.

The user builds a `Candidates` object before any model is known. At the start of each `generate` call it is bound to
that call and gives a `Drafter`, which holds all the state of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.adaptive.controller import Controller
from hf_specgen.adaptive.policy import Fixed, Policy
from hf_specgen.tree import DraftTree

Depth = int | Literal["auto"]

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from hf_specgen.statistics import Statistics
    from hf_specgen.target.base import Target
    from hf_specgen.verification import VerificationResult, Verifier


@dataclass
class DraftContext:
    """What is known of the text when a draft is asked for.

    Args:
        prompts: the prompt of each row, without padding.
        generated: the tokens generated so far, per row; these lists grow from step to step.
        budget: how many draft tokens each row can still use; 0 for a row that takes no part in this step.
        ended: the rows that will never take part again.
        verifier: what will judge the guesses: its `sample_draft` draws tokens in the way that it accepts most of, its
            `wants_q` says whether they should carry their probabilities. None inside Transformers' own loop.
        target: the target as the loop sees it; None inside Transformers' own loop.
        policy: what sets the budget; None inside Transformers' own loop.
    """

    prompts: list[list[int]]
    generated: list[list[int]]
    budget: list[int] = field(default_factory=list)
    ended: Collection[int] = ()
    verifier: Verifier | None = None
    target: Target | None = None
    policy: Policy | None = None


class Drafter(ABC):
    """The state of one strategy in one `generate` call."""

    @abstractmethod
    def draft(self, context: DraftContext) -> DraftTree:
        """Guess what comes next in each row; a row with budget 0 gets no nodes.

        Called in every step, with nothing but zeros where a plain step is wanted: then nothing should be computed that
        the next draft can catch up on.
        """

    def open(self, context: DraftContext) -> DraftTree:
        """Guess the first tokens, before the target has read the prompt: what is guessed is verified in that pass.

        Here nothing. A drafter that needs nothing of the target can write ``open = draft`` where its `draft` can do
        with a text that nothing was generated for yet. Of a tree only the first path is used; `observe` follows if
        there is one.
        """
        return DraftTree.empty(len(context.budget))

    def observe(self, verdict: VerificationResult) -> None:
        """Learn what the target made of the last draft."""

    def end(self) -> None:
        """The call is over; `DraftContext.generated` holds the final text."""


class Candidates(CandidateGenerator, ABC):
    """A strategy, as the user builds it and passes it to `generate(candidate_generator=…)`.

    Subclass it and write `bind`; everything else follows. It also works in Transformers' own assisted decoding, for
    one row, through `get_candidates`.
    """

    k: int = 64
    """Greatest depth of a draft."""
    policy: Policy = Fixed()
    """Decides before each step how much of k is used."""
    negligible_draft_cost: bool = False
    """Whether a draft costs next to nothing, and asking for one that is not used does no harm."""
    adaptive_tree: bool = False
    """Whether each draft is made as large as pays, so that a policy decides only whether to draft."""
    speculation: Statistics | None = None
    """The statistics of the last call that used this object."""
    _foreign_call: tuple[DraftContext, Drafter] | None = None

    def make_target(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> Target:
        """The target of a call; a strategy that drafts with parts of the target gives one of its own."""
        from hf_specgen.target.base import Target

        return Target(model, input_ids, generation_config, model_kwargs)

    def _set_depth(self, k: Depth, policy: Policy | None, greatest: int) -> None:
        """Take the arguments `k` and `policy` of a strategy.

        Args:
            k: greatest depth; "auto" for the greatest that makes sense, with a `Controller`.
            policy: of the user; None for the one that belongs to k.
            greatest: the greatest that makes sense.

        Raises:
            ValueError: if k is neither.
            TypeError: if the policy is none.
        """
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy such as Schedule({{1: 8, 4: 4, 16: 0}}), got {policy!r}")
        if k != "auto" and (not isinstance(k, int) or k < 1):
            raise ValueError(f'k must be at least 1, got {k!r}; or give "auto"')
        self.policy = policy or (Controller() if k == "auto" else Fixed())
        self.k = greatest if k == "auto" else k

    def _show_policy(self) -> str:
        """The end of a strategy's repr: its policy, unless that is a fixed depth."""
        return "" if isinstance(self.policy, Fixed) else f", policy={self.policy!r}"

    @abstractmethod
    def bind(self, context: DraftContext, model: PreTrainedModel | None) -> Drafter:
        """Start a call.

        Args:
            context: the prompts; the same object is given to every `draft`.
            model: the target; None inside Transformers' own loop.
        """

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Transformers' interface: the text `[1, length]` followed by a chain of guesses, and no draft logits.

        No policy is at work here: "auto" guesses as many tokens as its greatest depth each time; give a number there.

        Raises:
            ValueError: for more than one row.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"get_candidates works on one row, got {input_ids.shape[0]}; use candidate_generator=")
        context, drafter = self._resume(input_ids[0].tolist())
        guesses = drafter.draft(context).leftmost_chain().tokens
        return torch.cat([input_ids, guesses.to(input_ids)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Transformers' interface: the text after verification, and how many guesses were right."""
        from hf_specgen.verification import VerificationResult

        context, drafter = self._resume(input_ids[0].tolist())
        emitted = context.generated[0][-num_matches - 1 :]
        drafter.observe(VerificationResult([list(range(len(emitted) - 1))], [emitted], [len(emitted) - 1]))

    def _resume(self, text: list[int]) -> tuple[DraftContext, Drafter]:
        """The drafter of the previous `get_candidates` call if `text` goes on from there, or else a new one."""
        if self._foreign_call is not None:
            context, drafter = self._foreign_call
            known = len(context.prompts[0])
            if text[:known] == context.prompts[0] and text[known:][: len(context.generated[0])] == context.generated[0]:
                context.generated[0].extend(text[known + len(context.generated[0]) :])
                return context, drafter
        # The last token counts as generated: as in our own loop, the target has not read it yet.
        context = DraftContext([text[:-1] or text], [text[-1:]], [2**31])
        self._foreign_call = context, self.bind(context, None)
        return self._foreign_call
