"""The keyword `candidate_generator=` and its surroundings: Transformers' own loop and generators, formats, presets."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

import hf_specgen
from hf_specgen import (
    AutoCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    GemmaAssistantCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    MTPCandidates,
    NgramCandidates,
    PEagleCandidates,
    attached,
    generate_many,
    speculate,
)
from hf_specgen.candidates.combined import PresetCandidates
from hf_specgen.patch import WRAPPERS
from tests.helpers import SAMPLING, perturbed_copy, prompts, tiny_model
from tests.helpers.comparison import seed
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.medusa import random_heads
from tests.helpers.paths import BENCHMARK_ASSETS, HEAD_FIXTURES
from tests.helpers.policies import Pattern

# Another default device


class _OnTheDefaultDevice(LogitsProcessor):
    """A function of the user's, whose tensors are made where the program has asked for it."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert torch.empty(1).is_meta
        return scores


STRATEGIES: dict[str, Callable[[Any], Any]] = {
    "auto": lambda model: "auto",
    "draft": lambda model: DraftModelCandidates(perturbed_copy(model), tree=6),
    "medusa": lambda model: MedusaCandidates(random_heads(model), tree=6),
    "skip": lambda model: LayerSkipCandidates(1, k=3),
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_default_device_of_the_program_same_tokens(strategy: str, sampling: str) -> None:
    """Would catch: tensors that name no device, which `torch.set_default_device` then makes on an accelerator."""
    model, inputs = tiny_model("llama"), prompts(3)
    candidates = STRATEGIES[strategy](model)
    rows = [row.tolist() for row in inputs["input_ids"]]
    many = {"max_new_tokens": 10, "seed": 3, "ordered": True, **SAMPLING[sampling]}
    expected = [answer.tokens for answer in generate_many(model, rows, candidates, **many)]
    with torch.device("meta"):  # on which nothing can be read
        for settings in ({}, {"logits_processor": LogitsProcessorList([_OnTheDefaultDevice()])}):
            arguments = {"max_new_tokens": 10, **SAMPLING[sampling], **settings}
            seed(3)
            plain = model.generate(**inputs, **arguments)
            seed(3)
            assert torch.equal(model.generate(**inputs, **arguments, candidate_generator=candidates), plain)
        assert [answer.tokens for answer in generate_many(model, rows, candidates, **many)] == expected
        assert len(list(generate_many(model, rows, candidates, **{**many, "seed": None}))) == 3


# Installation


@pytest.mark.parametrize("batch", [1, 3])
def test_uninstall_restores_the_original_and_custom_generate_works(batch: int) -> None:
    """Would catch: a second wrapper that stays after `uninstall`, or `speculate` that needs the keyword."""
    original = GenerationMixin.generate._hf_specgen_original  # type: ignore[attr-defined]
    model, inputs, ngram = tiny_model("llama"), prompts(batch), NgramCandidates(k=5)
    try:
        for _ in range(2):
            hf_specgen.uninstall()
            assert GenerationMixin.generate is original
        ours = model.generate(**inputs, max_new_tokens=12, custom_generate=speculate(ngram))
    finally:
        hf_specgen.install()
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=12)) and ngram.speculation is not None


