"""N-gram candidates: proposes what followed earlier occurrences of the last tokens of the text.

All occurrences vote, each with odds that depend on how long its match is and that are learnt from the outcome of the
steps. So a long match gives a long chain, occurrences that disagree give a tree with the tokens of both, and a short
match little or nothing: the tree with the highest expected tokens per second is verified.

The probability of a token is the sum of the odds of the occurrences that propose it, divided by the odds of all
occurrences and of a token that none of them proposes; those grow with the number of different tokens proposed. It is
the estimate that prediction by partial matching makes, with votes in place of counts.

Source: Saxena, "Prompt Lookup Decoding" (2023); Oliaro et al., "SuffixDecoding" (2024), for drafts whose length follows
that of the match, trees weighted by frequency, and texts of earlier calls; Hu et al., "SAM Decoding" (2024); Cleary and
Witten, "Data Compression Using Adaptive Coding and Partial String Matching" (1984); Howard, "The Design and Analysis of
Efficient Lossless Data Compression Systems" (1993), method D, for the odds of a new token.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp
from typing import Any

import numpy as np

from hf_specgen import compat
from hf_specgen.call import Prediction, checked_count, memory
from hf_specgen.candidates.base import Candidates, Depth, DraftSession, TreeSetting, vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits, SearchSession, SearchTree, best_first
from hf_specgen.candidates.cross_tokenizer import target_tokenizer
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.ngram_history import ALIGNED, NEAR, OLDER, OWN, NgramHistory, Occurrence
from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, SEPARATOR, CopySource, NgramIndex
from hf_specgen.depth import Policy
from hf_specgen.heads.source import first_line
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.result import tested_nodes

MAX_DEPTH = 64  # maximum depth of k="auto": matches of dozens of tokens are accepted as a whole where a text is edited
MEAN_LENGTHS = (1, 2.5, 5.5, 11, 22, 44, 64)
"""Of the matches of each class: lengths from 1, 2, 4, 8, 16, 32 and 64 on. Length 0, a class of its own, is a position
after a mismatch in a copied passage."""
ODDS_OF_KINDS = ((0.3, 1.0, 16), (0.05, 1.5, 50), (0.0, 0.2, 6), (0.0, 0.4, 8), (2.0, 4.0, 60), (1.0, 2.0, 30))
"""Of each kind of occurrence: the odds of length 0, the odds for each token of a match, and the highest odds. Fitted to
recorded summaries and answers of a 7B model, edits, code, JSON and mathematics, with and without history."""
PRIOR_ODDS = tuple(
    odds
    for odds_of_length_0, slope, highest in ODDS_OF_KINDS
    for odds in (odds_of_length_0, *(min(slope * length, highest) for length in MEAN_LENGTHS))
)
"""Odds of each class before anything was learnt. The first one, a match of length 0 in the row's own text, stands for
frequent tokens: their part of the probability that the next token is one that no occurrence proposes."""
FREQUENT = 0
FREQUENT_TOKENS = 48
"""Frequent tokens that trees contain at most: with 24, answers take 0.7% more steps, with 64 none less."""
NEW_TOKEN_ODDS = 0.84
NEW_TOKEN_ODDS_PER_TOKEN = 0.66
"""Odds of a token that no occurrence proposes: these, and more for each different token that is proposed."""
MAX_OCCURRENCES = 24
"""Occurrences that vote, in the row's text and in the history each: with 12, summaries take 0.6% more steps."""

Vote = tuple[int, float, Sequence[Occurrence]]
"""A token that may come next, its probability, and the occurrences that propose it."""


