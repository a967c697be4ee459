"""Base class of strategies with a draft head of any format: settings, loading, attaching the head to the target."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from hf_specgen.candidates.attached import AttachedModules, number_of
from hf_specgen.candidates.base import Candidates, Depth, DraftCall, DraftSession, Tree, check_tree
from hf_specgen.depth import Policy
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.loading import load_head
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.model_parts import output_matrix
from hf_specgen.targets.requirements import TargetRequirements, check_decoder_only


class HeadCandidates(Candidates):
    """Base class of strategies with a draft head; a subclass sets `max_depth`, and writes `check` and `begin`.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one.
        k: maximum depth of a draft, in tokens; "auto" adapts it to acceptance and latency.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the size of every tree. Left out, it is "auto" with k="auto", and with a number for
            k the draft is a chain of k tokens.
        taps: which hidden states of the target the head reads, as indices into Transformers' `hidden_states`, instead
            of those that the checkpoint names.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        TypeError: if the head is neither a `DraftHead` nor a path.
        ValueError: if a number is out of range; at the first call, if the head does not fit the target.
    """

    max_depth: int
    """Maximum depth of k="auto"."""

    def __init__(
        self,
        head_or_path: DraftHead | str | Path,
        k: Depth = "auto",
        *,
        tree: Tree = None,
        taps: Sequence[int] | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=self.max_depth)
        self.tree = check_tree(tree, k)
        self.adaptive_tree = self.tree == "auto"
        self.taps = None if taps is None else tuple(taps)
        if not isinstance(head_or_path, DraftHead | str | Path):
            name = type(self).__name__
            raise TypeError(f"{name} takes a loaded head, a folder or a Hub id, got {head_or_path!r}")
        self._head = head_or_path if isinstance(head_or_path, DraftHead) else None
        self._name = type(head_or_path).__qualname__ if self._head is not None else str(head_or_path)
        self._attached: AttachedModules[AttachedHead] = AttachedModules()

    @abstractmethod
    def check(self, head: DraftHead) -> None:
        """Raise a `ValueError` unless the strategy can draft with this head."""

    @abstractmethod
    def begin(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead) -> DraftSession:
        """The session of a call."""

    def load(self, model: PreTrainedModel) -> DraftHead:
        """The head, on the CPU; a copy of one that was given loaded."""
        return load_head(self._name) if self._head is None else copy.deepcopy(self._head)

    def with_taps(self, taps: Sequence[int], k: int) -> HeadCandidates:
        """The same head with other taps, drafting chains of k tokens."""
        other = copy.copy(self)
        HeadCandidates.__init__(other, self._head or self._name, k, taps=taps, policy=self.policy)
        return other

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        check_decoder_only(model, type(self).__name__)
        return TargetRequirements(taps=self._on(model).taps)

    def start(self, call: DraftCall) -> DraftSession:
        if call.model is None or not isinstance(call.target, HiddenStateTarget):
            raise ValueError(f"{type(self).__name__} works with generate(candidate_generator=…) only")
        attached = self._on(call.model)
        return self.begin(call, call.target, attached)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """By name; a head that was given loaded is identified by the object, as its name is only that of its class."""
        which = self._name if self._head is None else f"{self._name} {number_of(self._head)}"
        return ("head", which, self.k, str(self.tree), str(self.taps))

    def _on(self, model: PreTrainedModel) -> AttachedHead:
        """The head on its target, in its dtype on its device."""
        return self._attached.on(model, lambda: self._attach(model))

    def _attach(self, model: PreTrainedModel) -> AttachedHead:
        head = self.load(model)
        self.check(head)
        weight = output_matrix(model).weight
        return head.to(device=weight.device, dtype=weight.dtype).eval().attach(model, self.taps)

    def __repr__(self) -> str:
        tree = "" if self.tree is None else f", tree={self.tree!r}"
        taps = "" if self.taps is None else f", taps={self.taps}"
        return f"{type(self).__name__}({self._name!r}, k={self.k}{tree}{taps}{self._show_policy()})"
