"""The interface of a candidate strategy.

The user builds a `Candidates` object, which holds settings only, before any model is known. At the start of each
`generate` call `Candidates.start` returns a `DraftSession`, which holds all the state of the call.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.call import DraftingSettings, checked_count
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.ngram_history import NgramHistory
from hf_specgen.depth import AdaptiveDepth, FixedDepth, Policy
from hf_specgen.heads.source import Source
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.targets.row_layout import UNLIMITED
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.result import reindexed_result

Depth = int | Literal["auto"]  # maximum depth of a draft; "auto" adapts it to acceptance and latency
TreeSetting = int | Literal["auto"] | None
"""Number of draft tokens to verify; "auto" for the fastest tree of each step; None: "auto" if k is, else chains."""
SOURCE_ARGUMENTS = ("revision", "token", "subfolder", "cache_dir", "trust_remote_code")
"""Arguments of `from_pretrained` that specify where a checkpoint is, and whether its code is run."""


class DraftSession(ABC):
    """The state of one strategy in one `generate` call.

    Args:
        batch: the rows: tokens so far, and what target, verification and policy know of them.
    """

    tokens_per_pass: Sequence[int] | None = None
    """Tokens, over all rows, in each forward pass of the drafter for the last draft, without the drafter's prefill.
    Empty if drafting needs no forward pass; None if unknown: then one pass for each level of the draft is assumed, with
    one token per row."""
    top_tokens: int = 0
    """How many of the target's most likely next tokens `observe` receives for every input token of a step, as
    `VerificationResult.top_tokens`; if not 0, `observe` is called after the prefill too."""
    excluded_time_loss: float = 0.0
    """Part of the time loss of the last step, in units of T(1), that the policy leaves out: see `DrafterTimeLoss`."""

    def __init__(self, batch: DraftBatch):
        self.batch = batch

    def passes_of(self, draft: DraftTree) -> Sequence[int]:
        """`tokens_per_pass` of the last draft; if they are unknown, a pass for each of its levels."""
        if self.tokens_per_pass is not None:
            return self.tokens_per_pass
        rows = sum(len(parents) > 0 for parents in draft.parents)
        return [rows] * max((max(draft.depths(row)) for row in range(draft.batch)), default=0)

    @property
    def rows_can_change(self) -> bool:
        """Whether rows can join and leave between steps, by `keep_rows` and `append_rows`."""
        return False

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, in this order; `batch.state` has their texts already."""

    def append_rows(self, new: int) -> None:
        """Add new rows after the present ones; `batch.state` has their texts already."""

    def plan(self, max_depths: Sequence[int]) -> None:
        """Receive the depths of the next `draft` in advance, so that several sessions can share its passes."""

    @abstractmethod
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        """Propose what comes next in each row.

        Called in every step, with nothing but zeros where a plain step is wanted: then nothing should be computed that
        the next draft can catch up on. A row for which `batch.state.has_ended(row)` never takes part again.

        Args:
            max_depths: `[batch]` maximum depth of each row's draft; a row with 0 gets no nodes.
        """

    def observe(self, result: VerificationResult) -> None:
        """Receive the outcome of the last draft; `batch.state` holds the new tokens already."""

    def end(self) -> None:
        """The call is over, possibly by an exception; `batch.state` holds the final tokens."""


DraftChange = Callable[[DraftTree, Sequence[int]], DraftTree]
"""From a draft, and the maximum depth of each row's draft, to the draft that is verified instead."""


class WrappedSession(DraftSession):
    """Changes the drafts of another session, which receives outcomes in terms of its own."""

    def __init__(self, session: DraftSession, change: DraftChange):
        super().__init__(session.batch)
        self._session = session
        self._change = change
        self._own_draft = DraftTree.empty(session.batch.state.batch)
        self._changed_draft = self._own_draft
        self.top_tokens = session.top_tokens

    def plan(self, max_depths: Sequence[int]) -> None:
        self._session.plan(max_depths)

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        name = self.batch.call.drafting.name
        self._own_draft = checked_draft(self._session.draft(max_depths), name, self.batch.state.batch)
        self.tokens_per_pass = self._session.tokens_per_pass
        self._changed_draft = self._change(self._own_draft, max_depths)
        return self._changed_draft

    def observe(self, result: VerificationResult) -> None:
        self._session.observe(reindexed_result(result, self._own_draft, self._changed_draft))
        self.excluded_time_loss = self._session.excluded_time_loss

    def end(self) -> None:
        self._session.end()