class NgramCandidates(Candidates):
    """Drafts what followed earlier occurrences of the last tokens, in the row's own text and in a history.

    With an encoder-decoder, the text that the encoder reads counts as the beginning of the row's own.

    Needs no model and no training. The speedup is largest where output repeats the prompt or itself: editing,
    summaries, retrieval, code.

    Args:
        k, tree, policy: as for `Candidates`; drafts may be smaller, as where nothing matches.
        min_ngram: length of the shortest match that is considered. With 1, trees also contain the most frequent tokens
            of the text where no match is probable.
        max_ngram: matches of more tokens count as that long.
        history: earlier texts to look into besides the row's own.
        prediction: the expected output: an older version of a file, a template, an earlier answer. It is copied from
            its beginning on, and again after tokens that were changed, inserted or left out. Text or token ids; with
            several rows a list with one for each row (None for none), or one for all. `generate(prediction=…)` gives
            another one for a call. Text is encoded with `generate(tokenizer=…)`, or else the tokenizer of the target's
            checkpoint.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> NgramCandidates(k=10, tree=32)
        NgramCandidates(k=10, tree=32)
    """

    negligible_draft_cost = True
    latency_kind = "ngram"
    uses_prediction = True
    arguments = {**Candidates.arguments, "min_ngram": 1, "max_ngram": MAX_MATCH_LENGTH, "history": None}

    def __init__(
        self,
        k: Depth = "auto",
        *,
        tree: TreeSetting = None,
        min_ngram: int = 1,
        max_ngram: int = MAX_MATCH_LENGTH,
        history: NgramHistory | None = None,
        prediction: Prediction | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, tree=tree, max_k=MAX_DEPTH)
        if not isinstance(history, NgramHistory | None):
            raise TypeError(f"history must be an NgramHistory, such as NgramHistory.load(file), got {history!r}")
        self.min_ngram = checked_count("min_ngram", min_ngram, 1, "tokens")
        self.max_ngram = checked_count("max_ngram", max_ngram, self.min_ngram, "tokens", ", which is min_ngram")
        self.history = history
        self.prediction = prediction

    def with_history(self, history: NgramHistory) -> NgramCandidates:
        return self._changed(history=history)

    def start(self, batch: DraftBatch) -> DraftSession:
        return _NgramSession(self, batch)


class _NgramSession(SearchSession[Sequence[Occurrence]]):
    """The texts of the rows, indexed, and the odds of matches, which are kept for later calls."""

    def __init__(self, settings: NgramCandidates, batch: DraftBatch):
        super().__init__(batch, settings.k, settings.tree)
        self._settings = settings
        self._state = batch.state
        size = vocabulary_size(batch.model)
        history = settings.history
        if history is not None:
            history.check_vocabulary(size)
        key = (settings.profile_key(), round(batch.call.temperature, 2), bool(batch.predicted_tokens))
        self._odds_key = ("odds", *key)
        # In rejection sampling the text depends on the draft: it must not depend on earlier calls too.
        self._odds = memory.recall(batch.model if batch.carries_over else None, self._odds_key, MatchOdds)
        sources = batch.call.encoder_texts()
        self._prompts = [source + prompt for source, prompt in zip(sources, batch.state.prompts, strict=True)]
        self._texts: list[RowText] = []
        # Expected outputs, the most likely one first: the setting `prediction`, then the earlier answer with the same
        # noise, or without such an answer those of the history.
        answers = batch.predicted_tokens or [()] * batch.state.batch
        predictions = expected_outputs(settings.prediction, batch)
        for prompt, prediction, answer in zip(self._prompts, predictions, answers, strict=True):
            expected = [output for output in (prediction, answer) if output]
            if history is not None and not answer:
                expected += history.answers(prompt)
            # A prompt may have tokens that the target cannot choose, as in place of images.
            text = [token if 0 <= token < size else SEPARATOR for token in prompt]
            row = RowText(text, self._odds, history, settings.min_ngram, settings.max_ngram, expected, size)
            self._texts.append(row)

    def observe(self, result: VerificationResult) -> None:
        """Learn how likely matches of each length are accepted."""
        super().observe(result)
        for tree, emitted in zip(self._trees, result.tokens, strict=False):  # no trees where nothing was drafted
            self._odds.observe(outcomes(tree, emitted, self._odds))
        self._trees = []

    def end(self) -> None:
        if self.batch.carries_over:
            memory.store(self.batch.model, self._odds_key, self._odds)
        if self._settings.history is not None:
            for prompt, generated in zip(self._prompts, self._state.generated, strict=True):
                self._settings.history.add(prompt + generated, len(prompt))
            try:
                self._settings.history.sync(only_if_due=True)
            # safetensors raises its own errors; the answer is not lost, and the next call tries again.
            except Exception as error:
                reason = f"the history in {self._settings.history.file} is not exchanged: {first_line(error)}"
                warnings.warn(reason, stacklevel=compat.stacklevel_of_user())

    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[Sequence[Occurrence]]:
        """What followed earlier occurrences of the end of the row's text."""
        text = self._texts[row]
        text.extend(self._state.generated[row][len(text.index) - text.generated_start :])
        return text.propose(depth, limits)


