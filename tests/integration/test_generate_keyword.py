"""The keyword, and everything around it: pipelines, PEFT, Transformers' own loop and generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationMixin, pipeline
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

import hf_specgen
from hf_specgen import DraftModelCandidates, NgramCandidates, Verifier, speculate
from hf_specgen.verification import CoupledVerifier
from tests.helpers import prompts, tiny_model


def test_install_is_idempotent_and_reversible() -> None:
    patched = GenerationMixin.generate
    original = patched._hf_specgen_original
    hf_specgen.install()
    assert GenerationMixin.generate is patched
    hf_specgen.uninstall()
    try:
        assert GenerationMixin.generate is original
        hf_specgen.uninstall()
        assert GenerationMixin.generate is original
        with pytest.raises(ValueError, match="candidate_generator"):
            tiny_model("llama").generate(**prompts(1), max_new_tokens=2, candidate_generator=NgramCandidates())
    finally:
        hf_specgen.install()


def test_generate_without_the_keyword_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an argument added, dropped or changed on the way to the original."""
    seen: list[tuple] = []

    def original(self: Any, *args: Any, **kwargs: Any) -> str:
        seen.append((self, args, kwargs))
        return "result"

    monkeypatch.setattr(GenerationMixin, "generate", original)
    hf_specgen.install()
    model = tiny_model("llama")
    custom = len  # any callable
    assert model.generate(1, 2, three=3, streamer=4, custom_generate=custom) == "result"
    assert seen == [(model, (1, 2), {"three": 3, "streamer": 4, "custom_generate": custom})]


@pytest.mark.parametrize("batch", [1, 3])
def test_custom_generate_needs_no_patch(batch: int) -> None:
    model, inputs = tiny_model("llama"), prompts(batch)
    expected = model.generate(**inputs, max_new_tokens=12)
    hf_specgen.uninstall()
    try:
        ngram = NgramCandidates(k=5)
        ours = model.generate(**inputs, max_new_tokens=12, custom_generate=speculate(ngram))
    finally:
        hf_specgen.install()
    assert torch.equal(ours, expected)
    assert ngram.speculation is not None


def test_a_verifier_of_ones_own() -> None:
    class Counting(CoupledVerifier):
        calls = 0

        def choose(self, scores: torch.Tensor, *where: Any) -> torch.Tensor:
            self.calls += 1
            return super().choose(scores, *where)

    model, inputs, verifier = tiny_model("llama"), prompts(2), Counting()
    assert isinstance(verifier, Verifier)
    ours = model.generate(**inputs, max_new_tokens=12, candidate_generator=NgramCandidates(), verification=verifier)
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=12))
    assert verifier.calls > 0


def test_text_generation_pipeline(reference_model, tokenizer, edit_prompts: list[str]) -> None:
    generate = pipeline("text-generation", model=reference_model, tokenizer=tokenizer)
    chat = [[{"role": "user", "content": prompt}] for prompt in edit_prompts[:2]]
    arguments = {"max_new_tokens": 24, "do_sample": False, "batch_size": 2}
    ngram = NgramCandidates(k=8)
    assert generate(chat, **arguments) == generate(chat, **arguments, candidate_generator=ngram)
    assert ngram.speculation.accepted > 0


def test_peft_model() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model("qwen2", num_hidden_layers=2)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    inputs, ngram = prompts(2), NgramCandidates()
    expected = model.generate(**inputs, max_new_tokens=16)
    assert torch.equal(expected, model.generate(**inputs, max_new_tokens=16, candidate_generator=ngram))
    assert ngram.speculation is not None
    with model.disable_adapter():
        plain = base.generate(**inputs, max_new_tokens=16)
        assert not torch.equal(plain, expected), "the adapter must make a difference for this test to mean anything"
        assert torch.equal(plain, base.generate(**inputs, max_new_tokens=16, candidate_generator=ngram))