def leftmost_chains(batch: DraftBatch) -> DraftChange | None:
    """The leftmost chain of each row, where drafts must be chains; None where they need not."""
    return (lambda tree, max_depths: tree.leftmost_chain()) if batch.verifies_chains_only else None


class Candidates(CandidateGenerator, ABC):
    """A strategy, as the user builds it and passes it to `generate(candidate_generator=…)`.

    Subclass it and write `start`.

    Args:
        k: maximum depth of a draft, in tokens; "auto" adapts it, up to `max_k`, to acceptance and latency.
        policy: how much of k is used, step by step, see `hf_specgen.depth`; None: `AdaptiveDepth()` if k or the tree is
            "auto", else all of it.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the size of every tree. Left out, it is "auto" with k="auto", and with a number for
            k the draft is a chain of k tokens. False: the strategy drafts chains.
        max_k: maximum depth of k="auto".

    Raises:
        ValueError: if k or the tree is neither a positive integer nor "auto".
        TypeError: if the policy is no `Policy`.
    """

    k: int = 64
    policy: Policy = FixedDepth()
    negligible_draft_cost: bool = False
    """Whether drafting takes a negligible time, so that a draft that is not used costs nothing."""
    uses_prediction: bool = False
    """Whether the strategy drafts from the expected output, `generate(prediction=…)`."""
    adaptive_tree: bool = False
    """Whether the strategy sizes each draft itself, so that a policy only decides whether to draft."""
    tree: TreeSetting = None
    latency_kind: str | None = None
    """Under which name a latency file has the passes of the drafter; None: that of the class."""
    arguments: ClassVar[Mapping[str, object]] = {"k": None, "tree": None}
    """Arguments of the constructor, kept as attributes of these names, and their defaults; without the policy."""
    drafter: object = None
    """What the strategy drafts with, if it is its first argument: a loaded module, or a name."""
    speculation: Statistics | None = None
    """The statistics of the last call that used this object."""

    def __init__(
        self,
        k: Depth = "auto",
        policy: Policy | None = None,
        *,
        tree: TreeSetting | Literal[False] = False,
        max_k: int = 16,
    ):
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy such as Schedule({{1: 8, 4: 4, 16: 0}}), got {policy!r}")
        if not _is_auto(k):
            k = checked_count("k", k, 1, "tokens", ', or "auto"')
        if tree is not False:
            if tree is not None and not _is_auto(tree):
                tree = checked_count("tree", tree, 1, "nodes", ', or "auto", or None')
            self.tree = k if tree is None and k == "auto" else tree
            self.adaptive_tree = self.tree == "auto"
        # Trees of adaptive size need latencies.
        self.policy = policy or (AdaptiveDepth() if k == "auto" or self.adaptive_tree else FixedDepth())
        self.k = max_k if k == "auto" else k

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone, so that copies and fingerprints of a strategy do not depend on earlier calls."""
        return {name: value for name, value in vars(self).items() if name != "speculation"}

    @abstractmethod
    def start(self, batch: DraftBatch) -> DraftSession:
        """Begin a call: the session that drafts for its rows."""

    def for_model(self, model: PreTrainedModel) -> Candidates:
        """The strategy to use with this target: the object itself; a preset chooses one."""
        return self

    def with_history(self, history: NgramHistory) -> Candidates:
        """The strategy with a history of earlier texts for its n-grams, see `generate(history=…)`.

        Raises:
            ValueError: if it has no n-grams.
        """
        remedy = "draft with CombinedCandidates([NgramCandidates(), …])"
        raise ValueError(f"history= needs n-grams, which {self!r} lacks; {remedy}")

    def _changed(self, **attributes: Any) -> Self:
        """A copy with other values of attributes."""
        strategy = copy.copy(self)
        for name, value in attributes.items():
            setattr(strategy, name, value)
        return strategy

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        """What the strategy reads from the target besides its tokens: hidden states, an early exit; by default nothing.

        Raises:
            ValueError: if the strategy does not fit the model.
        """
        return TargetRequirements()

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """Identifies the strategy for what is remembered between calls: its acceptance and the latency of its drafts.

        Two objects with the same key must draft alike. By default the kind of drafter and the arguments.
        """
        values = (self.drafter, *(getattr(self, name) for name in self.arguments))
        return (self.latency_kind or type(self).__qualname__, *map(_identity, values))

    def __repr__(self) -> str:
        name = self.drafter
        defaults = {**self.arguments, "policy": FixedDepth()}
        if isinstance(name, nn.Module):
            name = getattr(name, "name_or_path", type(name).__qualname__)
        shown = [] if name is None else [repr(name)]
        values = ((name, getattr(self, name), default) for name, default in defaults.items())
        shown += [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def settings(self) -> DraftingSettings:
        """What the policy and monitor of a call may know of the strategy."""
        nodes = self.k
        if isinstance(self.tree, int):
            # A pass expands the square root of the tree's size; rejection sampling verifies every expanded node.
            nodes = self.tree if self.negligible_draft_cost else max(self.tree, isqrt(self.tree) * self.k)
        return DraftingSettings(
            self.k,
            self.profile_key(),
            self.negligible_draft_cost,
            self.adaptive_tree,
            repr(self),
            max_slots=max(MAX_DRAFT_SLOTS, 1 + nodes),
        )

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: object) -> NoReturn:
        """Transformers' interface, which has neither target nor verification.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{type(self).__name__} does not draft inside Transformers' own assisted decoding; pass it as "
            "generate(candidate_generator=...)"
        )

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """As `get_candidates`."""
        self.get_candidates(input_ids)