def expected_outputs(prediction: Prediction | None, batch: DraftBatch) -> list[list[int]]:
    """The token ids of the expected output of each row, empty for none; the one of the call has precedence."""
    call_prediction = batch.call.settings.prediction
    texts: Any = prediction if call_prediction is None else call_prediction
    count = batch.state.batch
    if texts is None:
        return [[] for _ in range(count)]
    texts = _as_list(texts)
    rows = [texts] * count if _is_text(texts) else texts  # one text is that of all rows
    rows = list(map(_as_list, rows)) if isinstance(rows, list) else [rows]
    if not all(row is None or _is_text(row) for row in rows):
        raise TypeError(f"prediction must be a text, token ids, or a list with one of them for each row, got {texts!r}")
    if len(rows) != count:
        raise ValueError(f"prediction has {len(rows)} entries for {count} rows; give one for each row")
    size = vocabulary_size(batch.model)
    expected = []
    for row in rows:
        if isinstance(row, str):
            row = target_tokenizer(batch.call).encode(row, add_special_tokens=False)
        expected.append([int(token) for token in row or ()])
        if wrong := [token for token in expected[-1] if not 0 <= token < size]:
            raise ValueError(f"prediction has token {wrong[0]}, but the target's vocabulary ends at {size - 1}")
    return expected


def _as_list(value: Any) -> Any:
    """A tensor, array or sequence of ids or rows as a list; anything else as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _is_text(value: Any) -> bool:
    """Whether this is a text, or a list of token ids."""
    is_ids = isinstance(value, list) and all(isinstance(token, int | np.integer) for token in value)
    return is_ids or isinstance(value, str)


class RowText:
    """The text of one row.

    Example:
        >>> text = RowText([5, 6, 7, 8, 5, 6], MatchOdds())
        >>> text.propose(2, SearchLimits(nodes=2)).tokens
        [7, 8]
    """

    def __init__(
        self,
        prompt: Sequence[int],
        odds: MatchOdds,
        history: NgramHistory | None = None,
        min_ngram: int = 1,
        max_ngram: int = MAX_MATCH_LENGTH,
        expected: Sequence[Sequence[int]] = (),
        vocabulary: int | None = None,
    ):
        # Expected outputs are indexed before the text, as if each had been copied from up to its beginning.
        self.index = NgramIndex()
        self._sources: list[CopySource] = []
        for output in expected:
            start = len(self.index)
            self.index.extend([*output, SEPARATOR])
            kind = OLDER if start else ALIGNED  # the first one is the most likely
            self._sources.append(CopySource(kind, start, start + len(output), position=start))
        self._text_start = len(self.index)
        self._sources.append(CopySource(NEAR, self._text_start))
        self.index.extend(prompt)
        self.generated_start = len(self.index)  # where the generated tokens begin in the index
        self._odds = odds
        self._history = history
        self._vocabulary = vocabulary
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._matches: dict[int, int] = {}  # of the last proposal: position -> match length
        self._next_count = 0  # length of the text at which its tokens are counted again
        self._frequent: list[tuple[int, float]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if tokens:
            for source in self._sources:
                source.follow(tokens, self.index.tokens, self._matches)
            self.index.extend(tokens)

    def propose(self, depth: int, limits: SearchLimits) -> SearchTree[Sequence[Occurrence]]:
        """The most probable candidate tokens after the text, tagged with the occurrences that propose them."""

        def best_match(candidate: Vote, level: int) -> tuple[float, int]:
            """The highest odds of the occurrences that propose a token, and the length of that match."""
            _, _, proposers = candidate
            matches = [(length, kind) for *_, length, kind in proposers]
            return max((self._odds.values[match_class(kind, length + level)], length) for length, kind in matches)

        def children(voters: Sequence[Occurrence], level: int) -> list[Vote]:
            votes = vote(voters, level, self._odds)
            if limits.is_chain and votes:
                # Repetitions of one passage are not independent: the odds of the best match decide, not their sum.
                return [max(votes, key=lambda candidate: best_match(candidate, level))]
            return self._with_frequent(votes) if self._min_ngram == 1 and level == 0 else votes

        def order(occurrence: Occurrence) -> int:  # by position; those without a match come last
            _, end, position, length, _ = occurrence
            return position if length else end

        occurrences = self._occurrences()
        if limits.is_chain:  # of equal odds the earliest match decides
            occurrences.sort(key=order)
        return best_first(occurrences, children, depth, limits)

    def _with_frequent(self, votes: list[Vote]) -> list[Vote]:
        """Votes, and the most frequent tokens that no occurrence proposes; these get no children in the tree.

        Without them n-grams have 0.93 of the projected speed.
        """
        if len(self.index) >= self._next_count:
            self._next_count = len(self.index) + 32
            counts = Counter(self.index.tokens[self._text_start :]).most_common(FREQUENT_TOKENS)
            total = len(self.index) - self._text_start
            self._frequent = [(token, count / total) for token, count in counts if token != SEPARATOR]
        # The probability that the next token is one that no occurrence proposes.
        remaining = self._odds.values[FREQUENT] * (1.0 - sum([probability for _, probability, _ in votes]))
        proposed = {token for token, _, _ in votes}
        others: list[Vote] = [
            (token, remaining * frequency, []) for token, frequency in self._frequent if token not in proposed
        ]
        return sorted([*votes, *others], key=lambda candidate: -candidate[1])

    def _occurrences(self) -> list[Occurrence]:
        """Occurrences of the end of the text, copy positions included; keeps the matches for `extend`."""
        text = self.index.tokens
        end = len(self.index)
        tail = text[-MAX_MATCH_LENGTH:]
        self._matches = self.index.occurrences(tail, MAX_OCCURRENCES)
        resumed = [position for source in self._sources for position in source.resumed() if position < end]
        lengths = dict.fromkeys(resumed, 0) | self._matches
        occurrences: list[Occurrence] = [(text, end, at, length, self._kind(at)) for at, length in lengths.items()]
        if self._history is not None:
            occurrences += self._history.find(tail, MAX_OCCURRENCES, self._vocabulary)
        return [
            (text, end, position, min(length, self._max_ngram), kind)
            for text, end, position, length, kind in occurrences
            if max(1, length) >= self._min_ngram or kind >= ALIGNED
        ]

    def _kind(self, position: int) -> int:
        """The kind of an occurrence in the row's own text or in an expected output."""
        return next((source.kind for source in self._sources if source.is_near(position)), OWN)


