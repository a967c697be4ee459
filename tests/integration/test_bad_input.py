"""Bad input raises an error that names the argument, its value and the remedy, and leaves the model as it was."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen import (
    AdaptiveDepth,
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    MovingWindow,
    MTPCandidates,
    NgramCandidates,
    NgramHistory,
    RecyclingCandidates,
    Schedule,
    SpeculationMonitor,
    attach,
    attached,
    detach,
    generate_many,
    prepacked,
    speculate,
    statistics,
)
from hf_specgen.compat import CACHE
from hf_specgen.depth import DisableWhen
from hf_specgen.verification import TypicalVerifier
from tests.helpers import RecordingStreamer, fresh_model, prompts, tiny_model
from tests.helpers.encoder_decoder import encoder_decoder
from tests.helpers.models import STATEFUL, stateful_model
from tests.helpers.paths import DRAFT_LM, HEAD_FIXTURES

NOT_A_STRATEGY = (
    'candidate_generator must be a preset such as "auto", or a CandidateGenerator such as NgramCandidates(k=5)'
)
WINDOW = 'draft_window must be "auto", None, a number of recent tokens or a pair'
VOCABULARY = 'draft_vocabulary must be "frequent", None or token ids'
NOT_A_MODEL = "attach takes a Transformers model that can generate, got"
NO_WINDOWS = [0, -1, (4,), (1, 2, 3), (4, 0), "long", True, (-1, 4)]
NO_VOCABULARIES = ["rare", [], [1.5], [-1], [True], 5, np.arange(0), np.ones(2), torch.ones(2, 2, dtype=torch.int)]
TOKENS = "must be a number of tokens, at least 1, got "
LAYERS = "exit_layer must be a number of layers, at least 1, got "
NO_TEXT = "a text must be token ids, such as tokenizer(text)['input_ids'], got "
CONSTRUCTORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: NgramCandidates(k=0), ValueError, 'k must be a number of tokens, at least 1, or "auto", got 0'),
    (lambda: NgramCandidates(k=None), ValueError, 'k must be a number of tokens, at least 1, or "auto", got None'),
    (lambda: NgramCandidates(k=True), ValueError, 'k must be a number of tokens, at least 1, or "auto", got True'),
    (lambda: NgramCandidates(history="x"), TypeError, "must be an NgramHistory, such as NgramHistory.load(file), got"),
    (lambda: NgramHistory().add_texts("text", None), TypeError, "give [text] for a single one"),
    (lambda: FixedDepth("3"), ValueError, "k must be a number of tokens, at least 0, or None for the strategy's k"),
    (lambda: Schedule([1, 2]), ValueError, "a schedule maps sizes to depths, such as {1: 8, 4: 4, 16: 0}, got [1, 2]"),
    (lambda: Schedule({1: "a"}), ValueError, "got {1: 'a'}"),
    (lambda: MovingWindow(target="x"), ValueError, "target must be between 0 and 1, got 'x'"),
    (lambda: DisableWhen(), ValueError, "needs temperature_above or new_tokens_below"),
    (lambda: AdaptiveDepth(latency=3), TypeError, "latency must be a LatencyModel or a file of hf-specgen tune, got 3"),
    (lambda: AdaptiveDepth("/none"), OSError, "cannot read '/none': No such file or directory; hf-specgen tune"),
    (lambda: SpeculationMonitor(window="a"), ValueError, "window must be a number of steps, at least 1, got 'a'"),
    (lambda: prepacked("x").__enter__(), TypeError, "prepacked takes a model, got 'x'"),
    (lambda: list(generate_many(tiny_model("llama"), ["x"])), TypeError, "must be token ids, such as tokenizer(text)"),
    (lambda: generate_many(tiny_model("llama"), [[1], [2]], seed=[1]), ValueError, "1 entries for 2 prompts; give one"),
    *(
        (
            partial(generate_many, tiny_model("llama"), [[1]], seed=seed),
            ValueError,
            "integer below 2**63, or one for each",
        )
        for seed in (1.5, 2**64, [None])
    ),
    *((partial(attach, one, "auto"), TypeError, NOT_A_MODEL) for one in ("model", torch.nn.Linear(2, 2), None)),
    (lambda: NgramCandidates(min_ngram=0), ValueError, f"min_ngram {TOKENS}0"),
    (lambda: NgramCandidates(min_ngram=None), ValueError, f"min_ngram {TOKENS}None"),
    (lambda: NgramCandidates(min_ngram=1.5), ValueError, f"min_ngram {TOKENS}1.5"),
    (lambda: NgramCandidates(max_ngram=2.5), ValueError, "max_ngram must be a number of tokens, at least 1"),
    (lambda: NgramCandidates(max_ngram="3"), ValueError, "max_ngram must be a number of tokens, at least 1"),
    (lambda: NgramCandidates(min_ngram=4, max_ngram=3), ValueError, "at least 4, which is min_ngram, got 3"),
    (lambda: NgramCandidates(policy=3), TypeError, "policy must be a Policy"),
    (lambda: NgramHistory(max_tokens=0), ValueError, f"max_tokens {TOKENS}0"),
    *((partial(NgramHistory().add, one), TypeError, NO_TEXT) for one in ([[1, 2]], "abc", [1.5], [2**40], None)),
    (lambda: NgramHistory().forget("abc"), TypeError, NO_TEXT),
    (lambda: EagleCandidates("org/head", k=0), ValueError, "k must be a number of tokens, at least 1"),
    (lambda: EagleCandidates("org/head", tree=0), ValueError, "tree must be"),
    (lambda: EagleCandidates(3), TypeError, "a loaded head, a folder or a Hub id, got 3"),
    (lambda: MedusaCandidates("there", tree="widest"), ValueError, "tree must be a number of nodes, at least 1"),
    (lambda: MedusaCandidates("there", tree=0), ValueError, "a number of nodes, at least 1, or"),
    (lambda: MedusaCandidates("there", draft_window=9), ValueError, "draft_window=9 has no effect"),
    (lambda: MedusaCandidates("there", tree=[[0], [1]]), ValueError, "tree must be a number of nodes"),
    (lambda: LayerSkipCandidates("2"), ValueError, f"{LAYERS}'2'"),
    (lambda: LayerSkipCandidates(True), ValueError, f"{LAYERS}True"),
    (lambda: LayerSkipCandidates(0), ValueError, f"{LAYERS}0"),
    (lambda: DraftModelCandidates(None), TypeError, "a loaded model, a Hub id or a folder, got None"),
    (lambda: DraftModelCandidates(tiny_model("llama"), k=0), ValueError, "k must be a number of tokens, at least 1"),
    (lambda: DraftModelCandidates("there", confidence_threshold=1.5), ValueError, "got 1.5"),
    (lambda: DraftModelCandidates("there", confidence_threshold=None), ValueError, "got None"),
    (lambda: DraftModelCandidates(tiny_model("llama"), dtype="bfloat16"), ValueError, "this one is loaded"),
    (lambda: CombinedCandidates([]), ValueError, "at least one strategy"),
    (lambda: CombinedCandidates([5]), TypeError, "takes strategies"),
    (lambda: CombinedCandidates(NgramCandidates()), TypeError, "takes a list of strategies, got NgramCandidates("),
    (lambda: DraftModelCandidates("org/d", kk=4), TypeError, "unexpected keyword argument 'kk'"),  # type: ignore[call-arg]
    (lambda: DraftModelCandidates("org/d", dtype="float23"), ValueError, 'dtype must be "auto" or a dtype such as'),
    (lambda: CombinedCandidates([MTPCandidates()], prediction=[1]), ValueError, "needs n-grams among the strategies"),
    *((partial(DraftModelCandidates, "org/draft", draft_window=one), ValueError, WINDOW) for one in NO_WINDOWS),
    *((partial(MTPCandidates, draft_vocabulary=one), ValueError, VOCABULARY) for one in NO_VOCABULARIES),
    (lambda: Schedule(), ValueError, "needs by_batch or by_context"),
    (lambda: Schedule(by_batch={4: -1}), ValueError, "got {4: -1}"),
    (lambda: MovingWindow(target=1.0), ValueError, "must be"),
    (lambda: MovingWindow(window=0), ValueError, "must be"),
    # Depth 0 gives no outcome to learn from: it would never draft.
    (lambda: MovingWindow(start=0), ValueError, "at least 1, or None for the strategy's k, got 0"),
    (lambda: MovingWindow(start="4"), ValueError, "start must be a number of tokens, at least 1, or None"),
    (lambda: TypicalVerifier(epsilon=0.0), ValueError, "must be above 0 and at most 1, got 0.0"),
    (lambda: TypicalVerifier(epsilon=1.5), ValueError, "must be above 0 and at most 1, got 1.5"),
    (lambda: TypicalVerifier(epsilon=cast(Any, "0.3")), ValueError, "epsilon must be above 0 and at most 1, got '0.3'"),
    (lambda: TypicalVerifier(alpha=float("nan")), ValueError, "alpha must be above 0 and at most 1, got nan"),
    *((partial(SpeculationMonitor, one), ValueError, f"steps, at least 1, got {one}") for one in (0, True, 1.5)),
    (lambda: FixedDepth(True), ValueError, "at least 0, or None for the strategy's k, got True"),
    (lambda: Schedule({1: True}), ValueError, "got {1: True}"),
    (lambda: generate_many(tiny_model("llama"), [[1]], max_rows=True), ValueError, "at least 1, got True"),
    (lambda: detach(5), TypeError, "detach takes a Transformers model that can generate, got int"),
    (lambda: statistics(5), TypeError, "statistics takes a Transformers model that can generate, got int"),
    (lambda: attached(5, "auto").__enter__(), TypeError, "attached takes a Transformers model that can generate"),
    (lambda: SpeculationMonitor(prometheus=False).acceptance("all"), ValueError, 'must be "window" or "total", got'),
]


@pytest.mark.parametrize(("make", "error", "words"), CONSTRUCTORS)
def test_constructor_of_bad_value_raises(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    """Would catch: a bad value that fails in the first call only, or an error without the argument and its value."""
    with pytest.raises(error, match=re.escape(words)):
        make()


THREE = np.int64(3)
COUNTS: list[tuple[Callable[[], Any], Any]] = [
    (lambda: NgramCandidates(k=THREE).k, 3),
    (lambda: NgramCandidates(tree=THREE).tree, 3),
    (lambda: (NgramCandidates(min_ngram=THREE).min_ngram, NgramCandidates(max_ngram=THREE).max_ngram), (3, 3)),
    (lambda: FixedDepth(THREE).k, 3),
    (lambda: list(Schedule({THREE: THREE}, by_context={4: THREE}).by_context.values()), [3]),
    (lambda: (MovingWindow(window=THREE).window, MovingWindow(start=THREE).first_depth), (3, 3)),
    (lambda: LayerSkipCandidates(THREE).exit_layer, 3),
    (lambda: NgramHistory(THREE).max_tokens, 3),
    (lambda: SpeculationMonitor(THREE).window.maxlen, 3),
    (lambda: DraftModelCandidates("there", draft_window=THREE).draft_window, 3),
    (lambda: DraftModelCandidates("there", draft_window=(THREE, THREE)).draft_window, (3, 3)),
    *(
        (lambda ids=ids: DraftModelCandidates("there", draft_vocabulary=ids).draft_vocabulary, (3, 4))  # type: ignore[misc]
        for ids in (np.array([4, 3]), torch.tensor([3, 4, 4]), [THREE, 4], range(3, 5), {3, 4})
    ),
    (lambda: len(list(generate_many(tiny_model("llama"), [[1, 2]], max_rows=THREE, max_new_tokens=2))), 1),
]


@pytest.mark.parametrize(("made", "expected"), COUNTS)
def test_integers_of_other_libraries_are_plain_ones(made: Callable[[], Any], expected: Any) -> None:
    """Would catch: an integer of NumPy that is refused, or that is kept and fails where a plain one is needed."""
    value = made()
    assert value == expected
    assert all(type(one) is int for one in (value if isinstance(value, tuple | list) else [value]))


SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"candidate_generator": 5}, TypeError, NOT_A_STRATEGY + ", got 5"),
    ({"candidate_generator": "best"}, ValueError, "no preset 'best'; choose 'auto', 'latency', 'throughput', 'memory'"),
    (
        {"candidate_generator": torch.nn.Linear(2, 2)},
        TypeError,
        NOT_A_STRATEGY + ", got a model of type Linear; for a draft model give DraftModelCandidates(model)",
    ),
    ({"candidate_generator": NgramCandidates}, TypeError, "; give an object, with parentheses behind the name"),
    ({"candidate_generator": [NgramCandidates()]}, TypeError, "for several strategies give CombinedCandidates([...])"),
    ({"candidate_generator": Path("org/d")}, TypeError, "for a checkpoint give AutoCandidates.from_pretrained(path)"),
    ({"verification": "magic"}, ValueError, "must be 'exact', 'rejection', 'typical' or a Verifier, got 'magic'"),
    ({"policy": 3}, TypeError, "policy must be a Policy such as Schedule({1: 8, 4: 4, 16: 0}), got 3"),
    ({"monitor": "x"}, TypeError, "monitor must be a Monitor such as SpeculationMonitor(), got 'x'"),
    ({"compile": "x"}, ValueError, 'compile must be "auto", "graphs" or False, got \'x\''),
    ({"compile": True}, ValueError, 'compile must be "auto", "graphs" or False, got True'),
    ({"grammar_drafts": "yes"}, TypeError, "grammar_drafts must be True or False, got 'yes'"),
    ({"memory": 1}, TypeError, "memory must be True or False, got 1"),
    ({"history": 5}, TypeError, "history must be True, a file or an NgramHistory, got 5"),
]
"""Settings of a call, by keyword, for `speculate` and for `attach`."""


def test_strategy_as_custom_generate_raises() -> None:
    """Would catch: a call that is silently plain, since Transformers ignores what it cannot call."""
    with pytest.raises(ValueError, match=r"custom_generate= takes no strategy; give it as candidate_generator="):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=4, custom_generate=NgramCandidates())


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
def test_draft_on_a_device_that_does_not_exist_raises(device: str) -> None:
    """Would catch: an error about the draft's tokenizer for a misspelt device."""
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used for the draft"):
        draft = DraftModelCandidates(str(DRAFT_LM), device=device)
        tiny_model("llama").generate(**prompts(1), max_new_tokens=4, candidate_generator=draft)


