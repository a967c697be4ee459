"""EAGLE: a head of one or a few layers drafts from the target's hidden states, one token at a time.

The head reads each accepted token with the hidden states that the target computed for it in verification, so drafting
costs no forward pass of a model and no second reading of the prompt by the target. Beyond the accepted text the head
continues from its own output.

Source: Li et al., "EAGLE" (2024), section 3; "EAGLE-2" (2024), section 4, for the trees; "EAGLE-3" (2025), section 3,
for the fused hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.attached import AttachedModules
from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import Candidates, Depth, DraftSession, Tree, check_tree
from hf_specgen.depth import Policy
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head
from hf_specgen.heads.loading import load_head
from hf_specgen.heads.reader import HeadReader
from hf_specgen.state import Call
from hf_specgen.target.hidden_states import HiddenStateTarget
from hf_specgen.target.model_parts import output_matrix
from hf_specgen.target.requirements import TargetRequirements
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

MAX_DEPTH = 8
"""Maximum depth of k="auto", as in the trees of EAGLE-3: heads learn to continue from their own output that far."""


class EagleCandidates(Candidates):
    """Drafts with an EAGLE head.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: EAGLE-1, EAGLE-2, EAGLE-3, EAGLE-3.1 and HASS in the
            original format, in that of SpecForge, ModelOpt and DeepSpec, and the `eagle3` format of speculators.
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

    Example:
        >>> EagleCandidates("org/eagle3-head", k=4)
        EagleCandidates('org/eagle3-head', k=4)
    """

    def __init__(
        self,
        head_or_path: DraftHead | str | Path,
        k: Depth = "auto",
        *,
        tree: Tree = None,
        taps: Sequence[int] | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=MAX_DEPTH)
        self.tree = check_tree(tree, k)
        self.adaptive_tree = self.tree == "auto"
        self.taps = None if taps is None else tuple(taps)
        if not isinstance(head_or_path, DraftHead | str | Path):
            raise TypeError(f"EagleCandidates takes a loaded head, a folder or a Hub id, got {head_or_path!r}")
        self._head = head_or_path if isinstance(head_or_path, DraftHead) else None
        self._name = type(head_or_path).__qualname__ if self._head is not None else str(head_or_path)
        self._attached: AttachedModules[AttachedHead] = AttachedModules()

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        return TargetRequirements(taps=self._on(model).taps)

    def start(self, call: Call) -> DraftSession:
        if call.model is None or not isinstance(call.target, HiddenStateTarget):
            raise ValueError("EagleCandidates works with generate(candidate_generator=…) only")
        return EagleSession(call, call.target, self._on(call.model), self.k, self.tree)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        return ("head", self._name, self.k, str(self.tree), str(self.taps))

    def _on(self, model: PreTrainedModel) -> AttachedHead:
        """The head on its target, in its dtype on its device."""
        return self._attached.on(model, lambda: self._attach(model))

    def _attach(self, model: PreTrainedModel) -> AttachedHead:
        head = load_head(self._name) if self._head is None else copy.deepcopy(self._head)
        if not isinstance(head, Eagle1Head | Eagle3Head):
            raise ValueError(
                f"{self._name!r} is a {type(head).__name__}, not an EAGLE head; use the strategy made for it"
            )
        if head.config.mask_token_id is not None:
            raise ValueError(
                f"{self._name!r} is a P-EAGLE head, which drafts all tokens in one pass; EagleCandidates runs heads "
                "that draft one token at a time"
            )
        weight = output_matrix(model).weight
        return head.to(device=weight.device, dtype=weight.dtype).eval().attach(model, self.taps)

    def __repr__(self) -> str:
        tree = "" if self.tree is None else f", tree={self.tree!r}"
        taps = "" if self.taps is None else f", taps={self.taps}"
        return f"EagleCandidates({self._name!r}, k={self.k}{tree}{taps}{self._show_policy()})"


class EagleSession(AutoregressiveSession):
    """The state of one call.

    Args:
        call: the call.
        target: keeps the hidden states of its passes.
        attached: the head on its target.
        k, tree: as in `EagleCandidates`.

    Attributes:
        reader: the head's cache, and its passes.
    """

    def __init__(self, call: Call, target: HiddenStateTarget, attached: AttachedHead, k: int, tree: str | int | None):
        assert call.model is not None
        super().__init__(call, k, tree, 0.0, vocabulary_size(call.model))
        self._target, self._taps = target, attached.taps
        self.reader = HeadReader(attached, call.state.batch)
        self._unread: list[list[torch.Tensor]] = []
        """By row the features of positions that the head has not read; empty before prefill."""
        self._read: list[int] = []
        """The position in each row's text of the first unread feature."""

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        """Nothing: the target has not computed any hidden states yet."""
        return self.not_drafted(len(budget))

    def draft(self, budget: Sequence[int]) -> DraftTree:
        if not self._unread:
            self._receive_features()
        return super().draft(budget)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self._receive_features()

    def _receive_features(self) -> None:
        """Note what the target computed for the tokens that the last step kept; read only when something is drafted."""
        states = self._target.committed_states(self._taps)
        if not self._unread:
            # The target has read everything but the last token; positions that a given cache held have no features.
            texts = zip(self.call.state.prompts, self.call.state.generated, strict=True)
            known = [len(prompt) + len(generated) - 1 for prompt, generated in texts]
            states = [row[max(0, len(row) - count) :] for row, count in zip(states, known, strict=True)]
            self._read = [count - len(row) for row, count in zip(states, known, strict=True)]
            self._unread = [[] for _ in states]
        for unread, new in zip(self._unread, states, strict=True):
            unread.append(new)

    def first_scores(self) -> torch.Tensor:
        """Read the text since the last draft with the target's features; nothing of rows that have ended."""
        config = self.reader.attached.head.config
        nothing = self._target.pass_states.new_zeros(0, config.num_taps * config.target_hidden_size)
        features, tokens = [], []
        for row, unread in enumerate(self._unread):
            features.append(nothing if self.call.state.has_ended(row) else torch.cat([nothing, *unread]))
            tokens.append(self._next_tokens(row, len(features[row])))
            self._read[row] += len(tokens[row])
            unread.clear()
        return self.reader.logits(self.reader.read(features, tokens).output)[:, 0]

    def _next_tokens(self, row: int, count: int) -> list[int]:
        """The token after each of the next `count` unread positions of a row."""
        prompt, generated = self.call.state.prompts[row], self.call.state.generated[row]
        first = self._read[row] + 1
        begin, end = (max(0, place - len(prompt)) for place in (first, first + count))
        return prompt[first : first + count] + generated[begin:end]

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        return self.reader.logits(self.reader.expand(tree, new).output)
