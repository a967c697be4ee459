"""Runs the target on the padding of ended rows, where the returned cache or scores contain the results.

Plain `generate` feeds padding to ended rows until the last row ends. The results appear only in the returned cache and
scores, so here one forward pass at the end of the call processes all padding. There is one exception: processors that
need all rows of a column at once (`LogitsPipeline.lockstep`) need the padding's logits in the step that decides the
column, if their scores are returned. Then an ended row takes part in every step with a chain of padding as its draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.candidates.merged_tree import merge_trees
from hf_specgen.outputs import OutputCollector
from hf_specgen.state import Call
from hf_specgen.targets.base import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class PaddingReader:
    """Processes the padding of one call.

    Args:
        call: the call.
        target: runs the forward passes.
        outputs: receives the scores and logits of the padding.
    """

    def __init__(self, call: Call, target: Target, outputs: OutputCollector):
        self._call, self._state, self._target, self._outputs = call, call.state, target, outputs
        self.is_visible = bool(call.config.return_dict_in_generate) or target.returns_cache

    @property
    def needs_plain_steps(self) -> bool:
        """Whether steps must not draft, because what the user sees besides the tokens could not be computed.

        Where padding takes part in the steps, a custom stopping criterion may end a row inside its draft, and an
        early-exit target would start from hidden states that the drafter has computed for other tokens. In a batch such
        a criterion may also cut off tokens of an earlier step, which a recurrent state cannot forget.
        """
        state, target, criteria = self._state, self._target, self._outputs.has_custom_criteria
        if self._call.processes_padding:
            ended = any(state.has_ended(row) for row in range(state.batch))
            return criteria or (target.reuses_drafter_states and ended)
        return criteria and self.is_visible and state.batch > 1 and target.has_recurrent_state

    def pending(self) -> list[int]:
        """The next input token of each row: its last token, or padding if it has ended."""
        state, columns = self._state, self._outputs.columns
        pending = state.pending()
        if self._call.processes_padding:
            assert state.pad_id is not None
            for row, text in enumerate(state.generated):
                if len(text) < columns:
                    pending[row] = state.pad_id
        return pending

    def processed_rows(self, active: Sequence[bool]) -> Sequence[bool]:
        """The rows that the target processes in a step: the active ones; all rows where padding takes part."""
        return [True] * len(active) if self._call.processes_padding else active

    def add_to(self, tree: DraftTree) -> DraftTree:
        """The draft; where padding takes part, ended rows get a chain of padding as deep as the deepest draft."""
        state = self._state
        if not self._call.processes_padding:
            return tree
        assert state.pad_id is not None
        depth = max(max(tree.depths(row)) for row in range(tree.batch))
        chains = [[state.pad_id] * depth if state.has_ended(row) else [] for row in range(tree.batch)]
        return merge_trees([tree, DraftTree.chains(chains)])

    def paths(self, result: VerificationResult) -> list[list[int] | None]:
        """The nodes of each row to keep in the cache: accepted ones; in an ended row, padding of decided columns."""
        if not self._call.processes_padding:
            return result.paths
        columns = [len(scores) for scores in result.scores]
        return [
            list(range(count - 1)) if path is None and count else path
            for path, count in zip(result.paths, columns, strict=True)
        ]

    def read_all(self) -> None:
        """At the end of a call with a visible cache: cut it to the output, process all padding, add its scores."""
        if not self.is_visible:
            return
        state, columns = self._state, self._outputs.columns
        if self._call.processes_padding and self._target.has_recurrent_state:
            # The steps have read the padding, and such a state cannot return to the end of a row's text.
            self._target.rewind([columns - 1] * state.batch)
            return
        self._target.rewind([len(text) - 1 for text in state.generated])
        missing = [columns - len(text) for text in state.generated]
        if not any(missing):
            return
        assert state.pad_id is not None
        tree = DraftTree.chains([[state.pad_id] * max(0, count - 1) for count in missing])
        logits = self._target.forward(tree, state.pending(), [count > 0 for count in missing]).float()
        self._target.commit([list(range(count - 1)) if count else None for count in missing])
        if (self._call.keeps_scores or self._call.keeps_logits) and not self._call.processes_padding:
            self._fill_in_scores(logits, missing)

    def _fill_in_scores(self, logits: torch.Tensor, missing: list[int]) -> None:
        rows = torch.arange(len(missing), device=logits.device)
        processors, outputs = self._call.processors, self._outputs
        assert processors is not None
        for column in range(outputs.columns - max(missing), outputs.columns):
            places = [column - (outputs.columns - count) for count in missing]
            nodes = torch.tensor([max(place, 0) for place in places], device=logits.device)
            column_logits = logits[rows, nodes].to(self._state.device)
            scores = processors.column(column, column_logits) if self._call.keeps_scores else column_logits
            for row, place in enumerate(places):
                if place >= 0 and missing[row]:
                    if self._call.keeps_scores:
                        outputs.scores[column][row] = scores[row]
                    if self._call.keeps_logits:
                        outputs.logits[column][row] = column_logits[row]