@pytest.mark.parametrize("prediction", [5, 1.5, b"abc", [[[1]]], [1, "a"], [1.5, 2], [{}], object()])
def test_prediction_of_another_type_raises(prediction: Any) -> None:
    """Would catch: bytes or numbers with a fraction that are taken for token ids, or an error without the argument."""
    with pytest.raises(TypeError, match="prediction must be a text, token ids, or a list with one of them for each"):
        tiny_model("llama").generate(**prompts(1), candidate_generator="auto", prediction=prediction, max_new_tokens=4)


def test_predicted_text_for_a_target_without_a_name_raises() -> None:
    """Would catch: an error of the Hub about a repository named ''."""
    with pytest.raises(ValueError, match=r"not loaded from a folder or repository.*give generate\(tokenizer="):
        tiny_model("llama").generate(**prompts(1), candidate_generator=NgramCandidates(), prediction="some text")


SAVED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {"use_cache": False},
        "give use_cache=True (use_cache=False is saved in model.generation_config",
        {"use_cache": True},
    ),
    ({"num_beams": 3}, "set num_beams=1 instead of 3", {"num_beams": 1}),
    ({"prompt_lookup_num_tokens": 3}, "(prompt_lookup_num_tokens=3 is saved in model.generation_config", {}),
    ({"output_hidden_states": True}, "give output_hidden_states=False (", {"output_hidden_states": False}),
]


