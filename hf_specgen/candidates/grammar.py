"""Drafting under a grammar: tokens that it forces are drafted, and tokens that it forbids are left out of every draft.

The grammar is that of a logits processor of the call, from xgrammar, llguidance, outlines or lm-format-enforcer. Its
state is forked along the branches of the draft tree; the processor's own state is left alone, so nothing has to be
restored after a rejection. A grammar leaves few tokens in most places, so that weak evidence decides between them where
the drafter proposes nothing: what followed in the row's text after the longest match, and how frequent whitespace is.

Source: "jump-forward decoding", Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs"
(2024), section 3; Dong et al., "XGrammar" (2024), for matchers that are forked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.call import Call
from hf_specgen.candidates.base import DraftChange, TreeSetting, vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first, draft_rows
from hf_specgen.candidates.cross_tokenizer import target_tokenizer
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.merged_tree import node_children
from hf_specgen.candidates.ngram import MatchOdds, vote
from hf_specgen.candidates.ngram_history import OWN
from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, NgramIndex
from hf_specgen.libraries import GrammarState, grammar_states
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.tree import DraftTree

FEW_TOKENS = 512  # allowed tokens up to which each of them may be drafted, without a match in the text


def states_of_rows(batch: DraftBatch) -> list[GrammarState]:
    """The state of each row's grammar at the beginning of a call; empty if no processor has a grammar that is known."""
    if not batch.call.logits_processor or batch.model.get_output_embeddings() is None:
        return []
    vocab = vocabulary_size(batch.model)
    rows = batch.state.batch
    texts = batch.call.state.prefix(batch.call.state.prompt_length).tolist()
    for processor in batch.call.logits_processor:
        states = grammar_states(processor, texts, vocab)
        if len(states) in (1, rows):
            return states if len(states) == rows else states * rows
    return []


def grammar_drafts(batch: DraftBatch, tree: TreeSetting) -> DraftChange | None:
    """Drafts with this tree setting that obey the grammar of the call; None if there are none."""
    # An early-exit target has run its first layers on the nodes of a draft: others cannot be added to it.
    if not batch.call.settings.grammar_drafts or isinstance(batch.target, EarlyExitTarget):
        return None
    states = states_of_rows(batch)
    return GrammarDrafts(batch, states, tree) if states else None


class _Texts(dict[int, str | None]):
    """The texts of tokens, by a target's tokenizer; None for no token (-1), and if there is no tokenizer."""

    def __init__(self, call: Call):
        super().__init__({-1: None})
        self._tokenizer = _tokenizer_of(call)

    def __missing__(self, token: int) -> str | None:
        self[token] = None if self._tokenizer is None else str(self._tokenizer.decode([token]))
        return self[token]

    def is_line_break(self, token: int) -> bool:
        """Whether a token is whitespace with a line break."""
        return self.kind(token) == "space" and "\n" in (self[token] or "")

    def kind(self, token: int) -> str:
        """Whether a token is nothing but whitespace, "space", or another one, "text"."""
        text = self[token]
        return "text" if text is None or text.strip() else "space"


class _Choices:
    """The tokens that a grammar allows in one of its states."""

    def __init__(self, allowed: NDArray[np.bool_], texts: _Texts):
        self.count = int(allowed.sum())
        self.few = np.flatnonzero(allowed).tolist() if self.count <= FEW_TOKENS else []  # the tokens, if they are few
        known = {token: texts[token] for token in self.few}
        contents = {token: "".join(text.split()) for token, text in known.items() if text is not None}
        longest = max(contents.values(), key=len, default="")
        are_known = len(contents) == len(self.few)
        is_forced = are_known and longest and all(longest.startswith(text) for text in contents.values())
        # If all of them are whitespace or begin one text, whitespace aside: how many of its characters each adds.
        self.forced = {token: len(text) for token, text in contents.items() if text} if is_forced else {}
        self.whitespace = {token for token, text in contents.items() if text == ""}
        self.spaced = {token for token in self.forced if (known[token] or "").startswith(" ")}


