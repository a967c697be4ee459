"""Drafting under a grammar: tokens that it forces are drafted, and tokens that it forbids are left out of every draft.

The grammar is that of a logits processor of the call, from xgrammar, llguidance, outlines or lm-format-enforcer. Its
state is forked along the branches of the draft tree; the processor's own state is left alone, so nothing has to be
restored after a rejection. A grammar leaves few tokens in most places, so that weak evidence decides between them where
the drafter proposes nothing: what followed in the row's text after the longest match, and how frequent a token is.

Source: "jump-forward decoding", Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs"
(2024), section 3; Dong et al., "XGrammar" (2024), for matchers that are forked.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_specgen.candidates.base import DraftCall, DraftSession, WrappedSession, vocabulary_size
from hf_specgen.candidates.combined import node_children
from hf_specgen.candidates.cross_tokenizer import load_tokenizer
from hf_specgen.candidates.ngram import MatchOdds, vote
from hf_specgen.candidates.ngram_history import OWN
from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, NgramIndex
from hf_specgen.candidates.tree_search import SearchLimits, SearchTree, best_first, draft_rows
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.tree import DraftTree

FEW_TOKENS = 128
"""Allowed tokens up to which each of them may be drafted, without a match in the text."""
MATCHED = 0.8
"""Probability of tokens that followed a match in the text, against other allowed tokens."""


class GrammarState(ABC):
    """A grammar after some tokens; immutable."""

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """`[vocab]` which tokens may follow."""
        return self._allowed()

    @abstractmethod
    def _allowed(self) -> NDArray[np.bool_]:
        """What `allowed` keeps."""

    @abstractmethod
    def after(self, token: int) -> GrammarState:
        """The state after an allowed token."""


class _MatcherState(GrammarState):
    """A matcher of xgrammar or llguidance, which can be forked."""

    def __init__(self, matcher: Any, vocab: int):
        self._matcher, self._vocab = matcher, vocab

    def _allowed(self) -> NDArray[np.bool_]:
        words = (self._vocab + 31) // 32
        if hasattr(self._matcher, "compute_bitmask"):
            stopped = self._matcher.is_stopped()
            packed = np.frombuffer(bytes(4 * words) if stopped else self._matcher.compute_bitmask(), np.uint8)
        else:
            bits = np.full((1, words), 0 if self._matcher.is_terminated() else -1, np.int32)
            if bits[0, 0]:
                self._matcher.fill_next_token_bitmask(bits, 0)
            packed = bits.view(np.uint8)[0]
        return np.unpackbits(packed, bitorder="little")[: self._vocab].astype(bool)

    def after(self, token: int) -> GrammarState:
        if hasattr(self._matcher, "deep_copy"):
            matcher = self._matcher.deep_copy()
            matcher.consume_token(token)
        else:
            matcher = self._matcher.fork()
            matcher.accept_token(token)
        return _MatcherState(matcher, self._vocab)


class _AutomatonState(GrammarState):
    """A state of the automaton of outlines."""

    def __init__(self, index: Any, state: int | None, vocab: int):
        self._index, self._state, self._vocab = index, state, vocab

    def _allowed(self) -> NDArray[np.bool_]:
        tokens = None if self._state is None else self._index.get_allowed_tokens(self._state)
        return _mask(tokens or [], self._vocab)

    def after(self, token: int) -> GrammarState:
        return _AutomatonState(self._index, self._index.get_next_state(self._state, token), self._vocab)


class _ReplayedState(GrammarState):
    """The text so far, prompt included, for lm-format-enforcer, which keeps what it computed for earlier texts."""

    def __init__(self, enforcer: Any, text: list[int], vocab: int):
        self._enforcer, self._text, self._vocab = enforcer, text, vocab

    def _allowed(self) -> NDArray[np.bool_]:
        return _mask(self._enforcer.get_allowed_tokens(self._text).allowed_tokens, self._vocab)

    def after(self, token: int) -> GrammarState:
        return _ReplayedState(self._enforcer, [*self._text, token], self._vocab)


def _mask(tokens: Sequence[int], vocab: int) -> NDArray[np.bool_]:
    mask = np.zeros(vocab, dtype=bool)
    mask[[token for token in tokens if token < vocab]] = True
    return mask


def grammar_states(call: DraftCall) -> list[GrammarState]:
    """The state of each row's grammar at the beginning of a call; empty if no processor has a grammar that is known."""
    if call.model is None or call.model.get_output_embeddings() is None:
        return []
    vocab = vocabulary_size(call.model)
    for processor in call.logits_processor:
        states = _states_of(processor, call, vocab)
        if len(states) in (1, call.state.batch):
            return states if len(states) == call.state.batch else states * call.state.batch
    return []


