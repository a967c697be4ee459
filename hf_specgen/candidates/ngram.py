"""N-gram candidates: proposes what followed earlier occurrences of the last tokens of the text.

All occurrences vote, each with odds that depend on how long its match is and that are learnt from the outcome of the
steps. So a long match gives a long chain, occurrences that disagree give a tree with both continuations, and a short
match little or nothing: the tree with the highest expected tokens per second is verified.

Source: Saxena, "Prompt Lookup Decoding" (2023); Oliaro et al., "SuffixDecoding" (2024), for drafts whose length follows
that of the match, trees weighted by frequency, and texts of earlier calls; Hu et al., "SAM Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.candidates.base import Candidates, Depth, DraftCall, DraftSession, Tree, check_tree
from hf_specgen.candidates.ngram_history import NgramHistory as NgramHistory
from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH
from hf_specgen.candidates.ngram_odds import MatchOdds
from hf_specgen.candidates.ngram_text import MatchLengths, RowText
from hf_specgen.candidates.ngram_tree import Limits, NgramTree
from hf_specgen.candidates.tree_search import tree_size
from hf_specgen.depth import Policy
from hf_specgen.memory import memory
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

MAX_DEPTH = 64
"""Maximum depth of k="auto": matches of dozens of tokens are accepted as a whole where a text is edited."""
MIN_JOINT = 0.05
"""Probability of being accepted below which a token is not drafted if the size of drafts is given by k alone."""


class NgramCandidates(Candidates):
    """Drafts what followed earlier occurrences of the last tokens, in the row's own text and in a history.

    With an encoder-decoder, the text that the encoder reads counts as the beginning of the row's own.

    Needs no model and no training. The speedup is largest where output repeats input: editing, summaries, retrieval,
    code, JSON.

    Args:
        k: maximum depth of a draft, in tokens; "auto" for as many as are expected to be faster.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the maximum size of every tree. Left out, it is "auto" with k="auto", and with a
            number for k the draft consists of `branches` paths of up to k tokens.
        min_ngram: length of the shortest match that is considered. With 1, the most frequent tokens of the text are
            proposed too where there is no match.
        max_ngram: matches of more tokens count as that long.
        branches: how many different continuations are verified at once, as a tree; left out, any number that the size
            of the tree allows, and one if k is a number.
        history: earlier texts to look into besides the row's own.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> NgramCandidates(k=10, branches=4)
        NgramCandidates(k=10, branches=4)
    """

    negligible_draft_cost = True

    def __init__(
        self,
        k: Depth = "auto",
        *,
        tree: Tree = None,
        min_ngram: int = 1,
        max_ngram: int = MAX_MATCH_LENGTH,
        branches: int | None = None,
        history: NgramHistory | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=MAX_DEPTH)
        for name, value in (("min_ngram", min_ngram), ("branches", branches)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram must be at least min_ngram={min_ngram}, got {max_ngram}")
        self.tree = check_tree(tree, k)
        self.adaptive_tree = self.tree == "auto"
        self.min_ngram, self.max_ngram, self.history = min_ngram, max_ngram, history
        self.branches = 1 if branches is None and self.tree is None else branches

    def start(self, call: DraftCall) -> DraftSession:
        return _NgramSession(self, call)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        key = (self.k, str(self.tree), self.min_ngram, self.max_ngram, str(self.branches), self.history is not None)
        return ("ngram", *key)

    def __repr__(self) -> str:
        defaults = {"tree": None, "min_ngram": 1, "max_ngram": MAX_MATCH_LENGTH, "branches": None, "history": None}
        values = [
            f", {name}={getattr(self, name)!r}" for name, usual in defaults.items() if getattr(self, name) != usual
        ]
        return f"NgramCandidates(k={self.k}{''.join(values)}{self._show_policy()})"


class _NgramSession(DraftSession):
    passes = ()

    def __init__(self, settings: NgramCandidates, call: DraftCall):
        super().__init__(call)
        self._settings, self._state = settings, call.state
        self._key = (settings.profile_key(), round(call.temperature, 2))
        # In rejection sampling the text depends on the draft: it must not depend on earlier calls too.
        self._odds = memory.recall(call.model if self.remembers else None, ("odds", *self._key), MatchOdds)
        lengths = MatchLengths(settings.min_ngram, settings.max_ngram)
        self._texts = [
            RowText(source + prompt, self._odds, settings.history, lengths)
            for source, prompt in zip(call.encoder_texts(), call.state.prompts, strict=True)
        ]
        self._trees: list[NgramTree] = []
        self._read = [0] * call.state.batch  # generated tokens of each row that its text contains

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, self._settings.branches)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, 1, is_prefill=True)  # the prefill pass verifies chains

    def observe(self, result: VerificationResult) -> None:
        """Learn how likely matches of each length are accepted."""
        drafts = zip(self._trees, result.tokens, strict=True)
        outcomes = [outcome for tree, emitted in drafts for outcome in tree.outcomes(emitted, self._odds)]
        self._odds.observe_all(outcomes)
        self._trees = []

    def end(self) -> None:
        if self.remembers:
            memory.store(self.call.model, ("odds", *self._key), self._odds)
        if self._settings.history is not None:
            for prompt, generated in zip(self._state.prompts, self._state.generated, strict=True):
                self._settings.history.add(prompt + generated, len(prompt))

    def _draft(self, max_depths: Sequence[int], branches: int | None, is_prefill: bool = False) -> DraftTree:
        settings = self._settings
        depths = [min(settings.k, depth) for depth in max_depths]
        shape = tree_size(settings.tree, self.call, depths, is_prefill=is_prefill)
        if shape.is_fastest:
            nodes, min_joint = shape.max_nodes, shape.min_probability
        else:
            size = settings.tree if isinstance(settings.tree, int) else settings.k * (branches or 1)
            nodes, min_joint = size, 0.0 if isinstance(settings.tree, int) else MIN_JOINT
        leaves = 2**31 if branches is None else branches
        self._trees = [self._grow(row, Limits(depth, nodes, min_joint, leaves)) for row, depth in enumerate(depths)]
        count = nodes
        if shape.is_fastest:
            count = shape.best_size([tree.joint for tree in self._trees])
        joint = tuple([tuple(tree.joint[:count]) for tree in self._trees])
        return DraftTree.from_nodes([tree.first(count) for tree in self._trees], probability=joint)

    def _grow(self, row: int, limits: Limits) -> NgramTree:
        if limits.depth == 0:
            return NgramTree()
        return self._text(row).propose(limits)

    def _text(self, row: int) -> RowText:
        """The row's text, with all tokens that were generated."""
        text, generated = self._texts[row], self._state.generated[row]
        text.extend(generated[self._read[row] :])
        self._read[row] = len(generated)
        return text
