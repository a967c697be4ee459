"""`hf_specgen.attach`: every `generate` of a model speculates, wrapped or copied too, or falls back with a reason."""

import contextvars
import copy
import io
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets.fingerprint import Hasher
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM
from transformers.generation import utils as generation_utils
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

import hf_specgen
from hf_specgen import CombinedCandidates, NgramCandidates, RecyclingCandidates, SpeculationMonitor, speculate
from hf_specgen.compat import CACHE
from tests.helpers import RecordingStreamer, fresh_model, prompts, tiny_model

NEW = 16


@pytest.fixture
def model() -> Any:
    return fresh_model("llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """A fall-back that no test expects is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a strategy is attached")
        yield


def generate(model: Any, batch: int = 2, **arguments: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompts(batch), max_new_tokens=NEW, **arguments)


# Attaching


@pytest.mark.parametrize("strategy", ["auto", NgramCandidates(k=4), CombinedCandidates([NgramCandidates()])])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
def test_generate_of_an_attached_model_same_tokens_and_statistics(model: Any, strategy: Any, sampling: dict) -> None:
    """Would catch: other tokens than plain decoding's, or calls that are counted twice or not at all."""
    expected = generate(model, **sampling)
    assert hf_specgen.attach(model, strategy) is model
    for calls in (1, 2):
        assert torch.equal(generate(model, **sampling), expected)
        totals = hf_specgen.statistics(model)
        assert totals.calls == calls and totals.emitted == calls * 2 * NEW and totals.plain_calls == {}
    assert totals.seconds > 0 and (sampling or totals.drafted > 0), "sampled text of a random model repeats nothing"


def test_totals_are_the_sums_of_the_calls(model: Any) -> None:
    """Would catch: a counter that is left out or counted twice."""
    hf_specgen.attach(model, NgramCandidates(k=4))
    calls = [generate(model, batch, return_dict_in_generate=True).speculation for batch in (1, 3)]
    both, totals = calls[0] + calls[1], hf_specgen.statistics(model)
    shared = "steps drafts drafted accepted emitted drafted_per_position accepted_per_position"
    shared += " acceptance_rate tokens_per_step mean_acceptance_length"
    for name in shared.split():
        assert getattr(totals, name) == getattr(both, name), name
    assert totals.to_dict()["calls"] == 2 and "2 calls" in totals.summary()


def test_detach_restores_plain_generation(model: Any) -> None:
    """Would catch: an attribute or a setting that stays on the model, or statistics of nothing."""
    before = dict(vars(model))
    config = model.config.to_dict(), model.generation_config.to_dict()
    hf_specgen.detach(hf_specgen.attach(model, "auto"))
    assert vars(model) == before and (model.config.to_dict(), model.generation_config.to_dict()) == config
    hf_specgen.detach(model)
    with pytest.raises(ValueError, match=r"no strategy is attached to this LlamaForCausalLM; call hf_specgen\.attach"):
        hf_specgen.statistics(model)


def test_attached_block_restores_what_was_attached_before(model: Any) -> None:
    """Would catch: a block that fails and keeps its strategy, or whose calls count for the outer one."""
    hf_specgen.attach(model, NgramCandidates(k=2))
    generate(model)
    with pytest.raises(KeyError), hf_specgen.attached(model, NgramCandidates(k=8), strict=True) as totals:
        generate(model)
        assert totals.calls == 1
        raise KeyError
    generate(model)
    assert hf_specgen.statistics(model).calls == 2


def test_attached_block_is_left_in_another_context(model: Any) -> None:
    """Would catch: an exception at the end of a block in an asynchronous generator, as of a web server."""
    block = hf_specgen.attached(model, NgramCandidates(k=2))
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    with pytest.raises(ValueError, match="no strategy is attached"):
        hf_specgen.statistics(model)


def test_keyword_of_a_call_takes_precedence(model: Any) -> None:
    """Would catch: the attached strategy used in spite of the call's own, or of None."""
    hf_specgen.attach(model, NgramCandidates(k=4))
    own = NgramCandidates(k=3)
    expected = generate(model, candidate_generator=None)
    assert hf_specgen.statistics(model).calls == 0, "None generates plainly"
    for strategy in (own, "auto"):
        assert torch.equal(generate(model, candidate_generator=strategy), expected)
        assert torch.equal(generate(model, custom_generate=speculate(strategy)), expected)
    assert own.speculation is not None and hf_specgen.statistics(model).calls == 0


# Wrappers and copies


def through_a_file(model: Any) -> Any:
    """The model as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": through_a_file,
    "accelerate": lambda model: (one := Accelerator(cpu=True)).unwrap_model(one.prepare(model)),
    "merged LoRA": lambda model: with_lora(model).merge_and_unload(),
    "copied LoRA": lambda model: copy.deepcopy(with_lora(model)),
}
WRAPPERS: dict[str, Any] = {"LoRA": with_lora, "compiled": lambda model: torch.compile(model, backend="eager")}


@pytest.mark.parametrize("kind", [*COPIES, *WRAPPERS])
def test_wrapped_or_copied_model_still_speculates(model: Any, kind: str) -> None:
    """Would catch: a wrapper or copy that generates plainly, warns, or loses its statistics."""
    hf_specgen.attach(model, "auto", monitor=SpeculationMonitor(prometheus=False))
    wrapped = {**COPIES, **WRAPPERS}[kind](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = generate(wrapped)
    totals = hf_specgen.statistics(wrapped)
    assert totals.calls == 1 and totals.drafted > 0
    assert torch.equal(tokens, generate(wrapped, candidate_generator=NgramCandidates()))
    hf_specgen.detach(wrapped)
    assert torch.equal(tokens, generate(wrapped))
    if kind in WRAPPERS:  # attached to the model inside
        assert hf_specgen.attach(wrapped, NgramCandidates()) is wrapped
        generate(wrapped)
        assert hf_specgen.statistics(model).calls == hf_specgen.statistics(wrapped).calls == 1


WITH_MEMORY: list[Callable[[], Any]] = [
    lambda: NgramCandidates(history=hf_specgen.NgramHistory(100)),
    RecyclingCandidates,
    lambda: CombinedCandidates([NgramCandidates(), RecyclingCandidates()]),
]


@pytest.mark.parametrize("make", WITH_MEMORY)
def test_used_strategy_with_a_memory_can_be_pickled_with_the_model(model: Any, make: Callable[[], Any]) -> None:
    """Would catch: a lock or a weak reference to the model, neither of which can be pickled."""
    hf_specgen.attach(model, make())
    expected = generate(model)
    assert torch.equal(generate(COPIES["pickled"](model)), expected)
    assert torch.equal(generate(copy.deepcopy(model)), expected)


def test_distributed_data_parallel_keeps_the_strategy(model: Any) -> None:
    """Would catch: a strategy that is looked for at the wrapper, or that stays after `detach` of the wrapper."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(hf_specgen.attach(model, NgramCandidates()))
        generate(wrapped.module)
        assert hf_specgen.statistics(wrapped).calls == 1
        hf_specgen.detach(wrapped)
    finally:
        dist.destroy_process_group()
    assert "_hf_specgen_attachment" not in vars(model)


def test_model_whose_parameters_are_sharded_falls_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: processes that wait for each other forever, since `generate` does not pass `synced_gpus` on."""
    expected = generate(model)
    hf_specgen.attach(model, NgramCandidates())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:  # what `generate` of Transformers asks for
        monkeypatch.setattr(generation_utils, "_get_torch_distributed_world_size", lambda: 2)
        monkeypatch.setattr(generation_utils, "is_fsdp_managed_module", lambda module: True)
        with pytest.warns(UserWarning, match="sharded over processes"):
            assert torch.equal(generate(model), expected)
    finally:
        dist.destroy_process_group()


def test_deep_copy_counts_its_own_calls_and_shares_the_strategy(model: Any) -> None:
    """Would catch: a second draft model in memory, or one set of counters for two models."""
    draft = tiny_model("llama")
    hf_specgen.attach(model, hf_specgen.DraftModelCandidates(draft, k=2))
    generate(model)
    twin = copy.deepcopy(model)
    generate(twin)
    generate(twin)
    assert (hf_specgen.statistics(model).calls, hf_specgen.statistics(twin).calls) == (1, 2)
    settings = [vars(one)["_hf_specgen_attachment"].settings for one in (model, twin)]
    assert settings[0].candidates is settings[1].candidates


def test_saved_checkpoint_does_not_contain_the_strategy(model: Any, tmp_path: Any) -> None:
    """Would catch: a checkpoint that cannot be loaded without this package."""
    hf_specgen.attach(model, NgramCandidates()).save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).generate(**prompts(1), max_new_tokens=2).shape == (1, 14)
    assert not any("specgen" in file.read_text() for file in tmp_path.glob("*.json"))


# Falling back

PLAIN_CALLS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"num_beams": 2, "do_sample": True}, "not with beam_sampl"),
    (lambda: {"assistant_model": tiny_model("llama")}, "assistant_model= asks for Transformers' own"),
    (lambda: {"use_cache": False}, "needs the key/value cache"),
    (lambda: {"assistant_early_exit": 1}, "not with assisted_generation"),  # calls generate() of the same model itself
    (lambda: {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is not available"),
    (lambda: {"custom_generate": lambda model, input_ids, **_: input_ids}, "another decoding method"),
]
"""The reasons of all others are in `test_bad_input.py`."""


def test_keywords_of_another_decoding_method_reach_it(model: Any) -> None:
    """Would catch: `memory=` or `policy=` of a function of somebody else taken for settings of this package."""
    received = list[Any]()

    def method(model: Any, input_ids: torch.Tensor, memory: Any = None, policy: Any = None, **_: Any) -> torch.Tensor:
        received.extend((memory, policy))
        return input_ids

    hf_specgen.attach(model, NgramCandidates())
    with pytest.warns(UserWarning, match="another decoding method"):
        model.generate(**prompts(1), custom_generate=method, memory=False, policy="greedy")
    assert received == [False, "greedy"]


def test_refused_rejection_sampling_leaves_the_random_generator(model: Any) -> None:
    """Would catch: other tokens than those of plain `generate`, as the seed of the drafts was drawn before."""
    one_row = PromptLookupCandidateGenerator(max_length=100)
    torch.manual_seed(1)
    expected = model.generate(**prompts(2), do_sample=True, max_new_tokens=NEW)
    hf_specgen.attach(model, one_row, verification="rejection")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="works on one row"):
        assert torch.equal(model.generate(**prompts(2), do_sample=True, max_new_tokens=NEW), expected)


@pytest.mark.parametrize(("make", "reason"), PLAIN_CALLS, ids=[reason for _, reason in PLAIN_CALLS])
def test_call_that_cannot_speculate_is_plain_with_one_warning_or_raises_if_strict(
    model: Any, make: Callable[[], dict[str, Any]], reason: str
) -> None:
    """Would catch: a refusal where a plain call is right, a warning in every call, or none."""
    with hf_specgen.attached(model, NgramCandidates(), strict=True), pytest.raises(ValueError, match=reason):
        generate(model, 1, **make())
    expected = generate(model, 1, **make())
    hf_specgen.attach(model, NgramCandidates())
    with pytest.warns(UserWarning, match=f"without speculation: .*{reason}") as caught:
        outputs = [generate(model, 1, **make())]
    assert len(caught) == 1 and caught[0].filename == __file__, "the warning names the line that called generate()"
    outputs.append(generate(model, 1, **make()))
    for output in outputs:
        assert torch.equal(*(getattr(one, "sequences", one) for one in (output, expected)))
    totals = hf_specgen.statistics(model)
    assert totals.calls == 0 and list(totals.plain_calls.values()) == [2]
    assert reason in next(iter(totals.plain_calls)) and "2 calls without speculation" in totals.summary()


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_refusal_names_a_call_that_a_caller_without_a_strategy_argument_can_make(
    model: Any, settings: dict[str, Any]
) -> None:
    """Would catch: "leave candidate_generator= out" for those who gave none, or a remedy that is refused as well."""
    remedy = re.escape("use plain generate(candidate_generator=None)")
    expected = generate(model, 1, **settings)
    with pytest.raises(ValueError, match=remedy):
        list(hf_specgen.generate_many(model, [[1, 5, 6]], max_new_tokens=2, **settings))
    with hf_specgen.attached(model, NgramCandidates(), strict=True):
        with pytest.raises(ValueError, match=remedy):
            generate(model, 1, **settings)
        assert torch.equal(generate(model, 1, candidate_generator=None, **settings), expected)


def test_unsupported_cache_falls_back_and_streams_the_prompt_once(model: Any) -> None:
    """Would catch: a streamer that received the prompt in the attempt and in the plain call."""

    def run() -> tuple[Any, RecordingStreamer]:
        streamer = RecordingStreamer()
        cache = type("OwnCache", (DynamicCache,), {})(config=model.config)
        return generate(model, 1, **{CACHE: cache}, streamer=streamer), streamer

    expected, seen = run()
    hf_specgen.attach(model, NgramCandidates())
    with pytest.warns(UserWarning, match="without speculation"):
        ids, again = run()
    assert torch.equal(ids, expected) and again.chunks == seen.chunks and again.ended == 1


def test_reasons_that_differ_in_a_number_warn_once(model: Any) -> None:
    """Would catch: a warning for each value of an argument."""
    hf_specgen.attach(model, NgramCandidates())
    with pytest.warns(UserWarning, match="instead of 2") as caught:
        generate(model, 1, num_beams=2)
        generate(model, 1, num_beams=3)
    assert len(caught) == 1 and list(hf_specgen.statistics(model).plain_calls.values()) == [2]


class Failing(LogitsProcessor):
    """Raises a ValueError of its own in the second step."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("a defect of the caller")
        return scores


def test_error_during_generation_is_raised_and_not_repeated(model: Any) -> None:
    """Would catch: a ValueError of the caller's own code taken for a refusal, and the call run twice."""
    hf_specgen.attach(model, NgramCandidates())
    with pytest.raises(ValueError, match="a defect of the caller"):
        generate(model, 1, logits_processor=[Failing()])
    assert hf_specgen.statistics(model).calls == 0


class Unrepeatable:
    """A processor or criterion that from a call on draws random numbers, or changes the text that it is given."""

    def __init__(self, first: int, action: str, stops: bool):
        self.calls, self.seen = 0, list[int]()
        self._first, self._action, self._stops = first, action, stops

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.calls += 1
        self.seen.append(input_ids.shape[1])
        if self.calls >= self._first and self._action == "draws":
            torch.rand(1)
        if self.calls == self._first and self._action == "edits":
            input_ids[:, 0] += 1
        return torch.zeros(len(input_ids), dtype=torch.bool) if self._stops else scores


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("action", ["draws", "edits"])
@pytest.mark.parametrize("stops", [False, True])
def test_function_that_cannot_be_repeated_makes_an_attached_call_plain(
    model: Any, first: int, action: str, stops: bool
) -> None:
    """Would catch: an error in place of the plain call, tokens that are streamed twice, a counter that counts twice."""
    name = "stopping_criteria" if stops else "logits_processor"

    def run() -> tuple[Any, ...]:
        function, streamer = Unrepeatable(first, action, stops), RecordingStreamer()
        ids = generate(model, 1, do_sample=True, top_k=0, streamer=streamer, **{name: [function]})
        return ids.tolist(), streamer.chunks, streamer.ended, function.calls, function.seen, torch.rand(1).item()

    expected = run()
    hf_specgen.attach(model, NgramCandidates(k=3))
    with pytest.warns(UserWarning, match="without speculation: Unrepeatable") as caught:
        assert [run(), run()] == [expected] * 2
    assert len(caught) == 1 and list(hf_specgen.statistics(model).plain_calls.values()) == [2]


class DrawsFromItsOwn(LogitsProcessor):
    """A processor with a generator of its own, as the documentation advises."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand(scores.shape, generator=self.generator)


def test_plain_call_after_a_refusal_finds_processors_as_they_were(model: Any) -> None:
    """Would catch: numbers that a user's generator gives twice, guidance that goes on from the refused call."""

    def run() -> list[Any]:
        guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model, torch.tensor([[5, 6]]))
        processors = [guidance, DrawsFromItsOwn()]
        criteria = [Unrepeatable(2, "draws", True)]
        ids = generate(model, 1, do_sample=True, logits_processor=processors, stopping_criteria=criteria)
        return [ids.tolist(), torch.rand(1).item()]

    expected = run()
    hf_specgen.attach(model, NgramCandidates(k=3))
    with pytest.warns(UserWarning, match="without speculation: Unrepeatable"):
        assert run() == expected