def _states_of(processor: Any, call: DraftCall, vocab: int) -> list[GrammarState]:
    """The states of one processor: made anew from its grammar, or forked from matchers that it was given."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        enforcer = getattr(processor._prefix_allowed_tokens_fn, "token_enforcer", None)
        texts = call.state.prefix(call.state.prompt_length).tolist()
        return [] if enforcer is None else [_ReplayedState(enforcer, text, vocab) for text in texts]
    settings = getattr(processor, "__dict__", {})
    if "llg_tokenizer" in settings and "grammar" in settings:
        matcher = sys.modules["llguidance"].LLMatcher(settings["llg_tokenizer"], settings["grammar"])
        return [_MatcherState(matcher, vocab)]
    for value in settings.values():
        items = value if isinstance(value, (list, tuple)) else [value]
        kinds = {type(item).__name__ for item in items}
        if kinds == {"Index"} and hasattr(items[0], "get_next_state"):
            return [_AutomatonState(index, index.get_initial_state(), vocab) for index in items]
        if kinds == {"CompiledGrammar"}:
            return [_MatcherState(sys.modules["xgrammar"].GrammarMatcher(item), vocab) for item in items]
        if kinds == {"GrammarMatcher"}:
            return [_MatcherState(matcher.fork(), vocab) for matcher in items]
        if kinds == {"LLMatcher"}:
            return [_MatcherState(matcher.deep_copy(), vocab) for matcher in items]
    return []


def with_grammar(session: DraftSession, call: DraftCall, size: Any) -> DraftSession:
    """The session of a strategy whose drafts have this size, or if the call has a grammar, one that obeys it."""
    # An early-exit target has run its first layers on the nodes of a draft: others cannot be added to it.
    if not call.grammar_drafts or isinstance(call.target, EarlyExitTarget):
        return session
    states = grammar_states(call)
    return GrammarSession(session, states, size) if states else session


def _tokenizer_of(model: PreTrainedModel | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target's checkpoint, if it has one."""
    if model is None or not model.name_or_path:
        return None
    try:
        return load_tokenizer(model.name_or_path)
    except (OSError, ValueError):
        return None


class _Node(NamedTuple):
    """A node of the search: the drafter's node or None, the grammar before the node's token, the tokens of its path."""

    drafted: int | None
    before: GrammarState | None
    path: tuple[int, ...]


class GrammarSession(WrappedSession):
    """Extends and filters the drafts of a session, whose trees have this size, by the grammar of each row."""

    def __init__(self, session: DraftSession, states: Sequence[GrammarState], size: Any):
        super().__init__(session)
        rows, tokenizer = zip(self.call.state.prompts, states, strict=True), _tokenizer_of(session.call.model)
        self._rows, self._size = [_Row(prompt, state, tokenizer) for prompt, state in rows], size

    def change(self, tree: DraftTree, max_depths: Sequence[int], is_prefill: bool) -> DraftTree:
        """The most probable tree of what the session drafted and the grammar allows, and of what the grammar forces."""
        if tree.q is not None:  # a sampled node must not be left out because of its token
            return tree
        size = self._size
        if size != "auto" and not isinstance(size, int):
            size = None if tree.is_chain else tree.nodes
        for row, generated in zip(self._rows, self.call.state.generated, strict=True):
            row.update(generated)

        def search(row: int, limits: SearchLimits) -> SearchTree[_Node]:
            return self._rows[row].search(node_children(tree, row), max_depths[row], limits)

        return draft_rows(self.call, size, max_depths, search, is_prefill)[0]