def test_our_generator_in_transformers_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' assisted decoding asks the generator through `get_candidates`."""
    model, inputs = tiny_model("llama"), prompts(1)
    ours = NgramCandidates(k=4)
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda self, **kwargs: ours)
    asked: list[int] = []
    get = ours.get_candidates
    monkeypatch.setattr(ours, "get_candidates", lambda ids, **kw: asked.append(ids.shape[1]) or get(ids, **kw))
    expected = model.generate(**inputs, max_new_tokens=40)
    assert torch.equal(model.generate(**inputs, max_new_tokens=40, prompt_lookup_num_tokens=4), expected)
    assert asked and len(asked) < 40, "some guesses must have been accepted"


def test_our_draft_model_in_transformers_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the drafter hears of acceptance through `update_candidate_strategy`; this one is always right."""
    model, inputs = tiny_model("llama"), prompts(1)
    ours = DraftModelCandidates(model, k=4)
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda self, **kwargs: ours)
    asked: list[int] = []
    get = ours.get_candidates
    monkeypatch.setattr(ours, "get_candidates", lambda ids, **kw: asked.append(ids.shape[1]) or get(ids, **kw))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    expected = model.generate(**inputs, max_new_tokens=25)
    assert torch.equal(model.generate(**inputs, max_new_tokens=25, prompt_lookup_num_tokens=4), expected)
    assert asked == [12, 17, 22, 27, 32]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 0}])
def test_transformers_generator_in_our_loop(sampling: dict) -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=60)
    torch.manual_seed(2)
    expected = model.generate(**inputs, max_new_tokens=40, **sampling)
    torch.manual_seed(2)
    output = model.generate(
        **inputs, max_new_tokens=40, **sampling, candidate_generator=generator, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation.drafted > 0


def test_third_party_generator_hears_what_became_of_its_guesses() -> None:
    class Repeats(CandidateGenerator):
        heard: list[int] = []

        def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any):
            return torch.cat([input_ids, input_ids[:, -1:], input_ids[:, -1:]], dim=1), None

        def update_candidate_strategy(self, input_ids: torch.Tensor, scores: Any, num_matches: int) -> None:
            self.heard.append(num_matches)

    model, inputs, generator = tiny_model("llama"), prompts(1), Repeats()
    output = model.generate(**inputs, max_new_tokens=30, candidate_generator=generator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=30))
    assert generator.heard == [step.accepted for step in output.speculation.rows[0] if step.drafted]
    with pytest.raises(ValueError, match="works on one row, got 3"):
        model.generate(**prompts(3), max_new_tokens=5, candidate_generator=generator)


def test_generator_that_reads_the_targets_outputs() -> None:
    class Reads(CandidateGenerator):
        requires_model_outputs = True

    with pytest.raises(ValueError, match="reads the target's outputs"):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=5, candidate_generator=Reads())


def test_two_calls_are_alike() -> None:
    """No state is carried from one call to the next unless asked to (a history)."""
    model, inputs, ngram = tiny_model("llama"), prompts(2), NgramCandidates(k=4, branches=2)
    first = model.generate(**inputs, max_new_tokens=30, candidate_generator=ngram)
    counts = ngram.speculation.to_dict() | {"seconds": None, "rows": None}
    second = model.generate(**inputs, max_new_tokens=30, candidate_generator=ngram)
    assert torch.equal(first, second)
    assert ngram.speculation.to_dict() | {"seconds": None, "rows": None} == counts


def test_one_generator_in_two_threads() -> None:
    """A server streams from several threads: the state of a call belongs to the call."""
    from concurrent.futures import ThreadPoolExecutor

    model, ngram = tiny_model("llama"), NgramCandidates(k=4)
    inputs = [prompts(1, length=length) for length in (8, 12, 16, 20)]
    expected = [model.generate(**each, max_new_tokens=24) for each in inputs]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(model.generate, **each, max_new_tokens=24, candidate_generator=ngram) for each in inputs]
    assert all(torch.equal(call.result(), want) for call, want in zip(calls, expected, strict=True))
