"""The noise tape holds the very noise that `torch.multinomial` would draw, and gives back what was drawn ahead."""

from __future__ import annotations

import pytest
import torch

from hf_specgen.verification import noise
from hf_specgen.verification.noise import NoiseBuffer, check_multinomial

CPU = torch.device("cpu")
VOCAB = 17


def distributions(steps: int, batch: int) -> torch.Tensor:
    """`[steps, batch, VOCAB]` probabilities, sharp enough that noise of another step or row picks other tokens."""
    logits = torch.randn(steps, batch, VOCAB, generator=torch.Generator().manual_seed(1))
    return logits.softmax(dim=-1)


def plain_sampling(p: torch.Tensor) -> list[list[int]]:
    """What plain `generate` does: one call of multinomial per step, for the whole batch."""
    return [torch.multinomial(step, 1)[:, 0].tolist() for step in p]


def raced(p: torch.Tensor, e: torch.Tensor) -> list[int]:
    return (p / e).argmax(dim=-1).tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_race_picks_what_multinomial_picks(batch: int) -> None:
    """Would catch: noise of another distribution, shape or order than multinomial's, or a row's noise swapped.

    40 steps over 17 tokens: another noise agrees everywhere with a probability below 1e-20.
    """
    p = distributions(40, batch)
    torch.manual_seed(5)
    plain = plain_sampling(p)
    torch.manual_seed(5)
    tape = NoiseBuffer(batch, VOCAB, CPU)
    for step in range(40):
        e = tape.at([[step]] * batch)
        assert e.shape == (batch, 1, VOCAB)
        assert raced(p[step], e[:, 0]) == plain[step]


def test_rows_may_ask_for_steps_of_their_own() -> None:
    """Would catch: noise indexed by call instead of by step, when rows of a batch are at different places."""
    p = distributions(9, 2)
    torch.manual_seed(5)
    plain = plain_sampling(p)
    torch.manual_seed(5)
    tape = NoiseBuffer(2, VOCAB, CPU)
    for first, second in (([0, 1, 2], [0, 1, 1]), ([3, 4, 5], [1, 2, 2]), ([8, 7, 6], [0, 3, 8])):
        e = tape.at([first, second])
        assert e.shape == (2, 3, VOCAB)
        for node in range(3):
            assert raced(p[first[node], 0], e[0, node]) == plain[first[node]][0]
            assert raced(p[second[node], 1], e[1, node]) == plain[second[node]][1]


@pytest.mark.parametrize("kept", [0, 1, 4, 9])
@pytest.mark.parametrize("batch", [1, 3])
def test_rewind_puts_the_generator_where_plain_sampling_leaves_it(kept: int, batch: int) -> None:
    """Would catch: noise drawn ahead and not given back, so that the rest of the program gets other numbers."""
    torch.manual_seed(6)
    plain_sampling(distributions(kept, batch))
    expected = torch.rand(4)
    torch.manual_seed(6)
    tape = NoiseBuffer(batch, VOCAB, CPU)
    tape.at([[0, 3, 8]] * batch)
    tape.rewind(kept)
    assert torch.equal(torch.rand(4), expected)


def test_reading_again_draws_nothing() -> None:
    """Would catch: a rejected guess's step that gets new noise when its token is verified again."""
    tape = NoiseBuffer(1, VOCAB, CPU)
    ahead = tape.at([[0, 1, 2]])
    before = torch.get_rng_state()
    again = tape.at([[2, 0]])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again[0], ahead[0, [2, 0]])


def test_release_frees_the_past_and_only_the_past() -> None:
    """Would catch: a tape that grows with the text (one `[batch, vocab]` tensor and one 5 kB state per token)."""
    tape = NoiseBuffer(1, VOCAB, CPU)
    ahead = tape.at([[0, 1, 2, 3]])
    tape.release(2)
    assert sorted(tape._noise) == sorted(tape._states) == [2, 3]
    assert torch.equal(tape.at([[2, 3]])[0], ahead[0, 2:])
    with pytest.raises(KeyError):
        tape.at([[1]])


def test_rewind_works_after_release() -> None:
    """Would catch: releasing the state of the very step that the call ends with."""
    torch.manual_seed(6)
    plain_sampling(distributions(2, 1))
    expected = torch.rand(4)
    torch.manual_seed(6)
    tape = NoiseBuffer(1, VOCAB, CPU)
    tape.at([[0, 1, 2, 3]])
    tape.release(2)
    tape.rewind(2)
    assert torch.equal(torch.rand(4), expected)


def test_capacity_is_what_fits_into_the_tape() -> None:
    """2 rows of 2^20 float32 take 8 MiB a step: 32 steps in 256 MiB. Never fewer than 16, however large a step."""
    assert NoiseBuffer(2, 2**20, CPU).capacity == 32
    assert NoiseBuffer(2, 2**30, CPU).capacity == noise.MIN_BUFFERED_STEPS == 16


def test_check_leaves_the_generator_untouched() -> None:
    """Would catch: a check that shifts the text of the first sampled call, and of no later one (it is cached)."""
    check_multinomial.cache_clear()
    before = torch.get_rng_state()
    check_multinomial(CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("defect", ["other tokens", "more noise"])
def test_check_refuses_another_multinomial(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """Would catch: a check that compares only the tokens, or only the generator; and a refusal that shifts it."""
    multinomial = torch.multinomial

    def other(p: torch.Tensor, count: int) -> torch.Tensor:
        picked = multinomial(p, count)
        if defect == "more noise":
            torch.rand(1)
            return picked
        return (picked + 1) % p.shape[1]

    check_multinomial.cache_clear()
    before = torch.get_rng_state()
    monkeypatch.setattr(torch, "multinomial", other)
    with pytest.raises(RuntimeError, match="use do_sample=False"):
        NoiseBuffer(1, VOCAB, CPU)
    assert torch.equal(torch.get_rng_state(), before)