StartSession = Callable[[DraftBatch], DraftSession]  # what begins a call for a strategy, see `Candidates.start`


class PretrainedCandidates(Candidates):
    """A strategy with a checkpoint, which is its first argument."""

    may_have_code: ClassVar[bool] = False
    """Whether the checkpoint may be a model with code of its own."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **settings: Any) -> Self:
        """The strategy with a checkpoint of the Hub or of a folder, named as in Transformers.

        Args:
            name_or_path: a folder, or a repository of the Hub.
            settings: of the strategy, such as `k=4`; and where the checkpoint lies, as for `from_pretrained` of
                Transformers: `revision`, `token`, `subfolder`, `cache_dir`; `trust_remote_code` runs the code of a
                draft model's repository, heads and adapters have none.
        """
        source = source_of(name_or_path, settings)
        if source.trust_remote_code and cls.may_have_code:
            settings["trust_remote_code"] = True
        return cls.of_checkpoint(source.local_name(), **settings)

    @classmethod
    def of_checkpoint(cls, name: str, **settings: Any) -> Self:
        """The strategy with the checkpoint in a folder, or of a repository in the cache."""
        strategy: Any = cls
        return strategy(name, **settings)


def source_of(name_or_path: str | Path, settings: dict[str, Any]) -> Source:
    """Where a checkpoint is, by a name and by those of the settings that specify it, which are removed."""
    arguments = {name: settings.pop(name) for name in SOURCE_ARGUMENTS if name in settings}
    return Source(os.path.expanduser(name_or_path), **arguments)


def checked_draft(draft: object, name: str, rows: int, vocabulary: int = UNLIMITED) -> DraftTree:
    """The draft of the strategy `name` for `rows` rows; `ValueError` if the target cannot verify it.

    On an accelerator, a token outside of the vocabulary would end the process.
    """
    if not isinstance(draft, DraftTree) or draft.batch != rows:
        given = f"a {type(draft).__name__} of {getattr(draft, 'batch', 'no')} rows"
        raise ValueError(f"{name} must return a DraftTree of {rows} rows, such as DraftTree.chains(rows), got {given}")
    try:
        return draft.checked(vocabulary)
    except ValueError as error:
        raise ValueError(f"the draft of {name} cannot be verified: {error}; correct the strategy") from None


_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_next_number = count()


def _identity(value: object) -> str | int:
    """Of a setting: a number unique to a module in this process (freed modules keep theirs), otherwise its text."""
    if isinstance(value, nn.Module):
        return _numbers.setdefault(value, next(_next_number))
    return hash(value) if isinstance(value, tuple) else str(value)


def _is_auto(value: object) -> bool:
    """Whether a setting is "auto"; an array equals no text."""
    return isinstance(value, str) and value == "auto"


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of logits of a model; that of its config where several modules in a row make them."""
    matrix = getattr(model.get_output_embeddings(), "weight", None)
    return int(model.config.get_text_config().vocab_size if matrix is None else matrix.shape[0])