class _Row:
    """The text of one row, and the state of its grammar; None once the text has left the grammar."""

    def __init__(self, prompt: Sequence[int], state: GrammarState, tokenizer: PreTrainedTokenizerBase | None):
        self._tokenizer = tokenizer
        self._index, self._counts, self._odds = NgramIndex(prompt), Counter(prompt), MatchOdds()
        self._state: GrammarState | None = state
        self._generated = 0

    def update(self, generated: Sequence[int]) -> None:
        """Append the tokens that were generated since the last draft."""
        new = generated[self._generated :]
        self._generated = len(generated)
        self._index.extend(new)
        self._counts.update(new)
        for token in new:
            is_allowed = self._state is not None and bool(self._state.allowed[token])
            self._state = self._state.after(token) if is_allowed and self._state is not None else None

    def search(
        self, drafted: dict[int, list[tuple[int, int, float]]], depth: int, limits: SearchLimits
    ) -> SearchTree[_Node]:
        """The most probable tree that obeys the grammar; `drafted` are the children of each node of the drafter."""

        def children(node: _Node, _: int) -> list[tuple[int, float, _Node]]:
            state = node.before
            if state is not None and node.path:
                state = state.after(node.path[-1])
            below = () if node.drafted is None else drafted.get(node.drafted, ())
            proposals = {token: (acceptance, child) for child, token, acceptance in below if token >= 0}
            ranked = self._ranked(state, node.path, {token: value for token, (value, _) in proposals.items()})
            return [
                (token, value, _Node(proposals.get(token, (0.0, None))[1], state, (*node.path, token)))
                for token, value in ranked
            ]

        return best_first(_Node(-1, self._state, ()), children, depth, limits)

    def _ranked(
        self, state: GrammarState | None, path: tuple[int, ...], proposed: dict[int, float]
    ) -> list[tuple[int, float]]:
        """The tokens that may follow and their probabilities, most probable first."""
        if state is None:
            return sorted(proposed.items(), key=lambda one: -one[1])
        allowed = state.allowed
        count = int(allowed.sum())
        if count <= 1:
            return [(int(allowed.argmax()), 1.0)] if count else []
        forbidden = sum(value for token, value in proposed.items() if not allowed[token])
        values = {token: value for token, value in proposed.items() if allowed[token]}
        rest = max(0.0, 1.0 - forbidden - sum(values.values()))
        scale = 1.0 / max(sum(values.values()) + rest, 1e-9)
        for token, value in self._from_text(path, allowed, count).items() if rest else ():
            values[token] = values.get(token, 0.0) + rest * value
        return sorted(((token, scale * value) for token, value in values.items()), key=lambda one: -one[1])

    def _longest(self, tokens: list[int]) -> int | None:
        """The longest of some tokens if all others are beginnings of it: the next token of a text that is forced."""
        if self._tokenizer is None:
            return None
        texts = self._tokenizer.convert_ids_to_tokens(tokens)
        text, token = max(zip(texts, tokens, strict=True), key=lambda pair: len(pair[0] or ""))
        return token if text and all(text.startswith(other or " ") for other in texts) else None

    def _from_text(self, path: tuple[int, ...], allowed: NDArray[np.bool_], count: int) -> dict[int, float]:
        """Probabilities of allowed tokens by what followed matches in the text, and by their frequency there."""
        tokens, tail = self._index.tokens, [*self._index.tokens[-MAX_MATCH_LENGTH:], *path]
        matches = self._index.occurrences(tail, 8).items()
        votes = vote([(tokens, len(tokens), at, length, OWN) for at, length in matches], 0, self._odds)
        kept = {token: value for token, value, _ in votes if allowed[token]}
        total = sum(kept.values())
        values = {token: MATCHED * value / total for token, value in kept.items()}
        if count <= FEW_TOKENS:
            weights = {token: 0.1 + self._counts[token] for token in np.flatnonzero(allowed).tolist()}
            forced = self._longest(list(weights))
            if forced is not None:
                weights[forced] += 9 * sum(weights.values())
            left = (1.0 - MATCHED if kept else 1.0) / sum(weights.values())
            for token, weight in weights.items():
                values[token] = values.get(token, 0.0) + left * weight
        return values