def _tokenizer_of(call: Call) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, if one was given or is in its checkpoint."""
    if call.tokenizer is None and not cast(PreTrainedModel, call.model).name_or_path:
        return None
    try:
        return target_tokenizer(call)
    except (OSError, ValueError):
        return None


class _Node(NamedTuple):
    """A node of the search: the drafter's node or None, the grammar before the node's token, the tokens of its path."""

    drafted: int | None
    before: GrammarState | None
    path: tuple[int, ...]


class GrammarDrafts:
    """Extends and filters drafts by the grammar of each row, given in its state of the beginning; a `DraftChange`."""

    def __init__(self, batch: DraftBatch, states: Sequence[GrammarState], tree: TreeSetting):
        texts = _Texts(batch.call)
        self._batch = batch
        self._rows = [_Row(prompt, state, texts) for prompt, state in zip(batch.state.prompts, states, strict=True)]
        self._tree_setting = tree

    def __call__(self, tree: DraftTree, max_depths: Sequence[int]) -> DraftTree:
        """The most probable tree of what the session drafted and the grammar allows, and of what the grammar forces."""
        if tree.q is not None:  # a sampled node must not be left out because of its token
            return tree
        setting = self._tree_setting
        if setting != "auto" and not isinstance(setting, int):
            setting = None if tree.is_chain else tree.nodes
        for row, generated in zip(self._rows, self._batch.state.generated, strict=True):
            row.update(generated)

        def search(row: int, limits: SearchLimits) -> SearchTree[_Node]:
            return self._rows[row].search(node_children(tree, row), max_depths[row], limits)

        return draft_rows(self._batch, setting, max_depths, search)[0]


class _Row:
    """The text of one row, its layout, and the state of its grammar; None once the text has left the grammar."""

    def __init__(self, prompt: Sequence[int], state: GrammarState, texts: _Texts):
        self._texts = texts
        self._odds = MatchOdds()
        self._index = NgramIndex(prompt)
        self._counts = Counter(prompt)
        self._state: GrammarState | None = state
        self._generated = 0  # tokens read
        self._choices: dict[bytes, _Choices] = {}
        self._indentation = -1  # the last whitespace token with a line break
        # How often each kind of token followed another, where whitespace and one text were allowed.
        self._followed = Counter[tuple[str, str]]()
        self._longest = Counter[bool]()  # how often a token of a forced text was the longest possible one, and not

    def update(self, generated: Sequence[int]) -> None:
        """Append the tokens that were generated since the last draft."""
        for token in generated[self._generated :]:
            state = self._state
            if state is not None and state.allowed[token]:
                choices = self._choices_of(state)
                if token in choices.forced and len(choices.forced) > 1:
                    self._longest[choices.forced[token] == max(choices.forced.values())] += 1
                if choices.forced and choices.whitespace:
                    self._followed[self._texts.kind(self._last()), self._texts.kind(token)] += 1
                self._state = state.after(token)
            else:
                self._state = None
            self._indentation = token if self._texts.is_line_break(token) else self._indentation
            self._index.extend([token])
            self._counts[token] += 1
        self._generated = len(generated)

    def _choices_of(self, state: GrammarState) -> _Choices:
        key = np.packbits(state.allowed).tobytes()
        if key not in self._choices:
            self._choices[key] = _Choices(state.allowed, self._texts)
        return self._choices[key]

    def search(
        self, drafted: dict[int, list[tuple[int, int, float]]], depth: int, limits: SearchLimits
    ) -> SearchTree[_Node]:
        """The most probable tree that obeys the grammar; `drafted` are the children of each node of the drafter."""

        def children(node: _Node, _: int) -> Iterator[tuple[int, float, _Node]]:
            state = node.before
            if state is not None and node.path:
                state = state.after(node.path[-1])
            below = () if node.drafted is None else drafted.get(node.drafted, ())
            nodes = {token: child for child, token, _ in below}
            proposed = {token: acceptance for _, token, acceptance in below if token >= 0}
            for token, value in self._ranked(state, node.path, proposed):
                yield token, value, _Node(nodes.get(token), state, (*node.path, token))

        return best_first(_Node(-1, self._state, ()), children, depth, limits)

    def _ranked(
        self, state: GrammarState | None, path: tuple[int, ...], proposed: dict[int, float]
    ) -> list[tuple[int, float]]:
        """The tokens that may follow and their probabilities, most probable first."""
        if state is None:
            return sorted(proposed.items(), key=lambda one: -one[1])
        allowed = state.allowed
        choices = self._choices_of(state)
        if choices.count <= 1:
            return [(int(allowed.argmax()), 1.0)] if choices.count else []
        values: dict[int, float] = {}
        for estimate in (proposed, self._votes(path), self._expected(path, choices)):
            # A prompt may have tokens that the target cannot choose, as in place of images.
            estimate = {token: value for token, value in estimate.items() if 0 <= token < len(allowed)}
            # Of the allowed ones of its tokens, in what the estimates before it leave of the probability.
            forbidden = sum(value for token, value in estimate.items() if not allowed[token])
            scale = max(0.0, 1.0 - sum(values.values())) / max(1.0 - forbidden, 1e-9)
            for token, value in estimate.items():
                if allowed[token]:
                    values[token] = values.get(token, 0.0) + scale * value
        return sorted(values.items(), key=lambda one: -one[1])

    def _votes(self, path: tuple[int, ...]) -> dict[int, float]:
        """Probabilities of tokens by what followed matches in the text."""
        tokens = self._index.tokens
        tail = [*self._index.tokens[-MAX_MATCH_LENGTH:], *path]
        matches = self._index.occurrences(tail, 8).items()
        votes = vote([(tokens, len(tokens), at, length, OWN) for at, length in matches], 0, self._odds)
        return {token: value for token, value, _ in votes}

    def _expected(self, path: tuple[int, ...], choices: _Choices) -> dict[int, float]:
        """Probabilities of allowed tokens by the grammar: forced text, and whitespace as it was used before."""
        if not choices.forced:
            return dict.fromkeys(choices.few, 1.0 / max(1, len(choices.few)))
        last = self._last(path)
        counts = self._counts
        # Some targets write forced text in shorter tokens than they could.
        base = (self._longest[True] + 1.0) / (self._longest[False] + 0.5)
        # Tokenizers give the last of several spaces to the text after them: more than one space was written.
        prior = 0.5 if (self._texts[last] or "").endswith(" ") else 0.1
        forced = {
            token: ((prior if token in choices.spaced else 0.1) + counts[token]) * base ** min(length, 64)
            for token, length in choices.forced.items()
        }
        if not choices.whitespace:
            return _normalised(forced, 1.0)
        # Whitespace is as probable as it was after tokens of this kind.
        kind = self._texts.kind(last)
        spaces = self._followed[kind, "space"]
        texts = self._followed[kind, "text"]
        is_space = (spaces + 0.5) / (spaces + texts + (1.0 if kind == "text" else 2.5))
        used = {token: float(counts[token]) for token in choices.whitespace & counts.keys()}
        indentation = next(filter(self._texts.is_line_break, reversed(path)), self._indentation)
        if indentation in choices.whitespace:
            used[indentation] = used.get(indentation, 0.0) + sum(used.values())
        return _normalised(forced, 1.0 - is_space) | _normalised(used, is_space)

    def _last(self, path: tuple[int, ...] = ()) -> int:
        """The last token of the text and a path, -1 if there is none."""
        return path[-1] if path else self._index.tokens[-1] if len(self._index) else -1


def _normalised(weights: Mapping[int, float], total: float) -> dict[int, float]:
    """Probabilities in proportion to weights."""
    scale = total / max(sum(weights.values()), 1e-9)
    return {token: scale * weight for token, weight in weights.items()}