class ReadsMemory(LlamaForCausalLM):
    """A model whose `forward` has an argument with the name of a keyword of this package."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        memory: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        output.logits = output.logits if memory is None else output.logits * memory
        return output

    def prepare_inputs_for_generation(self, *args: Any, memory: Any = None, **kwargs: Any) -> Any:
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "memory": memory}


def test_keyword_that_the_model_has_is_the_models(model: Any) -> None:
    """Would catch: `memory=` of a model taken for ours, with a TypeError in an attached call that worked before."""
    model = ReadsMemory(model.config).eval()
    call: dict[str, Any] = {"input_ids": torch.tensor([[5, 6, 7]]), "memory": torch.tensor(-1.0)}
    call |= {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**call)
    with hf_specgen.attached(model, NgramCandidates(k=2)):
        assert torch.equal(model.generate(**call), expected)


def test_streamed_text_of_rejection_sampling_is_not_continued_plainly(model: Any) -> None:
    """Would catch: the beginning of one sample streamed before the end of another."""
    hf_specgen.attach(model, NgramCandidates(k=3), verification="rejection")
    arguments: dict[str, Any] = {"do_sample": True, "stopping_criteria": [Unrepeatable(5, "draws", True)]}
    with pytest.raises(ValueError, match="Unrepeatable drew from"):
        generate(model, 1, **arguments, streamer=RecordingStreamer())


# Inner calls, settings of one call, threads, functions that hold the model


HEALED = "def add(x, y):\n    return x + y\n\ndef ad"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["greedy", "reads_prompt", "sampled"],
)
def test_token_healing_same_tokens(reference_model: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
    """Would catch: a tokenizer that does not reach `generate`; a prompt healed twice, or before processors read it."""
    inputs = tokenizer(['<a href="http:', HEALED], return_tensors="pt", padding=True, padding_side="left")
    arguments = {"max_new_tokens": NEW, "do_sample": False, "token_healing": True, "tokenizer": tokenizer, **settings}
    torch.manual_seed(0)
    plain = reference_model.generate(**inputs, **arguments)
    torch.manual_seed(0)
    with hf_specgen.attached(reference_model, strict=True) as totals:
        ids = reference_model.generate(**inputs, **arguments)
    assert totals.calls == 1 and torch.equal(ids, plain)


@pytest.mark.parametrize(
    ("text", "saved", "words"), [(HEALED + " ", False, "makes 16 of 17 tokens"), (HEALED, True, "draws tokens")]
)
def test_token_healing_that_cannot_be_repeated_is_refused(
    reference_model: Any, tokenizer: Any, text: str, saved: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: other positions than those of plain decoding, or numbers drawn by a call that then runs plainly."""
    inputs = tokenizer(text, return_tensors="pt")
    monkeypatch.setattr(reference_model.generation_config, "do_sample", saved)
    arguments = {"max_new_tokens": NEW, "token_healing": True, "tokenizer": tokenizer}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        reference_model.generate(**inputs, **arguments, candidate_generator="auto")
    assert torch.equal(torch.get_rng_state(), state)