@pytest.mark.parametrize(("saved", "words", "remedy"), SAVED)
def test_setting_saved_in_a_checkpoint_is_named_with_a_remedy(saved: dict, words: str, remedy: dict) -> None:
    """Would catch: a setting of the checkpoint that is refused as if the caller had given it."""
    model = fresh_model("llama", num_hidden_layers=1)
    model.generation_config.update(**saved)
    call = {**prompts(1), "max_new_tokens": 4, "candidate_generator": NgramCandidates()}
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        model.generate(**call)
    assert "saved in model.generation_config" in str(caught.value)
    if remedy:
        model.generate(**call, **remedy)


@pytest.mark.parametrize("entry", ["keyword", "speculate", "attach", "call of an attached model"])
@pytest.mark.parametrize(("settings", "error", "words"), SETTINGS, ids=lambda value: str(value)[:40])
def test_setting_of_bad_value_raises(settings: dict[str, Any], error: Any, words: str, entry: str) -> None:
    """Would catch: a value that is accepted and fails or misleads later."""
    model = fresh_model("llama", num_hidden_layers=2)
    before = dict(vars(model))
    settings = {"candidate_generator": NgramCandidates(), **settings}
    if entry == "call of an attached model":
        attach(model, NgramCandidates(), strict=True)
        if isinstance(settings["candidate_generator"], NgramCandidates):
            settings.pop("candidate_generator")
    with pytest.raises(error, match=re.escape(words)):
        if entry == "speculate":
            speculate(**settings)
        elif entry == "attach":
            attach(model, **settings)
        else:
            model.generate(**prompts(1), max_new_tokens=4, **settings)
    assert entry == "call of an attached model" or vars(model) == before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"strict": "no"}, TypeError, "strict must be True or False, got 'no'"),
        ({"depth": 3}, TypeError, "and strict, got depth="),
        ({"candidate_generator": LayerSkipCandidates(99)}, ValueError, "exit_layer"),
    ],
)
def test_attach_of_bad_value_raises_and_leaves_the_model(arguments: dict, error: Any, words: str) -> None:
    """Would catch: a strategy that is attached in spite of the error."""
    model = fresh_model("llama", num_hidden_layers=2)
    before = dict(vars(model))
    with pytest.raises(error, match=re.escape(words)):
        attach(model, **arguments)
    assert vars(model) == before