def test_generate_without_the_keyword_passes_all_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an argument added, dropped or changed on the way to the original."""
    seen: list[tuple] = []

    def original(self: Any, *args: Any, **kwargs: Any) -> str:
        seen.append((self, args, kwargs))
        return "result"

    monkeypatch.setattr(GenerationMixin, "generate", original)
    hf_specgen.install()
    model, custom = tiny_model("llama"), len  # any callable
    assert model.generate(1, 2, three=3, streamer=4, custom_generate=custom) == "result"
    assert seen == [(model, (1, 2), {"three": 3, "streamer": 4, "custom_generate": custom})]


def test_uninstall_keeps_the_wrapper_of_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: restoring the original over a tracer that was put around our function later."""
    traced: list[str] = []

    def original(self: Any, *args: Any, **kwargs: Any) -> str:
        return f"plain {sorted(kwargs)}"

    monkeypatch.setattr(GenerationMixin, "generate", original)
    hf_specgen.install()
    inner: Any = GenerationMixin.generate

    @functools.wraps(inner)
    def tracer(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append("call")
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", tracer)
    hf_specgen.uninstall()
    assert GenerationMixin.generate is tracer
    assert tracer(None, candidate_generator=1) == "plain ['candidate_generator']" and traced == ["call"]
    hf_specgen.install()
    assert GenerationMixin.generate is tracer, "our function inside is enabled again, not wrapped twice"
    assert tracer(None, candidate_generator=None) == "plain []"


def test_wrapped_generate_keeps_gradients_as_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: `generate.__wrapped__`, by which programs keep gradients, that is still below `no_grad`."""
    for name in WRAPPERS:
        patched = getattr(GenerationMixin, name)
        assert patched.__wrapped__ is patched._hf_specgen_original.__wrapped__
    monkeypatch.setattr(GenerationMixin, "generate", torch.no_grad()(inspect.unwrap(GenerationMixin.generate)))
    hf_specgen.install()
    settings = {"max_new_tokens": 3, "output_scores": True, "return_dict_in_generate": True}
    output = GenerationMixin.generate.__wrapped__(model := tiny_model("llama"), **prompts(1), **settings)  # type: ignore[attr-defined]
    assert all(scores.requires_grad for scores in output.scores)
    assert torch.equal(output.sequences, model.generate(**prompts(1), max_new_tokens=3))


def test_strategy_inside_transformers_own_loop_raises_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a strategy that drafts there without target and verification, or an error that names no remedy."""
    model, candidates = tiny_model("llama"), NgramCandidates(k=4)
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda self, **_: candidates)
    with pytest.raises(ValueError, match=r"pass it as generate\(candidate_generator=\.\.\.\)"):
        model.generate(**prompts(1), max_new_tokens=5, prompt_lookup_num_tokens=4)


# Transformers' generators in our loop