def test_fingerprint_of_a_function_over_an_attached_model_is_stable(model: Any) -> None:
    """Would catch: `datasets.map` that never finds its cache, since counters are part of the fingerprint."""
    hf_specgen.attach(model, NgramCandidates(k=4))

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"ids": model.generate(row["ids"])}

    before = Hasher.hash(answer)
    generate(model)
    assert Hasher.hash(answer) == before


@pytest.mark.parametrize("name", ["verification", "policy", "monitor", "memory"])
def test_setting_of_one_call_replaces_that_of_attach(model: Any, name: str) -> None:
    """Would catch: a setting that does not reach the call, or that of one call that stays for the next."""
    monitor, other = SpeculationMonitor(prometheus=False), SpeculationMonitor(prometheus=False)
    policy = hf_specgen.Schedule({1: 1})
    others = {"verification": "rejection", "policy": hf_specgen.Schedule({1: 0}), "monitor": other, "memory": False}
    hf_specgen.attach(model, NgramCandidates(k=4), strict=True, monitor=monitor, policy=policy)
    expected = generate(model, candidate_generator=None)
    assert torch.equal(generate(model, **{name: others[name]}), expected)
    drafted = hf_specgen.statistics(model).drafted
    assert (drafted == 0) == (name == "policy") and other.calls == (name == "monitor") != monitor.calls
    generate(model)
    totals = hf_specgen.statistics(model)
    assert totals.drafted > drafted and len(totals.drafted_per_position) == 1
    assert other.calls + monitor.calls == 2 and monitor.calls >= 1


