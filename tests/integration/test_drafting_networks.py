"""Draft models and layer skip: the same tokens, the right number of steps, nothing left behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from hf_specgen.adaptive import Policy
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT
from hf_specgen.target.early_exit import NOT_DIVISIBLE
from tests.helpers import ARCHITECTURES, prompts, tiny_model

DIVISIBLE = [name for name in ARCHITECTURES if name not in NOT_DIVISIBLE]
SAMPLING = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20}}
END = {"eos_token_id": list(range(30, 40)), "pad_token_id": 0}


def unsure_draft(model: Any, noise: float = 0.02) -> Any:
    """A copy of the target with disturbed weights: it is right sometimes."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator) * parameter.abs().mean()
    return draft


def both(model: Any, inputs: dict, candidates: Any, **arguments: Any) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(4)
    plain = model.generate(**inputs, **arguments)
    after = torch.rand(2)
    torch.manual_seed(4)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates, return_dict_in_generate=True)
    assert torch.equal(after, torch.rand(2)), "the random generator does not stand where plain generate left it"
    return plain, ours


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_draft_model_on_every_architecture(architecture: str) -> None:
    """Would catch: a draft cache that keeps rejected tokens, misses accepted ones, or shifts positions."""
    model = tiny_model(architecture)
    candidates = DraftModelCandidates(unsure_draft(model, noise=3.0), k=4)
    for batch in (1, 3):
        for sampling in SAMPLING.values():
            plain, ours = both(model, prompts(batch), candidates, max_new_tokens=20, **sampling)
            assert torch.equal(plain, ours.sequences)
            assert ours.speculation.drafted > 0


@pytest.mark.parametrize("architecture", DIVISIBLE)
def test_layer_skip_on_every_architecture(architecture: str) -> None:
    """Would catch: a layer run twice or not at all, states used in the wrong step, caches of different length."""
    model = tiny_model(architecture)
    for exit_layer in (1, 3):
        candidates = LayerSkipCandidates(exit_layer, k=3)
        for batch, sampling in ((1, "greedy"), (3, "sampled"), (1, "sampled"), (3, "greedy")):
            plain, ours = both(model, prompts(batch), candidates, max_new_tokens=16, **SAMPLING[sampling])
            assert torch.equal(plain, ours.sequences), (exit_layer, batch, sampling)
            assert ours.speculation.drafted > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}, END])
@pytest.mark.parametrize("kind", ["draft", "skip"])
def test_acceptance_is_partial_and_the_cache_goes_on(batch: int, processors: dict, kind: str) -> None:
    model = tiny_model("llama")
    candidates: Any = DraftModelCandidates(unsure_draft(model), k=4) if kind == "draft" else LayerSkipCandidates(3, k=4)
    plain, ours = both(model, prompts(batch), candidates, max_new_tokens=40, **processors)
    assert torch.equal(plain, ours.sequences)
    if processors is not END:
        assert 0 < ours.speculation.accepted < ours.speculation.drafted
    again = torch.cat([ours.sequences, torch.full((batch, 2), 9)], dim=1)
    mask = torch.cat(
        [prompts(batch)["attention_mask"], torch.ones(batch, again.shape[1] - 12, dtype=torch.long)], dim=1
    )
    arguments = {"input_ids": again, "attention_mask": mask, "max_new_tokens": 8}
    continued = model.generate(**arguments, past_key_values=ours.past_key_values, candidate_generator=candidates)
    if processors is not END:
        assert torch.equal(continued, model.generate(**arguments))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING.values())