class RecordingGenerator(CandidateGenerator):
    """Proposes two tokens of a text, followed by a wrong one, and records its calls."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.calls: list[Any] = []

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.calls.append(input_ids.tolist())
        known = self.text[input_ids.shape[1] :][:2]
        return torch.cat([input_ids, torch.tensor([[*known, 98]])], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: Any, num_matches: int) -> None:
        self.calls.append((input_ids.tolist(), len(scores[0]), num_matches))


@pytest.mark.parametrize("is_right", [True, False])
def test_native_generator_receives_the_calls_of_transformers_loop(is_right: bool, monkeypatch: Any) -> None:
    """Would catch: a generator that starts with another text than the prompt, or never learns what was accepted."""
    model, inputs = tiny_model("llama"), prompts(1)
    expected = model.generate(**inputs, max_new_tokens=12)
    [text] = expected.tolist()
    if not is_right:
        text[inputs["input_ids"].shape[1]] = 97
    ours, theirs = RecordingGenerator(text), RecordingGenerator(text)
    output = model.generate(**inputs, max_new_tokens=12, candidate_generator=ours, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert ours.speculation is output.speculation and output.speculation.accepted > 0  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda self, **_: theirs)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, prompt_lookup_num_tokens=2), expected)
    assert len(ours.calls) >= 6 and ours.calls == theirs.calls[: len(ours.calls)]


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_assisted_generator_as_transformers_builds_it_same_tokens(schedule: str) -> None:
    """Would catch: an assistant whose first text is longer than the mask of the prompt, or scores that it measures."""
    model, inputs = tiny_model("llama"), prompts(1)
    assistant = perturbed_copy(model)
    settings: Any = {"min_length": 0, "max_length": 60, "pad_token_id": 0, "do_sample": False}
    for name, value in settings.items():
        setattr(assistant.generation_config, name, value)
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    generator = AssistedCandidateGenerator(
        inputs["input_ids"],
        assistant,
        assistant.generation_config,
        {"attention_mask": inputs["attention_mask"]},
    )
    output = model.generate(**inputs, max_new_tokens=20, candidate_generator=generator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=20))
    assert output.speculation.accepted > 0


def test_assisted_generator_after_plain_steps_drafts_from_the_text_alone() -> None:
    """Would catch: keys and values of rejected draft tokens that plain steps leave in the cache of the assistant."""
    model, inputs = tiny_model("llama"), prompts(1)
    assistant = perturbed_copy(model, 0.3)  # most of its draft tokens are rejected
    config = GenerationConfig(min_length=0, max_length=60, pad_token_id=0, do_sample=False)
    fixed = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**fixed, assistant_confidence_threshold=0)
    drafts = list[tuple[torch.Tensor, torch.Tensor]]()

    class Recorded(AssistedCandidateGenerator):
        def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            candidates = super().get_candidates(input_ids, **kwargs)  # type: ignore[arg-type]
            drafts.append((input_ids, candidates[0]))
            return candidates

    arguments: Any = (assistant, config, {"attention_mask": inputs["attention_mask"]})
    generator = Recorded(inputs["input_ids"], *arguments)
    for _ in range(2):  # the second call begins with the cache of the first one
        output = model.generate(**inputs, max_new_tokens=40, candidate_generator=generator, policy=Pattern(5, 0, 0, 0))
        assert torch.equal(output, model.generate(**inputs, max_new_tokens=40))
    assert len(drafts) > 10
    for text, candidates in drafts:
        new = AssistedCandidateGenerator(text, assistant, config, {"attention_mask": torch.ones_like(text)})
        assert torch.equal(new.get_candidates(text)[0], candidates)


# `AutoCandidates`: every format leads to its strategy, and every other folder to a reason

KINDS: dict[str, type] = {
    "autoregressive": EagleCandidates,
    "block": DFlashCandidates,
    "lattice": DFlashCandidates,
    "path": DFlashCandidates,
    "parallel": PEagleCandidates,
    "mtp": MTPCandidates,
    "mtp_recursive": MTPCandidates,
    "assistant": GemmaAssistantCandidates,
    "medusa": MedusaCandidates,
    "parallel_draft": DraftModelCandidates,
}
EMBEDDED = {"medusa-heads": MedusaCandidates, "exit-adapter": LayerSkipCandidates, "draft-lm": DraftModelCandidates}


def test_auto_known_format_gives_its_strategy() -> None:
    """Would catch: a format that is recognised by its folder's name, or as another one."""
    for fixture in FIXTURES.values():
        assert type(AutoCandidates.from_pretrained(fixture.checkpoint_folder)) is KINDS[fixture.family], fixture.folder
    for name, kind in EMBEDDED.items():
        assert type(AutoCandidates.from_pretrained(BENCHMARK_ASSETS / name)) is kind


def test_auto_subfolder_and_settings_reach_the_strategy() -> None:
    """Would catch: a setting or a folder that is dropped on the way."""
    candidates = AutoCandidates.from_pretrained(HEAD_FIXTURES / "eagle3_original", subfolder="head", k=3, tree=8)
    assert repr(candidates) == f"EagleCandidates({str(HEAD_FIXTURES / 'eagle3_original' / 'head')!r}, k=3, tree=8)"
    adapter = str(BENCHMARK_ASSETS / "exit-adapter")
    for kind in (AutoCandidates, LayerSkipCandidates):  # whose exit layer the adapter names
        skip = kind.from_pretrained(BENCHMARK_ASSETS, subfolder="exit-adapter", k=2)
        assert repr(skip) == f"LayerSkipCandidates(exit_layer=4, k=2, adapter={adapter!r})"