class ReadsOutputs(CandidateGenerator):
    """As none of Transformers' own that can be given by keyword."""

    requires_model_outputs = True


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "not with beam_search; set num_beams=1 instead of 2"),
    ({"num_beams": 2, "do_sample": True}, "set num_beams=1 instead of 2"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "not with contrastive_search; leave out penalty_alpha="),
    ({"dola_layers": "low"}, "not with dola_generation; leave out dola_layers="),
    ({"assistant_early_exit": 1}, "not with assisted_generation; leave out assistant_early_exit=, or"),
    (
        {"assistant_model": "any"},
        "assistant_model= asks for Transformers' own assisted generation; leave it out, or use",
    ),
    ({"use_cache": False}, "give use_cache=True"),
    ({"use_mtp": True}, "leave out use_mtp=, or use plain"),
    ({"candidate_generator": None, "policy": FixedDepth(3)}, "policy= needs a strategy: give candidate_generator= too"),
    ({"candidate_generator": None, "prediction": "x"}, "prediction= needs a strategy: give candidate_generator= too"),
    ({"candidate_generator": DraftModelCandidates("./none")}, "there is no folder './none'"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    ({"cache_implementation": "paged"}, "continuous batching"),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"custom_generate": len}, "custom_generate"),
    ({"candidate_generator": ReadsOutputs()}, "reads the target's outputs"),
    (
        {"candidate_generator": RecyclingCandidates(), "prediction": [1]},
        "with CombinedCandidates([NgramCandidates(), …])",
    ),
    ({"candidate_generator": RecyclingCandidates(), "history": True}, "history= needs n-grams, which Recycling"),
    ({"candidate_generator": CombinedCandidates([RecyclingCandidates()]), "history": True}, "history= needs n-grams"),
    ({"candidate_generator": RecyclingCandidates(), "history": True}, "with CombinedCandidates([NgramCandidates"),
    ({"candidate_generator": None, "history": True}, "history= needs a strategy: give candidate_generator= too"),
]


