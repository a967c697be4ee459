"""MTP: drafts with the multi-token prediction layer in the target's own checkpoint, like an EAGLE head.

Transformers ignores these tensors when it loads the target; here they are read from the same checkpoint. The
layer is applied to its own output again for each further token.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), sections 2.2 and 5.4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from hf_specgen.candidates.base import Depth, DraftCall, DraftSession, Tree
from hf_specgen.candidates.eagle import EagleSession
from hf_specgen.candidates.head_candidates import HeadCandidates
from hf_specgen.depth import Policy
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.mtp import MTPHead
from hf_specgen.heads.mtp_format import load_mtp
from hf_specgen.targets.hidden_states import HiddenStateTarget

OWN_CHECKPOINT = ""
"""The name that stands for the checkpoint from which the target was loaded."""


class MTPCandidates(HeadCandidates):
    """Drafts with the target's own multi-token prediction layer.

    Args:
        checkpoint: folder or Hub id of the target's checkpoint; left out, it is where the target was loaded from.
        k, tree, taps, policy: as for `HeadCandidates`.

    Raises:
        ValueError: if a number is out of range; at the first call, if the checkpoint has no such layer, or several.

    Example:
        >>> MTPCandidates(k=2)
        MTPCandidates(k=2)
    """

    max_depth = 4
    """Maximum depth of k="auto": the layer was trained to predict one token; further ones are less accurate."""

    def __init__(
        self,
        checkpoint: str | Path | None = None,
        k: Depth = "auto",
        *,
        tree: Tree = None,
        taps: Sequence[int] | None = None,
        policy: Policy | None = None,
    ):
        given = OWN_CHECKPOINT if checkpoint is None else str(checkpoint)
        super().__init__(given, k, tree=tree, taps=taps, policy=policy)

    def load(self, model: PreTrainedModel) -> DraftHead:
        """The layer, from the checkpoint."""
        return load_mtp(model, self._name or None)

    def check(self, head: DraftHead) -> None:
        assert isinstance(head, MTPHead)
        if head.config.num_layers > 1:
            raise ValueError(
                f"the checkpoint has {head.config.num_layers} MTP layers, each for one further token; MTPCandidates "
                "drafts with checkpoints that have one layer"
            )

    def begin(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead) -> DraftSession:
        return EagleSession(call, target, attached, self.k, self.tree)

    def __repr__(self) -> str:
        text = super().__repr__()
        return text.replace("('', ", "(") if self._name == OWN_CHECKPOINT else text