def test_overlapping_blocks_of_two_threads_leave_the_model_detached(model: Any) -> None:
    """The first block ends before the second. Would catch: a model that stays attached, calls counted elsewhere."""
    entered, left, totals = threading.Event(), threading.Event(), {}

    def second() -> None:
        with hf_specgen.attached(model, NgramCandidates(k=2)) as counted:
            entered.set()
            assert left.wait(30)
            generate(model)
            totals["second"] = counted

    thread = threading.Thread(target=second)
    with hf_specgen.attached(model, NgramCandidates(k=4)) as counted:
        thread.start()
        assert entered.wait(30)
        generate(model)
        generate(model)
    left.set()
    thread.join()
    assert (counted.calls, totals["second"].calls) == (2, 1)
    with pytest.raises(ValueError, match="no strategy is attached"):
        hf_specgen.statistics(model)


# Bad input


def test_strategy_in_a_generation_config_raises_and_names_attach(model: Any) -> None:
    """Would catch: a strategy that Transformers ignores without a word."""
    config = GenerationConfig(candidate_generator=NgramCandidates(), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"call hf_specgen\.attach\(model"):
        model.generate(**prompts(1), generation_config=config)
    with pytest.raises(ValueError, match=r"call hf_specgen\.attach\(model"):
        model.generate(prompts(1)["input_ids"], config)


@pytest.mark.parametrize("kind", ["model", "file", "object"])
def test_attached_history_drafts_the_answers_of_earlier_calls(kind: str, tmp_path: Path) -> None:
    """Would catch: a history that is not used, is another one in each call, or is unknown to `generate_many`."""
    model = fresh_model("llama")
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**prompts(2), **settings)
    histories = {"model": True, "file": tmp_path / "answers", "object": hf_specgen.NgramHistory()}
    candidates = NgramCandidates(k=24, tree=24)
    hf_specgen.attach(model, candidates, history=histories[kind])
    steps = []
    for _ in range(2):
        assert torch.equal(model.generate(**prompts(2), **settings), plain)
        steps.append(len(candidates.speculation.batch_steps))
    assert steps[1] <= 2 < steps[0]
    if kind == "object":
        rows = [row[mask.bool()].tolist() for row, mask in zip(*prompts(2).values(), strict=True)]
        answers = hf_specgen.generate_many(model, rows, candidates, history=histories[kind], ordered=True, **settings)
        assert all(answer.statistics.accepted >= 22 for answer in answers)
