"""P-EAGLE: an EAGLE head that drafts several tokens in one pass.

Positions whose token and hidden state do not exist yet are filled with a mask token and a learned state, so all draft
tokens are predicted together with the reading of the accepted ones.

Source: P-EAGLE (2026), https://arxiv.org/abs/2602.01469.
"""

from __future__ import annotations

from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.head_candidates import HeadCandidates
from hf_specgen.candidates.parallel import ParallelSession
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.eagle import Eagle3Head
from hf_specgen.heads.parallel_reader import ParallelReader
from hf_specgen.targets.hidden_states import HiddenStateTarget


class PEagleCandidates(HeadCandidates):
    """Drafts with a P-EAGLE head.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: vLLM's layout with `mask_hidden`, and the `peagle`
            format of speculators.
        k, tree, taps, policy: as for `HeadCandidates`.

    Raises:
        TypeError: if the head is neither a `DraftHead` nor a path.
        ValueError: if a number is out of range; at the first call, if the head does not fit the target.

    Example:
        >>> PEagleCandidates("org/peagle-head", k=5)
        PEagleCandidates('org/peagle-head', k=5)
    """

    max_depth = 8
    """Maximum depth of k="auto": published heads were trained to draft 5 to 8 tokens."""

    def check(self, head: DraftHead) -> None:
        if not isinstance(head, Eagle3Head) or head.config.mask_token_id is None:
            raise ValueError(
                f"{self._name!r} is a {type(head).__name__} that drafts one token at a time, not a P-EAGLE head; use "
                "AutoCandidates.from_pretrained, which chooses the strategy"
            )

    def begin(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead) -> DraftSession:
        reader = ParallelReader(attached, call.state.batch)
        return ParallelSession(call, target, attached, reader, self.k, self.tree)
