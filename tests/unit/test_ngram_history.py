"""`NgramHistory`: texts of earlier calls."""

import copy
import inspect
import os
import pickle
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hf_specgen import NgramCandidates, NgramHistory
from hf_specgen.call import memory
from hf_specgen.candidates.best_first import SearchLimits
from hf_specgen.candidates.ngram import MatchOdds, RowText
from hf_specgen.candidates.ngram_history import FORMAT
from hf_specgen.candidates.ngram_index import MAX_BATCH, MAX_MATCH_LENGTH, MIN_CAPACITY, SEPARATOR, NgramIndex
from tests.helpers import fresh_model, prompts, reference, tiny_model
from tests.helpers.calls import make_batch, make_state, ngram_draft


def history_of(*texts: list[int], **kwargs: int) -> NgramHistory:
    """A history of some texts."""
    history = NgramHistory(**kwargs)
    for text in texts:
        history.add(text)
    return history


def kept(history: NgramHistory) -> list[int]:
    """The tokens of a history."""
    return history.index.tokens.tolist()


def outputs(history: NgramHistory) -> list[bool]:
    """Which tokens of a history count as generated."""
    return [bool(flag) for flag in history._is_output]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("max_tokens", [6, 100])
def test_copied_or_pickled_history_remembers_the_same_and_grows_apart(duplicate: Any, max_tokens: int) -> None:
    """Would catch: an index whose buffers two histories share, or that cannot be pickled with a model."""
    history = NgramHistory(max_tokens)
    history.add([5, 6, 7, 8, 9, 10, 11])
    twin = duplicate(history)
    assert len(twin) == len(history) and twin.index.tokens.tolist() == history.index.tokens.tolist()
    for tail in ([7, 8], [9, 10, 11]):
        assert twin.index.occurrences(tail, 8) == history.index.occurrences(tail, 8)
    before = history.index.tokens.tolist()
    twin.add([20, 21, 22])
    assert history.index.tokens.tolist() == before != twin.index.tokens.tolist()


def test_draft_prefers_generated_text_to_prompts_of_the_history() -> None:
    """Would catch: prompts that count as much as outputs; both matches are as long."""
    history = NgramHistory()
    history.add([1, 2, 3, 4, 5], prompt_length=5)
    history.add([1, 2, 3, 6, 7], prompt_length=0)
    history.add([1, 2, 3, 4, 8], prompt_length=5)
    candidates = NgramCandidates(k=1, tree=2, history=history)
    assert ngram_draft(candidates, [1, 2, 3])[0] == [4, 6]  # two votes against one
    history.add([1, 2, 3, 6, 9], prompt_length=2)
    assert ngram_draft(candidates, [1, 2, 3])[0] == [6, 4]


def test_history_that_outgrows_the_vocabulary_is_left_out() -> None:
    """Would catch: a token that another model adds in mid-call and that the target does not have."""
    history = NgramHistory()
    history.add([1, 2, 3])
    text = RowText([9, 1, 2], MatchOdds(), history, vocabulary=60)
    assert text.propose(1, SearchLimits(nodes=1)).tokens == [3]
    history.add([1, 2, 80])
    assert 80 not in text.propose(4, SearchLimits(nodes=4)).tokens


DRAFTS: list[tuple[list[list[int]], dict[str, int], list[int], list[int]]] = [
    ([[1, 2, 3, 4, 5, 6]], {"k": 2}, [9, 1, 2], [3, 4]),
    # A match in the history that counts as much as an equal one in the text itself.
    ([[7, 8, 9, 5]], {"k": 1}, [8, 9, 6, 1, 8, 9], [6]),
    # A draft that continues in the next text, or a match that reaches back into the one before.
    ([[1, 2, 3], [4, 5, 6]], {"k": 9, "min_ngram": 2}, [1, 2], [3]),
    ([[1, 2, 3], [4, 5, 6]], {"k": 9, "min_ngram": 2}, [2, 3], []),
    ([[1, 2, 3], [4, 5, 6]], {"k": 9, "min_ngram": 2}, [3, 4], []),
]