@pytest.mark.parametrize("place", ["arguments", "generation_config"])
@pytest.mark.parametrize("is_attached", [False, True], ids=["keyword", "attached"])
def test_settings_of_assistants_are_named_in_one_warning(place: str, is_attached: bool) -> None:
    """Would catch: a migrated script whose settings are ignored without a word, or that falls back to plain."""
    settings = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristic", "speculation_type": "dflash"}
    model, arguments = fresh_model("llama"), {**prompts(1), "max_new_tokens": 4}
    plain = model.generate(**arguments)
    if place == "arguments":
        arguments |= {**settings, "assistant_tokenizer": None}
    else:
        arguments["generation_config"] = GenerationConfig(max_new_tokens=4, **settings)
    with attached(model, NgramCandidates()) if is_attached else nullcontext(None) as totals:
        how: dict[str, Any] = {} if is_attached else {"candidate_generator": NgramCandidates()}
        with pytest.warns(UserWarning) as caught:
            ids = model.generate(**arguments, **how)
    (message,) = [str(one.message) for one in caught if "assistant" in str(one.message)]
    assert "num_assistant_tokens: give k= to the strategy" in message and "schedule: give policy=" in message
    assert torch.equal(ids, plain) and (totals is None or totals.calls == 1)


class OwnCache(DynamicCache):
    """A cache of a user, which may do something else with its layers."""


