"""Drafts under a grammar, with a grammar that is a table: forced, forbidden and free tokens."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specgen import DraftTree, NgramCandidates
from hf_specgen.candidates.base import DraftSession, WrappedSession
from hf_specgen.candidates.cross_tokenizer import load_tokenizer
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.grammar import GrammarDrafts
from hf_specgen.libraries import GrammarState
from hf_specgen.verification import VerificationResult
from tests.helpers import reference
from tests.helpers.calls import StubModel, make_batch, make_state
from tests.helpers.paths import REFERENCE_LM

VOCAB = 8
Table = dict[int, tuple[int, ...]]
"""Which tokens may follow each token; all may follow those that it does not contain."""


class TableState(GrammarState):
    """The grammar after some tokens."""

    def __init__(self, table: Table, last: int):
        self._table, self._last = table, last

    @cached_property
    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(VOCAB), self._table.get(self._last, tuple(range(VOCAB))))

    def after(self, token: int) -> GrammarState:
        assert self.allowed[token], "a matcher receives a token that it forbids"
        return TableState(self._table, token)


class Fixed(DraftSession):
    """Proposes a given tree, and remembers what it observed."""

    def __init__(self, batch: DraftBatch, tree: DraftTree):
        super().__init__(batch)
        self._tree, self.observed = tree, list[VerificationResult]()

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._tree

    def observe(self, result: VerificationResult) -> None:
        self.observed.append(result)


def draft_under(table: Table, tree: DraftTree, size: Any, text: Sequence[int] = (1, 2, 3)) -> DraftTree:
    """The draft after a text that the grammar has been in since its last token."""
    state = make_state([list(text[:-1])])
    state.append(0, text[-1:])
    session = under_grammar(Fixed(make_batch(state), tree), TableState({**table, 0: (text[-1],)}, 0), size)
    return session.draft([4])


def under_grammar(session: DraftSession, state: GrammarState, size: Any) -> DraftSession:
    """The session of one row with its drafts under a grammar."""
    return WrappedSession(session, GrammarDrafts(session.batch, [state], size))


def test_drafter_observes_how_many_of_its_nodes_the_pass_had() -> None:
    """Would catch: nodes that the change removed or a batch cut off, which the drafter counts as rejected."""
    state = make_state([[1, 2]])
    state.append(0, [3])
    fixed = Fixed(make_batch(state), DraftTree.chains([[4, 5, 6]]))
    session = under_grammar(fixed, TableState({0: (3,), 3: (4,), 4: (5,), 5: (7,)}, 0), 4)
    assert paths_of(session.draft([4]))[:3] == [[4], [4, 5], [4, 5, 7]]
    for verified, common in ((1, 1), (3, 2)):
        session.observe(VerificationResult([[0]], [[4, 9]], [1], num_in_pass=[verified]))
        assert fixed.observed[-1].num_in_pass == [common]


def paths_of(tree: DraftTree) -> list[list[int]]:
    return [list(reference.path(tree, 0, node)) for node in range(len(tree.parents[0]))]


def test_grammar_forced_tokens_are_drafted_with_probability_one() -> None:
    """Would catch: forced tokens after the drafter's own first, or none where the drafter proposes nothing."""
    tree = draft_under({3: (4,), 4: (5,), 5: (6,)}, DraftTree.empty(1), 3)
    assert paths_of(tree) == [[4], [4, 5], [4, 5, 6]] and tree.probability == ((1.0, 1.0, 1.0),)
    assert paths_of(draft_under({3: (4,)}, DraftTree.from_paths([[[4, 7], [5]]]), 3))[:2] == [[4], [4, 7]]


def test_grammar_forbidden_tokens_are_left_out_with_what_follows_them() -> None:
    """Would catch: a node below a forbidden one that is verified, although it can never be accepted."""
    drafted = DraftTree.from_paths([[[4, 5], [6, 7], [5]]])
    assert [path for path in paths_of(draft_under({3: (5, 6), 6: (7,)}, drafted, 16)) if 4 in path[:1]] == []
    assert paths_of(draft_under({3: (5, 6), 5: (1,), 6: (7,)}, DraftTree.chains([[4, 5]]), None))[0] in ([5], [6])


def test_grammar_drafts_continue_where_the_drafter_proposes_nothing() -> None:
    """Would catch: no use of the text: 7 followed 2 and 3 before, and the grammar leaves 5 and 7."""
    tree = draft_under({3: (5, 7)}, DraftTree.empty(1), 4, text=[2, 3, 7, 1, 2, 3])
    assert paths_of(tree)[0] == [7]


@given(
    st.dictionaries(st.integers(1, 7), st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)),
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), max_size=4),
    st.sampled_from([None, 1, 6, 20]),
)
def test_grammar_every_path_is_allowed(table: Table, paths: list[list[int]], size: int | None) -> None:
    """Would catch: a forbidden token anywhere, a repeated sibling, a draft that is too large or too deep."""
    drafted = DraftTree.from_paths([paths]) if paths else DraftTree.empty(1)
    drafted = drafted if size else drafted.leftmost_chain()
    tree = draft_under(table, drafted, size)
    found = paths_of(tree)
    for path in found:
        for before, token in zip([3, *path], path, strict=False):
            assert token in table.get(before, range(VOCAB))
    assert len({tuple(path) for path in found}) == len(found) <= (size or 4)
    assert all(len(path) <= 4 for path in found) and (size is not None or tree.is_chain)