@pytest.mark.parametrize(("history", "settings", "text", "expected"), DRAFTS)
def test_draft_with_a_history(history: Any, settings: dict[str, int], text: list[int], expected: list[int]) -> None:
    """Would catch: see the comments in `DRAFTS`."""
    candidates = NgramCandidates(history=history_of(*history), **settings)  # type: ignore[arg-type]
    assert ngram_draft(candidates, text)[0] == expected


def test_history_beyond_max_tokens_drops_the_older_half() -> None:
    """Would catch: a history that grows without limit, or drops the newest text."""
    history = NgramHistory(max_tokens=15)
    for first in range(100, 1100, 10):
        history.add([first, first + 1, first + 2, first + 3])
        assert len(history) == len(history._is_output) <= 15
    candidates = NgramCandidates(k=2, min_ngram=2, history=history)
    assert ngram_draft(candidates, [1090, 1091])[0] == [1092, 1093]
    assert ngram_draft(candidates, [1080, 1081])[0] == [1082, 1083]
    assert ngram_draft(candidates, [100, 101])[0] == []


def test_history_of_a_text_longer_than_max_tokens_keeps_its_end() -> None:
    """Would catch: the beginning kept, or marks of generated tokens that are shifted."""
    history = NgramHistory(max_tokens=10)
    history.add([*range(50)], prompt_length=43)
    assert kept(history) == [*range(41, 50), SEPARATOR]
    assert outputs(history) == [False] * 2 + [True] * 8


def test_session_end_adds_prompt_and_output_of_every_row() -> None:
    """Would catch: only the prompts added, rows of a batch joined to one text, or output taken for a prompt."""
    history = NgramHistory()
    state = make_state([[1, 2], [3]])
    session = NgramCandidates(history=history).start(make_batch(state))
    state.append(0, [7, 8])
    assert len(history) == 0
    session.end()
    assert kept(history) == [1, 2, 7, 8, SEPARATOR, 3, SEPARATOR]
    assert outputs(history) == [False, False, True, True, True, False, True]


def test_add_texts_tokenizes_each_text_without_special_tokens(tokenizer: Any) -> None:
    """Would catch: an end token inside of the history, or matches that go on into the next text."""
    history = NgramHistory()
    lines = ["The keeper of the lighthouse wrote a letter.", "Nobody answered for eleven years."]
    history.add_texts(lines, tokenizer)
    ids = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    assert kept(history) == [*ids[0], SEPARATOR, *ids[1], SEPARATOR]
    assert ngram_draft(NgramCandidates(k=4, history=history), ids[1][:3])[0] == ids[1][3:7]


# Files


@pytest.mark.parametrize(("max_tokens", "first"), [(40, 0), (8, 6)], ids=["partly filled", "older text dropped"])
def test_load_of_a_saved_history_reads_the_same_texts(tmp_path: Path, max_tokens: int, first: int) -> None:
    """Would catch: tokens of a full history in the wrong order, flags of the wrong tokens, a lost setting."""
    history = NgramHistory(max_tokens)
    history.add([1, 2, 3, 4, 5], prompt_length=4)
    history.add([7, 8, 9, 6, 3], prompt_length=1)
    history.save(tmp_path / "history.safetensors")
    loaded = NgramHistory.load(tmp_path / "history.safetensors")
    assert loaded.max_tokens == max_tokens
    assert kept(loaded) == [1, 2, 3, 4, 5, SEPARATOR, 7, 8, 9, 6, 3, SEPARATOR][first:]
    assert outputs(loaded) == [bool(flag) for flag in (0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1)][first:]


def test_save_in_the_home_folder_and_in_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a file in a folder named ~; an error of safetensors about a temporary file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    history = NgramHistory()
    history.add([1, 2, 3])
    history.save("~/texts.safetensors")
    assert len(NgramHistory.load("~/texts.safetensors")) == len(history) and (tmp_path / "texts.safetensors").is_file()
    assert NgramHistory().refresh("~/texts.safetensors")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing' to save the history in"):
        history.save(tmp_path / "missing" / "texts.safetensors")


