"""Prompt lookup: guess that the text goes on as it did after an earlier occurrence of its last few tokens.

Which occurrence: the longest match; of several that long, the one whose next token most of all matches agree on; then
the most recent. How far it is followed depends on the evidence, see `_trusted_length`.

Source: Saxena, "Prompt Lookup Decoding" (2023); the history is the idea of Oliaro et al., "SuffixDecoding" (2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hf_specgen.candidates.base import Candidates, Depth, DraftSession
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.depth import Policy
from hf_specgen.state import Call
from hf_specgen.tree import DraftTree, Parents, merge_paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MATCHES_PER_BRANCH = 4
FEWEST_MATCHES = 8
HISTORY_HANDICAP = 1
TOKENS_PER_MATCHED_TOKEN = 4
LONE_MATCH = 2


class NgramHistory:
    """Texts of earlier calls, and any corpus of yours, for `NgramCandidates` to look into.

    Args:
        max_tokens: how much is remembered at least, before the oldest is forgotten; up to twice as much is held.
        max_ngram: length of the longest match that is told apart from a shorter one.

    Raises:
        ValueError: if `max_tokens` is not positive.

    Example:
        >>> history = NgramHistory(max_tokens=100_000)
        >>> candidates = NgramCandidates(k=5, history=history)  # every call that uses it adds its texts
    """

    def __init__(self, max_tokens: int = 1_000_000, *, max_ngram: int = 8):
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.max_tokens = max_tokens
        self.index = NgramIndex(max_ngram)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text, given as token ids."""
        self.index.extend([*tokens[-self.max_tokens :], SEPARATOR])
        if len(self.index.tokens) > 2 * self.max_tokens:
            kept = self.index.tokens[-self.max_tokens - 1 :]
            self.index = NgramIndex(self.index.max_ngram)
            self.index.extend(kept)

    def add_texts(self, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """Remember texts, e.g. `dataset["text"]`."""
        for text in texts:
            self.add(tokenizer(text, add_special_tokens=False)["input_ids"])

    def __len__(self) -> int:
        return len(self.index.tokens)


class NgramCandidates(Candidates):
    """Guesses what followed earlier occurrences of the last tokens, in the row's own text and in a history.

    Costs no model and no training. Pays where output repeats input: editing, summaries, retrieval, code, JSON.

    Args:
        k: greatest length of a draft, in tokens; "auto" for as many as pay. A single branch is followed only as far as
            the evidence goes: a match of one token for as long as another occurrence agrees, every further matched
            token buys 4 tokens more.
        min_ngram: length of the shortest match that is considered.
        max_ngram: length of the longest match that is told apart from a shorter one.
        branches: how many different continuations are verified at once, as a tree, each with its full length k. Worth
            it where the target verifies many tokens in about the time of one.
        history: earlier texts to look into besides the row's own; counts as a match one token shorter.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> NgramCandidates(k=10, branches=4)
        NgramCandidates(k=10, min_ngram=1, max_ngram=8, branches=4, history=None)
    """

    negligible_draft_cost = True

    def __init__(
        self,
        k: Depth = "auto",
        *,
        min_ngram: int = 1,
        max_ngram: int = 8,
        branches: int = 1,
        history: NgramHistory | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=16)
        for name, value in (("min_ngram", min_ngram), ("branches", branches)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram must be at least min_ngram={min_ngram}, got {max_ngram}")
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.branches, self.history = branches, history

    def start(self, call: Call) -> DraftSession:
        return _NgramSession(self, call)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        key = (self.k, self.min_ngram, self.max_ngram, self.branches, self.history is not None)
        return ("ngram", *key)

    def __repr__(self) -> str:
        names = ("k", "min_ngram", "max_ngram", "branches", "history")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"NgramCandidates({values}{self._show_policy()})"


class _NgramSession(DraftSession):
    passes = ()

    def __init__(self, settings: NgramCandidates, call: Call):
        super().__init__(call)
        self._settings, self._state = settings, call.state
        self._indices = [NgramIndex(settings.max_ngram) for _ in call.state.prompts]
        for index, prompt in zip(self._indices, call.state.prompts, strict=True):
            index.extend(prompt)

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return DraftTree.from_nodes([self._draft_row(row, depth) for row, depth in enumerate(budget)])

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self.draft(budget)

    def end(self) -> None:
        if self._settings.history is not None:
            for prompt, generated in zip(self._state.prompts, self._state.generated, strict=True):
                self._settings.history.add(prompt + generated)

    def _draft_row(self, row: int, budget: int) -> tuple[list[int], Parents]:
        if budget == 0:
            return [], ()
        index = self._indices[row]
        index.extend(self._state.generated[row][len(index.tokens) - len(self._state.prompts[row]) :])
        matches = self._matches(index)
        k = min(self._settings.k, budget)
        if not matches:
            return [], ()
        if self._settings.branches == 1:
            return merge_paths([matches[0].continuation(_trusted_length(matches, k))])
        return merge_paths(_different(matches, k, self._settings.branches))

    def _matches(self, index: NgramIndex) -> list[_Match]:
        """Places to copy from, the best first."""
        settings = self._settings
        limit = max(FEWEST_MATCHES, MATCHES_PER_BRANCH * settings.branches)
        found = [
            _Match(n, True, index.tokens[position], index.tokens, position)
            for n, position in index.matches(index.tokens, settings.min_ngram, limit)
        ]
        if settings.history is not None:
            past = settings.history.index
            found += [
                _Match(
                    min(n, settings.max_ngram) - HISTORY_HANDICAP, False, past.tokens[position], past.tokens, position
                )
                for n, position in past.matches(index.tokens, settings.min_ngram, limit)
                if past.tokens[position] != SEPARATOR
            ]
        votes = Counter(match.next_token for match in found)
        return sorted(found, key=lambda match: (-match.length, not match.own, -votes[match.next_token]))


class _Match(NamedTuple):
    """An earlier occurrence of the last `length` tokens, in the row's own text or not; `tokens[position]` followed."""

    length: int
    own: bool
    next_token: int
    tokens: Sequence[int]
    position: int

    def continuation(self, k: int) -> list[int]:
        return continuation(self.tokens, self.position, k)


def _trusted_length(matches: Sequence[_Match], k: int) -> int:
    """How far to follow the first match: as far as another one of its length agrees, and further if it is longer.

    A lone match of one token is right in a third of the cases, one that another occurrence contradicts far less often,
    a match of 8 tokens in nine of ten: see table `matches` in `benchmarks/README.md`.
    """
    first = matches[0]
    rivals = [match for match in matches[1:] if (match.length, match.own) == (first.length, first.own)]
    agreed = LONE_MATCH
    if rivals:
        path = first.continuation(k)
        agreed = max(_common_prefix(path, rival.continuation(k)) for rival in rivals)
    return max(0, min(k, TOKENS_PER_MATCHED_TOKEN * (first.length - 1) + agreed))


def _different(matches: Sequence[_Match], k: int, branches: int) -> list[list[int]]:
    """The continuations of the first matches that lead to different texts; of two that agree, the longer."""
    paths: list[list[int]] = []
    for match in matches:
        path = match.continuation(k)
        for index, known in enumerate(paths):
            if known[: len(path)] == path[: len(known)]:
                paths[index] = max(known, path, key=len)
                break
        else:
            paths.append(path)
            if len(paths) == branches:
                break
    return paths


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def continuation(tokens: Sequence[int], position: int, k: int) -> list[int]:
    """The `k` tokens from `position` on; at the end of the text it goes on in itself, at a separator it stops.

    Example:
        >>> continuation([7, 1, 2, 1, 2], 3, 5)
        [1, 2, 1, 2, 1]
    """
    path = list(tokens[position : position + k])
    while len(path) < k:
        path.append(path[len(path) - (len(tokens) - position)])
    return path[: path.index(SEPARATOR)] if SEPARATOR in path else path
