"""DFlash and JetSpec: a head of a few layers drafts a whole block of tokens in one pass.

The head attends to the target's hidden states of the accepted text, so a draft costs one small pass, however long it
is. The tokens of a block are predicted independently of each other: each depth has one distribution, and the most
probable combinations form the draft tree.

Sources: DFlash (2026), https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394.
"""

from __future__ import annotations

from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.head_candidates import HeadCandidates
from hf_specgen.candidates.parallel import ParallelSession
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.block import BlockHead
from hf_specgen.heads.block_reader import BlockReader
from hf_specgen.targets.hidden_states import HiddenStateTarget


class DFlashCandidates(HeadCandidates):
    """Drafts with a block head.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: DFlash of z-lab and JetSpec, and the `dflash` format
            of speculators.
        k, tree, taps, policy: as for `HeadCandidates`; a draft is never longer than the head's block.

    Raises:
        TypeError: if the head is neither a `DraftHead` nor a path.
        ValueError: if a number is out of range; at the first call, if the head does not fit the target.

    Example:
        >>> DFlashCandidates("org/dflash-head", k=7, tree=32)
        DFlashCandidates('org/dflash-head', k=7, tree=32)
    """

    max_depth = 16
    """Maximum depth of k="auto": published heads have blocks of 8 to 16 tokens."""

    def check(self, head: DraftHead) -> None:
        if not isinstance(head, BlockHead):
            raise ValueError(
                f"{self._name!r} is a {type(head).__name__}, not a DFlash or JetSpec head; use the strategy made for it"
            )

    def begin(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead) -> DraftSession:
        reader = BlockReader(attached, call.state.batch)
        return ParallelSession(call, target, attached, reader, min(self.k, reader.depth), self.tree)