def test_load_of_another_file_raises(tmp_path: Path) -> None:
    """Would catch: a file of another program read as tokens."""
    path = tmp_path / "other.safetensors"
    save_file({"tokens": np.zeros(3, dtype=np.int32)}, path)
    with pytest.raises(ValueError, match="is no n-gram history: its format is null"):
        NgramHistory.load(path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="is no n-gram history"):
        NgramHistory.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        NgramHistory.load(tmp_path / "missing")


@pytest.mark.parametrize(
    ("tokens", "is_output", "max_tokens"),
    [([1, -5], [0, 0], 9), ([1, 2], [0], 9), ([1, 2, 3], [0, 0, 0], 2), ([1], [0], 2**40)],
    ids=["negative token", "missing flag", "too many tokens", "huge"],
)
def test_load_of_a_manipulated_file_raises(tmp_path: Path, tokens: Any, is_output: Any, max_tokens: int) -> None:
    """Would catch: a file of some bytes that makes us allocate terabytes, or index tokens that are none."""
    arrays = {"tokens": np.array(tokens, dtype=np.int32), "is_output": np.array(is_output, dtype=np.uint8)}
    save_file(arrays, tmp_path / "x", metadata={"format": FORMAT, "max_tokens": str(max_tokens)})
    with pytest.raises(ValueError, match="is no n-gram history"):
        NgramHistory.load(tmp_path / "x")


def test_history_shared_by_threads_keeps_every_text() -> None:
    """Would catch: two texts written into each other, or a lookup that fails while a text is added."""
    history = NgramHistory(max_tokens=3000)

    def use(first: int) -> None:
        for number in range(60):
            history.add([first] * 9)
            ngram_draft(NgramCandidates(k=4, history=history), [first, first, number])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(1, 5)))
    texts = [kept(history)[place : place + 10] for place in range(0, len(history), 10)]
    assert sorted(texts) == sorted([[first] * 9 + [SEPARATOR] for first in range(1, 5) for _ in range(60)])