class MatchOdds:
    """The odds of every class of occurrences: the acceptance of matches by kind and length."""

    def __init__(self, values: Sequence[float] = PRIOR_ODDS):
        self.values = list(values)
        self.new_token_factor = 1.0  # of the odds of a token that none proposes: calls differ in how much they repeat

    def observe(self, outcomes: Iterable[tuple[int, float, bool]]) -> None:
        """Learn from verified tokens: the class, the expected probability and whether the token was accepted."""
        for class_index, expected, accepted in outcomes:
            change = exp(0.2 * (accepted - expected))
            prior = PRIOR_ODDS[class_index]
            self.values[class_index] = min(prior * 20, max(prior / 20, self.values[class_index] * change))
            if class_index != FREQUENT:
                self.new_token_factor = min(20.0, max(0.05, self.new_token_factor / change))

    def for_later_call(self) -> MatchOdds:
        """A copy of the odds for another call, with `new_token_factor` at 1 again."""
        return MatchOdds(self.values)


def match_class(kind: int, length: int) -> int:
    """The index of the class of an occurrence in `PRIOR_ODDS`, by its kind and the length of its match."""
    return kind * (1 + len(MEAN_LENGTHS)) + min(length, MAX_MATCH_LENGTH).bit_length()


def vote(voters: Sequence[Occurrence], depth: int, odds: MatchOdds) -> list[Vote]:
    """The tokens that occurrences propose, their probabilities, and who proposes them; most probable first.

    An occurrence that continues along the path so far has a match that is longer by the depth.

    Example:
        >>> text = [1, 2, 3, 1, 2, 4, 1, 2]
        >>> votes = vote([(text, 8, 5, 2, OWN), (text, 8, 2, 2, OWN)], 0, MatchOdds())
        >>> {token: round(probability, 2) for token, probability, _ in votes}
        {4: 0.35, 3: 0.35}
    """
    values: dict[int, float] = {}
    proposers: dict[int, list[Occurrence]] = {}
    for voter in voters:
        text, end, position, length, kind = voter
        if position + depth < end and (token := text[position + depth]) != SEPARATOR:
            value = odds.values[match_class(kind, length + depth)]
            if token in values:
                values[token] += value
                proposers[token].append(voter)
            else:
                values[token] = value
                proposers[token] = [voter]
    total = sum(values.values()) + odds.new_token_factor * (NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN * len(values))
    votes: list[Vote] = [(token, value / total, proposers[token]) for token, value in values.items()]
    return sorted(votes, key=lambda candidate: -candidate[1]) if len(votes) > 1 else votes


def outcomes(
    tree: SearchTree[Sequence[Occurrence]], emitted: Sequence[int], odds: MatchOdds
) -> list[tuple[int, float, bool]]:
    """What `MatchOdds.observe` learns from a verified tree: each node counts for its voter with the largest odds."""
    depths: dict[int, int] = {-1: 0}
    observed: list[tuple[int, float, bool]] = []
    for node, accepted in tested_nodes(tree.tokens, tree.parents, emitted):
        parent = tree.parents[node]
        depth = depths[parent]
        depths[node] = depth + 1
        expected = tree.probability[node] / (tree.probability[parent] if parent >= 0 else 1.0)
        classes = [match_class(kind, length + depth) for _, _, _, length, kind in tree.tags[node]]
        observed.append((max(classes, key=odds.values.__getitem__, default=FREQUENT), expected, accepted))
    return observed
