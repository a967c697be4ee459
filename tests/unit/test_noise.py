"""The noise buffer draws the noise that `torch.multinomial` would draw, and gives back what was drawn ahead."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hf_specgen import DraftTree
from hf_specgen.random_state import NoiseSeed, NoiseSeeds, kept, take
from hf_specgen.verification import RejectionVerifier, VerificationSession, exact
from hf_specgen.verification.base import INVALID, argmax, sample_with_noise
from hf_specgen.verification.exact import NoiseBuffer, check_multinomial, weights_hash
from tests.helpers.calls import make_call, make_state

CPU = torch.device("cpu")
VOCAB = 17


def distributions(steps: int, batch: int) -> torch.Tensor:
    """`[steps, batch, VOCAB]` probabilities, sharp enough that noise of another step or row picks other tokens."""
    logits = torch.randn(steps, batch, VOCAB, generator=torch.Generator().manual_seed(1))
    return logits.softmax(dim=-1)


def seeded(seed: int) -> torch.Generator:
    """What `torch.manual_seed(seed)` would draw next."""
    return torch.Generator().manual_seed(seed)


def plain_sampling(p: torch.Tensor) -> list[list[int]]:
    """What plain `generate` does: one call of multinomial per step, for the whole batch."""
    return [torch.multinomial(step, 1)[:, 0].tolist() for step in p]


def race_winners(p: torch.Tensor, e: torch.Tensor) -> list[int]:
    return (p / e).argmax(dim=-1).tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_sample_with_noise_picks_the_tokens_of_multinomial(batch: int) -> None:
    """Would catch: noise of another distribution, shape or order than multinomial's, rows swapped."""
    p = distributions(40, batch)
    torch.manual_seed(5)
    plain = plain_sampling(p)
    buffer = NoiseBuffer(batch, VOCAB, [seeded(5)])
    for step in range(40):
        e = buffer.at([[step]] * batch)
        assert e.shape == (batch, 1, VOCAB)
        assert race_winners(p[step], e[:, 0]) == plain[step]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_noise_has_the_dtype_of_the_probabilities(dtype: torch.dtype) -> None:
    """Would catch: float32 noise for scores in half precision, which processors may return; the default dtype."""
    p = torch.randn(200, 2, 512, generator=torch.Generator().manual_seed(1)).to(dtype).softmax(dim=-1)
    torch.manual_seed(5)
    plain = plain_sampling(p)
    torch.set_default_dtype(torch.bfloat16)
    try:
        buffer = NoiseBuffer(2, 512, [seeded(5)], dtype)
        noise = torch.cat([buffer.at([[step]] * 2) for step in range(200)], dim=1).transpose(0, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert noise.dtype == dtype and [race_winners(*pair) for pair in zip(p, noise, strict=True)] == plain


def test_release_after_every_step_keeps_memory_bounded() -> None:
    """Would catch: a buffer that keeps the noise of all steps."""
    sizes = []
    for steps in (4, 400):
        buffer = NoiseBuffer(1, VOCAB, [seeded(5)])
        for step in range(steps):
            buffer.at([[step]])
            buffer.release(step)
        sizes.append(sum(tensor_bytes(value) for value in vars(buffer).values()))
    assert sizes[0] == sizes[1] > 0


def tensor_bytes(value: object) -> int:
    """Bytes of the tensors in a container."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return sum(item.untyped_storage().nbytes() for item in items if isinstance(item, torch.Tensor))


def test_capacity_is_limited_by_the_size_of_the_buffer() -> None:
    """2 rows of 2^20 float32 take 8 MiB a step: 32 steps in 256 MiB. Never fewer than 16."""
    assert NoiseBuffer(2, 2**20, [seeded(5)]).max_row_skew == 32
    assert NoiseBuffer(2, 2**30, [seeded(5)]).max_row_skew == exact.MIN_BUFFERED_TOKENS == 16


@pytest.mark.parametrize("defect", ["other tokens", "more noise"])
def test_check_multinomial_of_another_kind_raises(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """Would catch: a check that compares only the tokens or only the generator's state, or changes the global one.

    And an error that an attached model does not survive, which takes a ValueError for a refusal.
    """
    multinomial = torch.multinomial

    def other(p: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        picked = multinomial(p, count, generator=generator)
        if defect == "more noise":
            torch.rand(1, generator=generator)
            return picked
        return (picked + 1) % p.shape[1]

    check_multinomial.cache_clear()
    before = torch.get_rng_state()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="use do_sample=False"):
        patch.setattr(torch, "multinomial", other)
        check_multinomial(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_take_from_the_global_generator_leaves_other_numbers() -> None:
    """Would catch: calls that overlap in threads and draw the same noise, or a state that other threads drew from."""
    torch.manual_seed(5)
    expected = torch.rand(8)
    torch.manual_seed(5)
    first, between, second = take(CPU), torch.rand(8), take(CPU)
    drawn = [torch.rand(8, generator=generator) for generator in (first, second)]
    assert torch.equal(drawn[0], expected)
    numbers = torch.cat([between, *drawn, torch.rand(8)])
    assert len(numbers.unique()) == 32


def test_kept_random_state_is_restored_after_draws_and_seeds() -> None:
    """Would catch: a draft model whose missing weights are initialised at random, so that other tokens are sampled."""
    torch.manual_seed(5)
    before, seed = torch.get_rng_state(), torch.initial_seed()
    with pytest.raises(KeyError), kept(CPU):
        torch.rand(3)
        torch.manual_seed(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == seed


ARGMAX_SCORES: dict[str, torch.Tensor] = {
    "ties": torch.randint(0, 9, (3, 2, 501), generator=torch.Generator().manual_seed(1)).float(),
    "bfloat16": torch.randint(0, 9, (4, 64), generator=torch.Generator().manual_seed(1)).bfloat16(),
    "nan": torch.tensor([[1.0, float("nan"), 9.0, float("nan")]]),
    "infinite": torch.tensor([[-float("inf")] * 4]),
    "zeros": torch.tensor([[-0.0, 0.0, -0.0]]),
    "gradients": torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True),
    "view": torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(2))[:, 1::2, 3:30],
}


@pytest.mark.parametrize("name", ARGMAX_SCORES)
def test_argmax_is_that_of_torch(name: str) -> None:
    """Would catch: the last of equal maxima, memory of a slice read as if it were contiguous, tracked tensors."""
    scores = ARGMAX_SCORES[name]
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))


def test_sample_with_noise_with_nan_is_invalid() -> None:
    """Would catch: a token sampled from scores that are no distribution."""
    weights = torch.tensor([[[0.1, 0.9], [0.5, float("nan")]]])
    assert sample_with_noise(weights, torch.ones(1, 2, 2)).tolist() == [[1, INVALID]]


def test_row_noise_of_a_row_depends_on_its_seed_alone() -> None:
    """Would catch: rows that share noise, or noise that depends on the batch or on how far other rows are."""
    rows = NoiseBuffer(3, VOCAB, [seeded(5), seeded(6), seeded(5)])
    rows.at([[0], [3], [1]])
    together = rows.at([[4], [4], [4]])[:, 0]
    alone = [NoiseBuffer(1, VOCAB, [seeded(seed)]).at([[4]])[0, 0] for seed in (5, 6)]
    assert torch.equal(together, torch.stack([alone[0], alone[1], alone[0]]))
    rows.release(9)
    assert rows.max_row_skew == NoiseBuffer(3, VOCAB, [seeded(5)]).max_row_skew


def taken(seeds: NoiseSeeds, weights: int, rows: int) -> list[NoiseSeed]:
    """The seeds of a group of samples, which are kept with its number as their answer."""
    group = [seeds.take([1, 2], weights) for _ in range(rows)]
    for seed in group:
        seeds.keep([1, 2], seed, [weights])
    return group


def test_noise_seeds_are_taken_in_order_and_never_twice_by_the_same_weights() -> None:
    """Would catch: samples of a group, or of equal weights, that depend on each other."""
    seeds = NoiseSeeds()
    first, again, second = (taken(seeds, weights, 3) for weights in (7, 7, 8))
    numbers = [[one.seed for one in group] for group in (first, again, second)]
    assert len({*numbers[0], *numbers[1]}) == 6, "new noise where nothing has changed"
    assert numbers[2] == numbers[0] and [list(one.answer) for one in second] == [[7]] * 3
    third = taken(seeds, 9, 4)
    assert [one.seed for one in third[:3]] == numbers[0], "those of the last weights come first"
    assert third[3].seed == numbers[1][0]
    before = {number for group in numbers for number in group}
    assert not before & {one.seed for one in taken(seeds, 7, 9)}, "weights that come back"
    assert seeds.take([1, 3], 9).answer == ()


def test_noise_seeds_are_bounded_and_forgotten() -> None:
    """Would catch: memory that grows with every prompt."""
    seeds = NoiseSeeds(max_seeds=3)
    for prompt in range(5):
        seeds.keep([prompt], seeds.take([prompt], 1), [prompt])
    answers = [list(seeds.take([prompt], 2).answer) for prompt in range(5)]
    assert answers == [[], [], [2], [3], [4]]


def session_of(seeds: NoiseSeeds, answer: list[int]) -> VerificationSession:
    """A session that samples with the noise of earlier answers to one prompt; the row has generated `answer`."""
    state = make_state([[1, 2]])
    state.append(0, answer)
    call = make_call(state, do_sample=True)
    return RejectionVerifier().start(replace(call, settings=replace(call.settings, seeds=seeds)))


def with_answer(answer: list[int]) -> NoiseSeeds:
    """Seeds of one earlier answer of other weights."""
    seeds = NoiseSeeds()
    seeds.keep([1, 2], NoiseSeed(5, (), (3,)), answer)
    return seeds


def test_refused_call_leaves_the_seeds_as_they_were() -> None:
    """Would catch: an answer that is erased, or that the same weights no longer get, as nothing was sampled."""
    seeds = with_answer([7, 8, 9])
    for _ in range(2):
        session = session_of(seeds, [])
        assert session.predicted_tokens == [[7, 8, 9]]
        session.end(0)
    assert seeds.take([1, 2], 4) == NoiseSeed(5, [7, 8, 9], (3, 4))
    session_of(seeds, []).end(0)
    assert seeds.take([1, 2], 4).answer == (), "a seed that was made for a refused call is not kept"


@pytest.mark.parametrize(
    ("answer", "kept_answer"), [([7, 8], [7, 8, 9]), ([7, 6], [7, 6]), ([7, 8, 9, 5], [7, 8, 9, 5])]
)
def test_interrupted_call_keeps_the_longer_of_equal_answers(answer: list[int], kept_answer: list[int]) -> None:
    """Would catch: the beginning of an answer in place of all of it; an old answer in place of another one."""
    seeds = with_answer([7, 8, 9])
    session = session_of(seeds, answer)
    session.choose(torch.zeros(1, 1, 9), [[0]], DraftTree.empty(1), [[-1]])
    session.end(len(answer))
    assert seeds.take([1, 2], 4).answer == kept_answer


def test_interrupt_between_two_rows_returns_the_seeds() -> None:
    """Would catch: answers that are lost if Ctrl-C comes when some rows have taken theirs."""

    class Interrupted(NoiseSeeds):
        def take(self, prompt: Sequence[int], weights: int) -> NoiseSeed:
            if tuple(prompt) == (3, 4):
                raise KeyboardInterrupt
            return super().take(prompt, weights)

    seeds = Interrupted()
    seeds.keep([1, 2], NoiseSeed(5, (), (3,)), [7])
    call = make_call(make_state([[1, 2], [3, 4]]), do_sample=True)
    with pytest.raises(KeyboardInterrupt):
        RejectionVerifier().start(replace(call, settings=replace(call.settings, seeds=seeds)))
    assert seeds.take([1, 2], 4) == NoiseSeed(5, [7], (3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_hash_changes_with_the_weights_alone(dtype: torch.dtype) -> None:
    """Would catch: a training step that is not seen, so that no noise is used again; equal weights that differ."""
    model = torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.LayerNorm(70)).to(dtype)
    before = weights_hash(model)
    assert weights_hash(model) == before == weights_hash(model.train())
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    assert weights_hash(model) != before