def test_refresh_reads_what_another_process_saved_once(tmp_path: Path) -> None:
    """Would catch: a reader that keeps its old texts, or reads an unchanged file again."""
    file, writer, reader = tmp_path / "history.safetensors", history_of([1, 2, 3]), NgramHistory(max_tokens=10)
    for text in ([4, 5], [6, 7]):
        writer.add(text)
        writer.save(file)
        assert reader.refresh(file) and not reader.refresh(file)
        assert reader.index.tokens == writer.index.tokens and reader.max_tokens == writer.max_tokens
        assert reader.find([text[0]], 8)[0][2] == len(writer) - 2
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_save_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a history lost because the disk was full, or half a file left behind."""
    file, history = tmp_path / "history.safetensors", history_of([1, 2, 3])
    history.save(file)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    history.add([4])
    with pytest.raises(OSError, match="disk full"):
        history.save(file)
    assert len(NgramHistory.load(file)) == 4 and len(list(tmp_path.iterdir())) == 1


def test_add_folder_remembers_its_texts(tmp_path: Path) -> None:
    """Would catch: folders below left out, files of other types read, or a pattern without files passed over."""
    (tmp_path / "below").mkdir()
    for name, text in (("b.txt", "2"), ("below/a.txt", "3"), ("c.md", "4")):
        (tmp_path / name).write_text(text, encoding="utf-8")

    def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(text)]}

    history = NgramHistory()
    history.add_folder(tmp_path, tokenizer, "*.txt")
    assert history.index.tokens.tolist() == [2, -1, 3, -1]
    with pytest.raises(ValueError, match=r"there are no files '\*.py' in"):
        history.add_folder(tmp_path, tokenizer, "*.py")


# The n-gram index, against loops over the whole text

texts = st.lists(st.sampled_from([0, 1, 2**30]), max_size=40)  # few tokens: matches of every length, many of each
ALL = 10**6


@settings(max_examples=300)
@given(st.lists(texts, max_size=6), texts)
def test_occurrences_in_a_growing_text_agree_with_the_reference(parts: Any, other: list[int]) -> None:
    """Would catch: an occurrence missed or too short."""
    tokens: list[int] = []
    index = NgramIndex()
    for number, part in enumerate(parts):
        part = [*part, SEPARATOR] if number % 2 else part
        index.extend(part)
        tokens += part
        tail = tokens[-MAX_MATCH_LENGTH:]
        assert index.occurrences(tail, ALL) == reference.ngram_occurrences(tokens, tail)
    assert index.tokens.tolist() == tokens
    assert index.occurrences(other, ALL) == reference.ngram_occurrences(tokens, other)


def test_occurrences_in_a_text_of_several_batches_and_tables_agree_with_the_reference() -> None:
    """Would catch: n-grams lost where tables grow, or that end in another batch than they begin in."""
    text = np.random.default_rng(0).integers(0, 2000, MAX_BATCH + 3 * MIN_CAPACITY).tolist()
    at_once, grown = NgramIndex(text), NgramIndex()
    for begin in range(0, len(text), 700):
        grown.extend(text[begin : begin + 700])
    for end in (MAX_BATCH - 1, *range(MAX_BATCH + 1, MAX_BATCH + 8, 2), MIN_CAPACITY + 2):
        tail = text[end - 8 : end]
        found = at_once.occurrences(tail, ALL)
        assert found[end] == 8
        assert found == grown.occurrences(tail, ALL) == reference.ngram_occurrences(text, tail)


def test_occurrences_collision_of_hashes_is_no_match() -> None:
    """Would catch: comparison by hash alone: of 10,000 tokens that the text lacks, some hash like one that it has."""
    text = list(range(300))
    index = NgramIndex(text)
    assert not any(index.occurrences([absent], ALL) for absent in range(300, 10_300))
    assert index.occurrences([10_300, 2, 3], ALL) == {4: 2}


def test_occurrences_beyond_the_limit_are_the_most_recent_of_the_longest_ngrams() -> None:
    """Would catch: recent short matches before an old long one; of 4 tokens there is one, of 2 there are many."""
    text = [7, 5, 6, 5, *[5] * 9, 9]
    assert list(NgramIndex(text).occurrences([7, 5, 6, 5], limit=3)) == [4, 13, 12]


def executed_lines(function: Callable[[], Any]) -> int:
    """How many lines of the index's module a call executes: a cost that does not depend on the machine."""
    lines, file = 0, inspect.getfile(NgramIndex)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != file:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def test_save_over_a_file_that_another_process_reads_tries_again(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: a history that is lost on Windows, which does not replace a file that is mapped."""
    history, attempts, replace = NgramHistory(), iter([PermissionError, PermissionError]), os.replace
    history.add([5, 6, 7])

    def busy(*paths: Any) -> None:
        if (error := next(attempts, None)) is not None:
            raise error
        replace(*paths)

    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    history.save(tmp_path / "history")
    assert len(NgramHistory.load(tmp_path / "history")) == 4


@pytest.mark.parametrize("period", [1, 2, 41])
def test_occurrences_cost_does_not_grow_with_the_text(period: int) -> None:
    """Would catch: a lookup that visits every occurrence, where everything matches."""
    costs = []
    for repeats in (100, 4000):
        index = NgramIndex([*range(5, 5 + period)] * repeats)
        tail = index.tokens[-MAX_MATCH_LENGTH:]
        costs.append(executed_lines(lambda index=index, tail=tail: index.occurrences(tail, limit=8)))
    assert costs[0] == costs[1] > 0


def test_extend_cost_does_not_grow_with_the_text() -> None:
    """Would catch: chains that are walked, or tables that are rebuilt, when a token is added."""
    index, costs = NgramIndex(), []
    for length in (1_000, 49_990, 120_000):
        index.extend([7] * (length - 500))
        costs.append(executed_lines(lambda: index.extend([7] * 30)))
    assert max(costs) <= costs[0] + 10


# Answers by prompt


def lists(answers: list[Any]) -> list[list[int]]:
    """Answers as lists."""
    return [list(answer) for answer in answers]


PROMPT = [*range(40, 80)]


def test_answers_of_a_prompt_are_the_last_ones_and_differ() -> None:
    """Would catch: answers to another prompt, the oldest first, one answer several times, more than eight."""
    history = NgramHistory()
    for answer in ([1, 2], [3], [1, 2], [1, 2], [4, 5]):
        history.add([*PROMPT, *answer], len(PROMPT))
        history.add([9, *PROMPT[:5], 8, 8], 6)
    assert lists(history.answers(PROMPT)) == [[4, 5], [1, 2], [3]]
    for answer in range(20):
        history.add([*PROMPT, answer], len(PROMPT))
    assert lists(history.answers(PROMPT)) == [[answer] for answer in range(19, 11, -1)]
    assert history.answers([1, 2, 3]) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ([*PROMPT[:7], 5, *PROMPT[8:]], True),
        ([*PROMPT[:20], 5, *PROMPT[20:]], True),
        (PROMPT[2:], True),
        ([*PROMPT[:20], *range(20)], False),
        ([5, 6, 7, 8, *PROMPT[-2:]], False),
    ],
    ids=["replaced", "inserted", "left out", "half of it", "the end alone"],
)
def test_answers_of_a_prompt_that_differs_in_a_few_tokens(changed: list[int], found: bool) -> None:
    """Would catch: a date in a prompt that hides all answers, or answers to other questions in the same template."""
    history = NgramHistory()
    for number in range(30):
        history.add([number, number + 1, number + 2, *PROMPT[-2:], 3], 5)
    history.add([*PROMPT, 1, 2], len(PROMPT))
    assert lists(history.answers(changed)) == ([[1, 2]] if found else [])


@pytest.mark.parametrize("stored", ["saved", "copied", "half full"])
def test_answers_of_a_history_that_was_stored_or_has_dropped_texts(stored: str, tmp_path: Path) -> None:
    """Would catch: positions of answers that are those of other texts."""
    history = NgramHistory(max_tokens=200)
    for number in range(12 if stored == "half full" else 3):
        history.add([*PROMPT, number, 7], len(PROMPT))
    if stored == "saved":
        history.save(tmp_path / "history")
        history = NgramHistory.load(tmp_path / "history")
    elif stored == "copied":
        history = copy.deepcopy(history)
    answers = lists(history.answers(PROMPT))
    assert answers[:2] == ([[11, 7], [10, 7]] if stored == "half full" else [[2, 7], [1, 7]])
    assert all(len(answer) == 2 and answer[1] == 7 for answer in answers)


def test_forget_removes_all_texts_of_a_prompt() -> None:
    """Would catch: personal data that stays, in the index or as an answer; texts of other prompts that go too."""
    history = NgramHistory()
    history.add([1, 2, 3, 4], 2)
    for answer in (5, 6):
        history.add([*PROMPT, answer, 9], len(PROMPT))
    history.add([7, 8, 9], 1)
    history.seeds.keep(PROMPT, history.seeds.take(PROMPT, 1), [5])
    assert history.forget(PROMPT) == 2 and history.forget(PROMPT) == 0
    assert kept(history) == [1, 2, 3, 4, SEPARATOR, 7, 8, 9, SEPARATOR]
    assert outputs(history) == [False, False, True, True, True, False, True, True, True]
    assert history.answers(PROMPT) == [] and lists(history.answers([1, 2])) == [[3, 4]]
    assert history.seeds.take(PROMPT, 2).answer == ()


def test_of_file_exchanges_texts_with_other_processes(tmp_path: Path) -> None:
    """Would catch: texts of one process that another overwrites, are written twice, or come back once forgotten."""
    file = tmp_path / "answers.safetensors"
    history = NgramHistory.of_file(file)
    assert NgramHistory.of_file(str(file)) is history and len(history) == 0
    history.add([1, 2, 3], 1)
    history.sync()
    other = NgramHistory.load(file)  # what another process has
    other.add([4, 5, 6], 1)
    other.save(file)
    history.add([7, 8, 9], 1)
    history.sync()
    expected = [1, 2, 3, SEPARATOR, 4, 5, 6, SEPARATOR, 7, 8, 9, SEPARATOR]
    assert kept(history) == kept(NgramHistory.load(file)) == expected
    written = file.stat().st_mtime_ns
    history.sync()
    assert file.stat().st_mtime_ns == written and kept(history) == expected, "nothing was added"
    assert history.forget([4]) == 1
    assert kept(NgramHistory.load(file)) == expected[:4] + expected[8:]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        NgramHistory.of_file(tmp_path / "missing" / "answers")


def test_call_whose_history_cannot_be_written_returns_its_answer(tmp_path: Path) -> None:
    """Would catch: an answer that is lost because another program has damaged the file, or texts that then are."""
    file = tmp_path / "answers.safetensors"
    call = {**prompts(1), "max_new_tokens": 4, "candidate_generator": NgramCandidates(), "history": file}
    model = tiny_model("llama")
    model.generate(**call)
    history = NgramHistory.of_file(file)
    history.sync()
    saved = file.read_bytes()
    file.write_bytes(b"damaged")
    history._next_sync = 0.0
    with pytest.warns(UserWarning, match=r"the history in .*answers.safetensors is not exchanged: .* is no n-gram"):
        model.generate(**(call | prompts(1, length=9)))
    file.write_bytes(saved)
    history.sync()
    assert kept(NgramHistory.load(file)) == kept(history) and kept(history).count(SEPARATOR) == 2


def test_history_of_a_target_whose_embeddings_were_cut_begins_anew() -> None:
    """Would catch: a refusal of all later calls, whose remedy cannot be followed."""
    model = fresh_model("llama")
    call = {"max_new_tokens": 4, "candidate_generator": NgramCandidates(), "history": True, "do_sample": False}
    model.generate(torch.tensor([[5, 95, 5, 95]]), **call)
    model.resize_token_embeddings(120)
    model.generate(torch.tensor([[5, 95, 5, 95]]), **call)
    first = kept(memory.recall(model, "history", NgramHistory))[:4]
    assert first == [5, 95, 5, 95], "larger embeddings have the tokens of all texts"
    model.resize_token_embeddings(60)
    output = model.generate(torch.tensor([[5, 9, 5, 9]]), **call)
    assert kept(memory.recall(model, "history", NgramHistory)) == [*output[0].tolist(), SEPARATOR]


def test_draft_after_a_known_prompt_is_its_answers_from_their_first_token_on() -> None:
    """Would catch: a draft that waits for a match, an answer that stops at its first difference, one answer alone."""
    history = NgramHistory()
    history.add([*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8], len(PROMPT))
    history.add([*PROMPT, 1, 2, 3, 9, 5, 6, 7, 8], len(PROMPT))
    state = make_state([PROMPT])
    session = NgramCandidates(k=8, tree=20, history=history).start(make_batch(state))
    tree = session.draft([8])
    paths = reference.node_paths(tree.tokens[0].tolist(), tree.parents[0])
    assert (1, 2, 3, 9, 5) in paths and (1, 2, 3, 4, 5) in paths
    state.append(0, [1, 2, 0])  # neither answer has the last one
    tree = session.draft([8])
    assert {(9, 5, 6), (4, 5, 6)} <= set(reference.node_paths(tree.tokens[0].tolist(), tree.parents[0]))


def test_texts_are_dropped_whole_so_that_forget_finds_them() -> None:
    """Would catch: half of a prompt kept when older texts are dropped, with an answer that nobody can remove."""
    history = NgramHistory(max_tokens=40)
    texts = [[10 * number + token for token in range(9)] for number in range(1, 8)]
    for text in texts:
        history.add(text, prompt_length=5)
    stored = [text for text in texts if history.answers(text[:5]) == [array("i", text[5:])]]
    assert texts[-1] in stored and len(history) == 10 * len(stored) < 40
    assert [history.forget(text[:5]) for text in stored] == [1] * len(stored) and len(history) == 0