def with_two_streamers() -> dict[str, Any]:
    arguments = {**prompts(1), "streamer": RecordingStreamer(), "candidate_generator": None}
    return {**arguments, "custom_generate": speculate(NgramCandidates(), streamer=RecordingStreamer())}


def with_cached_prompt() -> dict[str, Any]:
    cache, inputs = DynamicCache(), prompts(2)
    tiny_model("llama")(**inputs, **{CACHE: cache})
    return {**inputs, CACHE: cache}


SCORES = {"output_scores": True, "return_dict_in_generate": True}
INPUTS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"inputs": torch.empty(1, 0, dtype=torch.long)}, "prompt is empty"),
    (lambda: {"inputs": torch.empty(0, 4, dtype=torch.long)}, "prompt is empty"),
    (lambda: {"inputs_embeds": torch.randn(1, 5, 64), **prompts(1)}, "has 5 columns, and input_ids 12; give one id"),
    (lambda: {"inputs_embeds": torch.randn(2, 12, 64), **prompts(1)}, "has 2 rows, and input_ids 1; give one row"),
    (lambda: {**prompts(2), "stopping_criteria": [lambda ids, *_, **__: ids[:, :1] < 0]}, "shape (2, 2) for 2 rows"),
    (lambda: {**prompts(1), "attention_mask": torch.ones(1, 40).triu(1)}, "mask has 40 columns for a prompt of 12"),
    (lambda: {CACHE: OwnCache(), **prompts(1)}, "not with OwnCache; leave"),
    (with_cached_prompt, "the cache holds 12 tokens already"),
    (lambda: {**prompts(3), **SCORES, "eos_token_id": 5, "logits_processor": [torch.add]}, "which add may compute"),
    (with_two_streamers, "both generate(streamer=…) and speculate(streamer=…) were given; leave one out"),
]


@pytest.mark.parametrize(("given", "words"), [*CALLS, *INPUTS], ids=[words[:40] for _, words in [*CALLS, *INPUTS]])
def test_generate_unsupported_argument_or_input_raises(given: Any, words: str) -> None:
    """Would catch: an argument that is ignored, or an error from the inside of a step."""
    arguments = {"max_new_tokens": 4, **(given() if callable(given) else {**prompts(1), **given})}
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
        tiny_model("llama").generate(**{"candidate_generator": NgramCandidates(), **arguments})