@pytest.mark.parametrize("length", [6, 11, 16, 20])
def test_a_draft_that_is_the_target_accepts_everything(batch: int, sampling: dict, length: int) -> None:
    """Every step, that of the prompt included, gives k + 1 tokens: thanks to the noise tape when sampling as well."""
    model, k = tiny_model("llama"), 4
    plain, ours = both(model, prompts(batch), DraftModelCandidates(model, k=k), max_new_tokens=length, **sampling)
    assert torch.equal(plain, ours.sequences)
    assert ours.speculation.accepted == ours.speculation.drafted
    assert all(len(steps) == -(-length // (k + 1)) for steps in ours.speculation.rows)


def test_nothing_is_read_twice() -> None:
    """The draft reads the prompt once, then only what is new to it; the target's first layers run once per token."""
    model = tiny_model("llama")
    draft = unsure_draft(model)
    read: list[int] = []
    draft.register_forward_pre_hook(lambda m, a, kw: read.append(kw["input_ids"].shape[1]), with_kwargs=True)
    model.generate(**prompts(1), max_new_tokens=30, candidate_generator=DraftModelCandidates(draft, k=4))
    assert read[0] == 12 and max(read[1:]) <= 2

    ran = {0: 0, 3: 0}
    handles = [
        model.model.layers[index].register_forward_pre_hook(
            lambda m, args, index=index: ran.__setitem__(index, ran[index] + args[0].shape[1])
        )
        for index in ran
    ]
    candidates = LayerSkipCandidates(2, k=4)
    model.generate(**prompts(1), max_new_tokens=30, candidate_generator=candidates)
    for handle in handles:
        handle.remove()
    after_the_prompt = candidates.speculation.steps - 1
    assert ran[0] == ran[3] == 12 + candidates.speculation.drafted + after_the_prompt


class Late(Policy):
    """Plain steps at first."""

    def depths(self, state: Any) -> list[int]:
        return [4 if min(state.generated) > 12 or 0 in state.room else 0] * len(state.room)


def test_rows_that_have_ended_are_not_read() -> None:
    """Would catch: the text that a row wrote in plain steps before its end, read again and again for every draft."""
    model = tiny_model("llama")
    draft, inputs = unsure_draft(model), prompts(4)
    plain = model.generate(**inputs, max_new_tokens=40, pad_token_id=0)
    ends = [int(plain[row, 12 + column]) for row, column in ((0, 6), (2, 21))]
    read: list[tuple[int, int]] = []
    draft.register_forward_pre_hook(lambda m, a, kw: read.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    candidates = DraftModelCandidates(draft, k=4, policy=Late())
    settings: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": ends, "pad_token_id": 0}
    plain = model.generate(**inputs, **settings)
    ours = model.generate(**inputs, **settings, candidate_generator=candidates)
    assert torch.equal(plain, ours)
    written = [len(steps) for steps in candidates.speculation.rows]
    assert min(written) < max(written) and read[0] == (4, 12)
    catching_up, *others = read[1:]
    assert catching_up == (4, 7)
    assert max(width for _, width in others) <= 2 and min(rows for rows, _ in others) <= 2


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", ["draft", "skip", "ngram"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_first_draft_is_verified_with_the_prompt(kind: str, chunk: int | None, batch: int) -> None:
    """Would catch: a pass of the target for the prompt alone; a draft lost among the chunks of a long prompt."""
    model = tiny_model("llama")
    candidates: Any = {
        "draft": DraftModelCandidates(copy.deepcopy(model), k=4),
        "skip": LayerSkipCandidates(3, k=4),
        "ngram": NgramCandidates(k=4, branches=2),
    }[kind]
    inputs = {name: tensor.repeat(1, 2) for name, tensor in prompts(batch).items()}
    inputs["attention_mask"][:, 12:] = 1
    plain, ours = both(model, inputs, candidates, max_new_tokens=15, prefill_chunk_size=chunk)
    assert torch.equal(plain, ours.sequences)
    rows = zip(ours.speculation.rows, ours.speculation.lengths, strict=True)
    without_step = [length - sum(step.emitted for step in steps) for steps, length in rows]
    assert without_step == [0 if chunk is None else 1] * batch
    if kind == "draft" and chunk is None:
        assert [len(steps) for steps in ours.speculation.rows] == [3] * batch  # of 5 tokens each


def test_vocabulary_padded_to_another_size() -> None:
    """As with Qwen: 151,936 and 152,064 entries for one tokenizer."""
    model = tiny_model("llama")
    settings = model.config.to_dict() | {"num_hidden_layers": 1}
    small = LlamaForCausalLM(LlamaConfig(**settings | {"vocab_size": 112}))
    for draft, target in ((small, model), (model, small)):
        draft, target = copy.deepcopy(draft), copy.deepcopy(target)
        draft.config.name_or_path = target.config.name_or_path = "the-same"
        draft.name_or_path = target.name_or_path = "the-same"
        for sampling in SAMPLING.values():
            for verification in ("coupled", "rejection"):
                ids = target.generate(
                    **prompts(2),
                    max_new_tokens=12,
                    pad_token_id=0,
                    **sampling,
                    candidate_generator=DraftModelCandidates(draft, k=3),
                    verification=verification,
                )
                assert ids.shape == (2, 24)
        plain, ours = both(target, prompts(2), DraftModelCandidates(draft, k=3), max_new_tokens=12, pad_token_id=0)
        assert torch.equal(plain, ours.sequences)


def test_confidence_threshold_shortens_drafts_row_by_row() -> None:
    model = tiny_model("llama")
    draft = unsure_draft(model)
    plain, ours = both(
        model, prompts(3), DraftModelCandidates(draft, k=6, confidence_threshold=0.013), max_new_tokens=40
    )
    assert torch.equal(plain, ours.sequences)
    lengths = {step.depth for row in ours.speculation.rows for step in row if step.drafted}
    assert len(lengths) > 1, "some drafts must be cut and some not for this test to mean anything"


@pytest.mark.parametrize("batch", [1, 3])
def test_rejection_sampling_with_networks(batch: int) -> None:
    """Same distribution, not the same seed: here that it runs, accepts, is repeatable, and accepts all from itself."""
    model = tiny_model("llama")
    arguments = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "verification": "rejection"}
    for candidates in (DraftModelCandidates(unsure_draft(model), k=4), LayerSkipCandidates(2, k=3)):
        torch.manual_seed(6)
        first = model.generate(**prompts(batch), **arguments, candidate_generator=candidates)
        assert candidates.speculation.accepted > 0
        torch.manual_seed(6)
        assert torch.equal(first, model.generate(**prompts(batch), **arguments, candidate_generator=candidates))
    itself = DraftModelCandidates(model, k=4)
    model.generate(**prompts(batch), **arguments, candidate_generator=itself)
    assert itself.speculation.acceptance_rate > 0.99  # p / q is 1 but for rounding


class _Raises(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no head today")


def test_an_exception_while_drafting_leaves_the_model_as_it_was() -> None:
    """Transformers' early exit leaves the model truncated here."""
    model, inputs = tiny_model("llama"), prompts(1)
    expected = model.generate(**inputs, max_new_tokens=10)
    layers, config = list(model.model.layers), model.config.to_dict()
    with pytest.raises(RuntimeError, match="no head today"):
        model.generate(**inputs, max_new_tokens=10, candidate_generator=LayerSkipCandidates(2, adapter=_Raises()))
    assert list(model.model.layers) == layers and model.config.to_dict() == config
    assert torch.equal(model.generate(**inputs, max_new_tokens=10), expected)


def test_two_calls_are_alike() -> None:
    model = tiny_model("llama")
    for candidates in (DraftModelCandidates(unsure_draft(model), k=3), LayerSkipCandidates(2, k=4)):
        first = model.generate(**prompts(2), max_new_tokens=20, candidate_generator=candidates)
        steps = candidates.speculation.steps
        assert torch.equal(first, model.generate(**prompts(2), max_new_tokens=20, candidate_generator=candidates))
        assert candidates.speculation.steps == steps


@pytest.mark.parametrize("architecture", sorted(NOT_DIVISIBLE))
def test_models_that_cannot_be_divided(architecture: str) -> None:
    with pytest.raises(ValueError, match="cannot draft with its own first layers"):
        tiny_model(architecture).generate(**prompts(1), max_new_tokens=4, candidate_generator=LayerSkipCandidates(2))


def test_bad_settings() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        DraftModelCandidates(model, k=0)
    with pytest.raises(ValueError, match=r"confidence_threshold .* got 1.5"):
        DraftModelCandidates(model, confidence_threshold=1.5)
    with pytest.raises(ValueError, match="this one is loaded"):
        DraftModelCandidates(model, dtype="bfloat16")
    with pytest.raises(ValueError, match="k must be at least 1, got -1"):
        LayerSkipCandidates(2, k=-1)
    for exit_layer in (0, 4, 9):
        with pytest.raises(ValueError, match=f"exit_layer must be from 1 to 3 .* got {exit_layer}"):
            model.generate(**prompts(1), max_new_tokens=4, candidate_generator=LayerSkipCandidates(exit_layer))
    other = LlamaForCausalLM(LlamaConfig(**model.config.to_dict() | {"vocab_size": 70, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="vocabulary of 70, the target of 99"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=DraftModelCandidates(other))


def test_different_tokenizers(reference_model, tokenizer, tmp_path) -> None:
    """Same size, other meaning: only the tokenizers themselves can tell."""
    reference_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    a, b = f'"{vocabulary[500]}": 500', f'"{vocabulary[501]}": 501'
    assert a in text and b in text
    swapped = text.replace(a, a.replace("500", "501")).replace(b, b.replace("501", "500"))
    (tmp_path / "tokenizer.json").write_text(swapped, encoding="utf-8")
    with pytest.raises(ValueError, match="have different tokenizers"):
        reference_model.generate(
            torch.tensor([[5]]), max_new_tokens=4, candidate_generator=DraftModelCandidates(str(tmp_path))
        )


def test_a_draft_in_int8(reference_model, tokenizer) -> None:
    """Loaded by us, quantised by torchao: other guesses, the same tokens."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    candidates = DraftModelCandidates(str(EMBEDDED_DRAFT), dtype="bfloat16", quantization_config=config)
    ids = tokenizer("def add(x, y):", return_tensors="pt").input_ids
    ours = reference_model.generate(ids, max_new_tokens=30, candidate_generator=candidates)
    assert torch.equal(ours, reference_model.generate(ids, max_new_tokens=30))
    assert candidates.speculation.accepted > 0


def test_a_draft_given_by_name(reference_model, tmp_path, tokenizer) -> None:
    reference_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("def add(x, y):", return_tensors="pt").input_ids
    candidates = DraftModelCandidates(str(tmp_path), k=3, dtype="float32")
    ours = reference_model.generate(ids, max_new_tokens=13, candidate_generator=candidates)
    assert torch.equal(ours, reference_model.generate(ids, max_new_tokens=13))
    assert candidates.speculation.steps == 4
