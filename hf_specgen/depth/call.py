"""What a policy reads of a `generate` call: the part of `hf_specgen.state.Call` that this package depends on."""

from __future__ import annotations

from typing import Any, Protocol


class CandidatesSettings(Protocol):
    """The settings of the strategy that drafts."""

    k: int
    """Maximum depth of a draft."""
    negligible_draft_cost: bool
    """Whether drafting runs no network, as with n-grams."""
    adaptive_tree: bool
    """Whether the strategy sizes its own trees, so that a policy decides only whether to draft."""

    def profile_key(self) -> tuple[Any, ...]:
        """What latency and acceptance depend on, as plain values; the first is the kind of drafter ("draft_model")."""


class Rows(Protocol):
    """The text of the call's rows."""

    prompts: list[list[int]]
    """Prompt tokens of each row, without padding."""
    generated: list[list[int]]
    """Tokens generated so far, by row."""
    batch: int
    """Number of rows."""


class Call(Protocol):
    """One `generate` call, read-only."""

    @property
    def model(self) -> Any:
        """The target; None in simulations."""

    @property
    def state(self) -> Rows:
        """The text so far."""

    @property
    def candidates(self) -> CandidatesSettings:
        """The strategy's settings."""

    @property
    def temperature(self) -> float:
        """0.0 when decoding is greedy."""

    @property
    def max_new_tokens(self) -> float:
        """How many tokens the call may generate; may be infinite."""