@pytest.mark.parametrize("is_attached", [False, True], ids=["keyword", "attached"])
@pytest.mark.parametrize(
    ("more", "named", "message"),
    [
        ((), {"inputs": torch.tensor([[1, 2]])}, "multiple values for argument 'inputs'"),
        ((None,) * 20, {}, "too many positional arguments"),
    ],
    ids=["twice", "too_many"],
)
def test_generate_wrong_positional_arguments_raises(more: tuple, named: dict, message: str, is_attached: bool) -> None:
    """Would catch: another prompt than the first argument, or arguments that are dropped."""
    model = fresh_model("llama")
    how: dict[str, Any] = {} if is_attached else {"candidate_generator": NgramCandidates()}
    if is_attached:
        attach(model, NgramCandidates())
    with pytest.raises(TypeError, match=message):
        model.generate(prompts(1)["input_ids"], *more, **named, max_new_tokens=4, **how)


def with_a_history_of_another_tokenizer() -> NgramCandidates:
    history = NgramHistory()
    history.add([5, 500])
    return NgramCandidates(history=history)


def draft_model(architecture: str = "llama", **settings: Any) -> DraftModelCandidates:
    return DraftModelCandidates(tiny_model(architecture), **settings)


MISMATCHES: list[tuple[str, Callable[[], Any], str]] = [
    ("llama", lambda: NgramCandidates(prediction=[[1], [2]]), "has 2 entries for 1 rows; give one for each row"),
    ("llama", lambda: NgramCandidates(prediction=[10**6]), "token 1000000, but the target's vocabulary ends at"),
    ("llama", lambda: NgramCandidates(prediction=[[-1]]), "prediction has token -1"),
    ("llama", lambda: draft_model(draft_vocabulary=[99]), "has token 99, but the drafter has 99"),
    ("llama", lambda: DraftModelCandidates(encoder_decoder("t5"), k=2), "is a decoder-only model and the draft T5"),
    ("gpt_neo", NgramCandidates, "builds its local attention mask inside the layers"),
    ("bloom", NgramCandidates, "takes no position_ids"),
    ("llama", with_a_history_of_another_tokenizer, "has token 500, but the target's vocabulary ends at 98"),
    ("llama", lambda: LayerSkipCandidates(2), "exit_layer must be from 1 to 1 .* got 2; give one in this range$"),
    ("llama", lambda: CombinedCandidates([LayerSkipCandidates(1), LayerSkipCandidates(2)]), "different ways"),
    ("llama", lambda: DraftModelCandidates(tiny_model("llama", vocab_size=70)), "vocabulary of 70, the target of 99"),
    (
        "llama",
        lambda: DraftModelCandidates(tiny_model("gpt2", n_positions=8), draft_window=None),
        "has 12 tokens, but the draft reads at",
    ),
    ("llama", lambda: DraftModelCandidates(stateful_model("lfm2")), "keeps a state"),
    ("llama", lambda: DraftModelCandidates(tiny_model("bloom")), "the draft model, not the target: Bloom.* takes no"),
    ("lfm2", lambda: LayerSkipCandidates(1), "convolutions or recurrent states"),
    ("qwen3_next", lambda: LayerSkipCandidates(1), "convolutions or recurrent states"),
    ("llama", lambda: EagleCandidates(HEAD_FIXTURES / "eagle3_original" / "head"), "of 128, but this target has 99"),
    ("llama", lambda: EagleCandidates(HEAD_FIXTURES / "speculators_peagle_llama" / "head"), "P-EAGLE"),
    ("llama", lambda: EagleCandidates(HEAD_FIXTURES / "dflash_zlab" / "head"), "BlockHead"),
    ("llama", lambda: MTPCandidates(str(DRAFT_LM), k=1), "no MTP layers.* or use another strategy, such as Ngram"),
    ("llama", lambda: MTPCandidates(k=1), r"name its checkpoint: MTPCandidates\("),
    (
        "llama",
        lambda: DraftModelCandidates(HEAD_FIXTURES / "dflash_zlab" / "head"),
        "has other tensors than a Qwen3ForCausalLM, and lacks .*; for a draft head use AutoCandidates.from_pretrained",
    ),
]


