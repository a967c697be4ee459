"""Rows with one common length in the cache: what each pass reads, and what lies in the cache afterwards."""

import random

import pytest
import torch

from hf_specgen.call import EncoderInput
from hf_specgen.targets.replay import AlignedTexts


class SimulatedCache:
    """One list of slots for each row; a pass writes what it reads, and padding, from its start on."""

    def __init__(self, rows: int):
        self.slots: list[list[int]] = [[] for _ in range(rows)]

    def write(self, start: int, reads: list[list[int]]) -> None:
        width = max(map(len, reads))
        for slots, read in zip(self.slots, reads, strict=True):
            assert len(slots) >= start, "a pass begins behind the end of the cache"
            slots[start:] = read + [-1] * (width - len(read))


@pytest.mark.parametrize("seed", range(20))
def test_cache_holds_the_texts_after_any_sequence_of_steps(seed: int) -> None:
    """Would catch: a row whose slots were overwritten while it took no part, and that counts them as cached."""
    choose, rows = random.Random(seed), 3
    texts, cache, token = AlignedTexts(rows), SimulatedCache(rows), 0
    expected: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(30):
        new: list[list[int] | None] = []
        for _ in range(rows):
            count = choose.randint(1, 4) if choose.random() < 0.7 else 0
            new.append(list(range(token, token + count)) or None)
            token += count
        if not any(new):
            continue
        start, reads = texts.next_pass(new)
        cache.write(start, reads)
        counts = [choose.randint(0, len(tokens or ())) for tokens in new]
        texts.commit(counts)
        for row, (tokens, count) in enumerate(zip(new, counts, strict=True)):
            expected[row] += (tokens or [])[:count]
            kept = texts.cached[row]
            assert texts.texts[row] == expected[row]
            assert cache.slots[row][:kept] == expected[row][:kept]
            assert kept == len(expected[row]) or tokens is None
        if choose.random() < 0.1:
            lengths = [choose.randint(0, len(text)) for text in expected]
            texts.cut(lengths)
            expected = [text[:length] for text, length in zip(expected, lengths, strict=True)]


def test_one_row_reads_nothing_twice() -> None:
    texts = AlignedTexts(1)
    assert texts.next_pass([[1, 2, 3]]) == (0, [[1, 2, 3]])
    texts.commit([2])
    assert texts.next_pass([[4]]) == (2, [[4]])


def test_texts_of_features_are_empty() -> None:
    assert EncoderInput(torch.zeros(2, 8, 40), {}, None).texts(99) == [[], []]
    assert EncoderInput.of_call(torch.full((1, 3), -100), 1, {"encoder_outputs": {}}) is None