def test_grammar_session_reports_outcomes_of_the_drafters_own_tree() -> None:
    """Would catch: nodes of the extended tree reported to a drafter that does not have them."""
    state = make_state([[1, 2]])
    state.append(0, [3])
    inner = Fixed(make_batch(state), DraftTree.chains([[6, 5]]))
    session = under_grammar(inner, TableState({0: (3,), 3: (5,)}, 0), 8)
    tree = session.draft([4])
    assert paths_of(tree)[0] == [5]
    session.observe(VerificationResult([[0]], [[5, 1]], [1]))
    assert inner.observed[0].paths == [[]] and inner.observed[0].accepted == [0]


@pytest.mark.parametrize("text", [[1, 2, 3, 4], [1, 2, 3]])
def test_grammar_that_the_text_has_left_is_not_used(text: list[int]) -> None:
    """Would catch: a matcher that receives more of a text which it has refused."""
    state = make_state([[1]])
    state.append(0, text)
    batch = make_batch(state, candidates=NgramCandidates(k=2))
    session = under_grammar(Fixed(batch, DraftTree.chains([[7]])), TableState({0: (1,), 1: (5,)}, 0), None)
    assert paths_of(session.draft([2])) == [[7]]


class LayoutState(GrammarState):
    """Fixed text with free whitespace, and a word of letters in place of each "@"; the contents of tokens have none."""

    def __init__(self, contents: Sequence[str], rest: str, in_word: bool, masks: dict[tuple[str, bool], np.ndarray]):
        self._contents, self._rest, self._in_word, self._masks = contents, rest, in_word, masks

    def _rest_after(self, content: str) -> tuple[str, bool] | None:
        rest, in_word = self._rest, self._in_word
        for character in content:
            if character.isalpha() and (in_word or rest[:1] == "@"):
                rest, in_word = rest if in_word else rest[1:], True
            elif rest[:1] == character:
                rest, in_word = rest[1:], False
            else:
                return None
        return rest, in_word

    @cached_property
    def allowed(self) -> np.ndarray:
        key = self._rest, self._in_word
        if key not in self._masks:
            self._masks[key] = np.array([self._rest_after(content) is not None for content in self._contents])
        return self._masks[key]

    def after(self, token: int) -> GrammarState:
        after = self._rest_after(self._contents[token])
        assert after is not None
        return LayoutState(self._contents, *after, self._masks)


PEOPLE = [("Maria", "teacher", "senior", "Oslo"), ("Paul", "doctor", "junior", "Lisbon")]
RECORDS = [{"name": n, "role": {"title": title, "level": level}, "city": city} for n, title, level, city in PEOPLE]
LAYOUT = json.dumps(RECORDS, indent=2)
RECORD = '{"name":"@","role":{"title":"@","level":"@"},"city":"@"}'


@pytest.mark.parametrize("layout, steps", [("pretty", 41), ("spaces", 30), ("compact", 30), ("letters", 62)])
def test_grammar_with_free_whitespace_drafts_the_layout_of_the_text(layout: str, steps: int) -> None:
    """Would catch: whitespace drafted again and again, or never; keys not drafted after it, or in too long tokens."""
    separator = {"pretty": None, "spaces": " ", "compact": "", "letters": ""}[layout]
    tokenizer = load_tokenizer(str(REFERENCE_LM))
    text = LAYOUT if separator is None else separator.join(LAYOUT.split())
    parts = text if layout == "letters" else [text]
    script = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    contents = ["".join(tokenizer.decode([token]).split()) for token in range(len(tokenizer))]
    state = make_state([tokenizer.encode("Extract the people as JSON.\n\n", add_special_tokens=False)])
    state.append(0, script[:1])
    batch = make_batch(state, model=StubModel(str(REFERENCE_LM)))
    grammar = LayoutState(contents, f"[{RECORD},{RECORD}]", False, {})
    session, count = under_grammar(Fixed(batch, DraftTree.empty(1)), grammar, None), 0
    while len(state.generated[0]) < len(script):
        [draft], done = session.draft([10]).token_lists(), len(state.generated[0])
        accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(draft, script[done:], strict=False))))
        state.append(0, script[done : done + accepted + 1])
        count += 1
    assert count <= steps, count


def test_grammar_prompt_may_have_tokens_that_the_target_cannot_choose() -> None:
    """Would catch: an IndexError for an image token of the prompt after a token that the text repeats."""
    tree = draft_under({5: (1, 2)}, DraftTree.empty(1), 8, text=[4, 5, VOCAB, 7, -200, 3, 5])
    assert {token for path in paths_of(tree) for token in path} <= set(range(VOCAB))