@pytest.mark.parametrize(("architecture", "make", "words"), MISMATCHES)
def test_strategy_that_does_not_fit_the_target_raises(architecture: str, make: Callable[[], Any], words: str) -> None:
    """Would catch: an error of shapes from the inside of the drafter in place of the reason."""
    target = stateful_model(architecture) if architecture in STATEFUL else tiny_model(architecture)
    with pytest.raises(ValueError, match=words):
        target.generate(**prompts(1), max_new_tokens=4, candidate_generator=make())


def test_generate_attention_without_tree_mask_raises() -> None:
    """Would catch: a kernel that ignores the tree's mask, so that siblings see each other."""
    model = fresh_model("llama")
    model.config._attn_implementation = "own_kernel"
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa' or 'eager'"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates())


# After an exception


class UsersFunction:
    """A logits processor or stopping criterion that draws random numbers, or changes the text that it is given."""

    def __init__(self, action: str, stops: bool):
        self._action, self._stops = action, stops

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        input_ids[:, 0] += self._action == "edits"
        if self._action == "draws":
            torch.rand(1)
        if self._action == "seeds":
            torch.manual_seed(7)
        return torch.zeros(len(input_ids), dtype=torch.bool) if self._stops else scores


DREW = "drew from PyTorch's global"
SEEDED = "^torch.manual_seed was called while UsersFunction ran, by it or by another thread"


@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside another thread"])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(("action", "words"), [("draws", DREW), ("seeds", SEEDED), ("edits", "input_ids in place")])
def test_users_function_that_cannot_be_repeated_raises(action: str, words: str, stops: bool, beside: int) -> None:
    """Would catch: another text, silently. Without sampling a function may draw: it is called equally often."""
    model, name, done = tiny_model("llama"), "stopping_criteria" if stops else "logits_processor", threading.Event()
    settings: dict[str, Any] = {**prompts(1), "max_new_tokens": 8, name: [UsersFunction(action, stops)]}
    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match=words):
        if beside:
            pool.submit(done.wait)
        try:
            model.generate(**settings, do_sample=True, candidate_generator=NgramCandidates(k=3))
        finally:
            done.set()
    assert torch.equal(torch.get_rng_state(), before)
    if action == "draws":
        states = []
        for candidates in ({}, {"candidate_generator": NgramCandidates(k=3)}):
            torch.manual_seed(0)
            model.generate(**settings, **candidates)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)


def test_function_with_the_random_state_kept_same_tokens() -> None:
    """Would catch: a watermark that seeds and draws inside `fork_rng` and is refused, though it changes no noise."""

    def watermark(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(int(input_ids[0, -1]))
            return scores + torch.rand(scores.shape)

    model, done = tiny_model("llama"), threading.Event()
    settings: dict[str, Any] = {**prompts(1), "max_new_tokens": 8, "do_sample": True, "logits_processor": [watermark]}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(done.wait)
        texts = []
        for candidates in ({}, {"candidate_generator": NgramCandidates(k=3)}):
            torch.manual_seed(0)
            texts.append(model.generate(**settings, **candidates).tolist())
        done.set()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("is_attached", [False, True], ids=["keyword", "attached"])
def test_streamer_that_draws_raises_before_the_first_token(is_attached: bool) -> None:
    """Would catch: sampled tokens that silently differ, since in plain generate their noise comes after its numbers."""

    class Drawing(RecordingStreamer):
        def put(self, value: torch.Tensor) -> None:
            torch.rand(1)
            super().put(value)

    model, streamer = fresh_model("llama"), Drawing()
    if is_attached:
        attach(model, NgramCandidates())
    how: dict[str, Any] = {} if is_attached else {"candidate_generator": NgramCandidates()}
    with pytest.raises(ValueError, match="Drawing drew from PyTorch's global"):
        model.generate(**prompts(1), max_new_tokens=8, do_sample=True, streamer=streamer, **how)
    assert streamer.chunks == [prompts(1)["input_ids"].tolist()]