@pytest.mark.parametrize("kind", [DraftModelCandidates, EagleCandidates, MedusaCandidates])
def test_hub_arguments_reach_the_download_of_any_checkpoint(kind: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Would catch: a revision or token that is taken and not used."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    given = {"revision": "v2", "token": "secret", "cache_dir": tmp_path}
    assert repr(str(tmp_path / "sub")) in repr(kind.from_pretrained("org/draft", subfolder="sub", **given))
    (call,) = calls
    assert given.items() <= call.items() and call["name"] == "org/draft" and "sub/*.json" in call["allow_patterns"]
    assert "'org/draft'" in repr(kind.from_pretrained("org/draft", trust_remote_code=True)) and len(calls) == 1


@pytest.mark.parametrize("kind", [AutoCandidates, DraftModelCandidates, MedusaCandidates, LayerSkipCandidates])
def test_revision_that_is_not_cached_is_named_offline(kind: Any, tmp_path: Path) -> None:
    """Would catch: an error of the Hub's client that names neither repository nor revision."""
    with pytest.raises(FileNotFoundError, match="org/draft@v2 "):
        kind.from_pretrained("org/draft", revision="v2", cache_dir=tmp_path)


def test_prediction_is_encoded_by_the_tokenizer_of_the_call(reference_model: Any, monkeypatch: Any) -> None:
    """Would catch: a target loaded with revision= whose expected output is encoded by the main branch's tokenizer."""

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return answer

    prompt = torch.tensor([[5, 6, 7]])
    answer = reference_model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", pytest.fail)
    given = {"candidate_generator": NgramCandidates(k=6), "prediction": "the answer", "tokenizer": Tokenizer()}
    output = reference_model.generate(prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **given)
    assert output.sequences[0, 3:].tolist() == answer and output.speculation.steps < 4


# Presets: the strategy that each chooses for a target, and the tokens of plain generate

CHOSEN = {
    "auto": "CombinedCandidates([NgramCandidates(",
    "latency": "CombinedCandidates([NgramCandidates(",
    "throughput": "NgramCandidates(",
    "memory": "NgramCandidates(k=8",
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("batch", [1, 3])
def test_preset_has_plain_tokens_and_names_what_it_chose(name: str, batch: int) -> None:
    """Would catch: other tokens by one of the ways to give a preset, a summary without its choice, or elsewhere."""
    model, inputs = tiny_model("llama"), prompts(batch)
    preset = PresetCandidates(name)
    plain = model.generate(**inputs, max_new_tokens=12)
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True}
    outputs = [
        model.generate(**inputs, candidate_generator=name, **settings),
        model.generate(**inputs, custom_generate=speculate(name), **settings),  # type: ignore[arg-type]
        model.generate(**inputs, candidate_generator=preset, **settings),
    ]
    with attached(model, name) as totals:  # type: ignore[arg-type]
        outputs.append(model.generate(**inputs, **settings))
    for output in outputs:
        assert torch.equal(output.sequences, plain)
        assert output.speculation.summary().startswith(CHOSEN[name])
        assert "AdaptiveDepth()" in output.speculation.summary()
    assert totals.calls == 1
    assert preset.speculation is outputs[2].speculation, "on the object of the caller"


def test_latency_preset_uses_the_mtp_layer_of_a_checkpoint_that_has_one() -> None:
    """Would catch: a config with a default number of MTP layers whose checkpoint has none, refused as an error."""
    preset, fixture = PresetCandidates("latency"), FIXTURES["mtp_transformers_glm4_moe"]
    model = AutoModelForCausalLM.from_pretrained(fixture.target_folder)
    assert "MTPCandidates" in repr(preset.for_model(model)) and preset.for_model(model) is preset.for_model(model)
    without = AutoModelForCausalLM.from_config(model.config)
    without.config.name_or_path = ""
    assert "MTPCandidates" not in repr(preset.for_model(without))
    assert "MTPCandidates" not in repr(PresetCandidates("throughput").for_model(model))
