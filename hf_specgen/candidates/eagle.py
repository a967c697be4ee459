"""EAGLE: drafts with a head of one or a few layers on the target's hidden states, one token at a time.

The head reads each accepted token with the hidden states that the target computed for it in verification, so drafting
costs no forward pass of a model and no second reading of the prompt by the target. Beyond the accepted text the head
continues from its own output.

Source: Li et al., "EAGLE" (2024), section 3; "EAGLE-2" (2024), section 4, for the trees; "EAGLE-3" (2025), section 3,
for the fused hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.features import UnreadFeatures, unfinished_rows
from hf_specgen.candidates.head_candidates import HeadCandidates
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.captured_head import captured_head
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head
from hf_specgen.heads.reader import HeadReader
from hf_specgen.targets.graphs import GRAPH_DEVICES
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class EagleCandidates(HeadCandidates):
    """Drafts with an EAGLE head.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: EAGLE-1, EAGLE-2, EAGLE-3, EAGLE-3.1 and HASS in the
            original format, in that of SpecForge, ModelOpt and DeepSpec, and the `eagle3` format of speculators.
        k, tree, taps, policy: as for `HeadCandidates`.

    Raises:
        TypeError: if the head is neither a `DraftHead` nor a path.
        ValueError: if a number is out of range; at the first call, if the head does not fit the target.

    Example:
        >>> EagleCandidates("org/eagle3-head", k=4)
        EagleCandidates('org/eagle3-head', k=4)
    """

    max_depth = 16
    """Maximum depth of k="auto". With the depth 8 of EAGLE-3's trees the projected speed of the embedded head is 4.92x
    of plain decoding, with 16 it is 5.47x, as text that the head is nearly sure of deserves deep drafts."""

    def check(self, head: DraftHead) -> None:
        if not isinstance(head, Eagle1Head | Eagle3Head):
            raise ValueError(
                f"{self._name!r} is a {type(head).__name__}, not an EAGLE head; use the strategy made for it"
            )
        if head.config.mask_token_id is not None:
            raise ValueError(
                f"{self._name!r} is a P-EAGLE head, which drafts all tokens in one pass; use PEagleCandidates"
            )

    def begin(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead) -> DraftSession:
        return EagleSession(call, target, attached, self.k, self.tree)


class EagleSession(AutoregressiveSession):
    """The state of one call; also of other heads that continue from their own output.

    Args:
        call: the call.
        target: keeps the hidden states of its passes.
        attached: the head on its target.
        k, tree: as in `EagleCandidates`.

    Attributes:
        reader: the head's cache, and its passes.
    """

    def __init__(
        self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead, k: int, tree: str | int | None
    ):
        assert call.model is not None
        super().__init__(call, k, tree, 0.0, vocabulary_size(call.model))
        head = attached.head
        captures = call.compiled and isinstance(head, Eagle1Head | Eagle3Head)
        device = next(head.parameters()).device.type
        captures = captures and device in GRAPH_DEVICES and not torch.is_autocast_enabled(device)
        self.reader = HeadReader(attached, call.state.batch, captured_head(head) if captures else None)
        self._unread = UnreadFeatures(call, target, attached)
        self._has_read_prompt = False

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        """Nothing: the target has not computed any hidden states yet."""
        return self.not_drafted(len(budget))

    def draft(self, budget: Sequence[int]) -> DraftTree:
        if self._unread.is_empty:
            self._unread.receive()
        if not self._has_read_prompt and not self._unread.has_features:
            return self.not_drafted(len(budget))
        return super().draft(budget)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self._unread.receive()

    def first_scores(self) -> torch.Tensor:
        """Read the text since the last draft with the target's features; rows that have ended are dropped."""
        features, tokens = self._unread.take()
        if self._has_read_prompt:
            self.passes.append(sum(map(len, tokens)))
        self._has_read_prompt = True
        return self.reader.logits(self.reader.read(features, tokens, unfinished_rows(self.call)).output)[:, 0]

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        return self.reader.logits(self.reader.expand(tree, new).output)
