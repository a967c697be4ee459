"""The verification modes inside `generate`: stops, scores, batches, processors, and a draft that equals the target."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen import Call, DraftModelCandidates, NgramCandidates, NgramHistory, SpeculationMonitor
from hf_specgen.settings import as_candidates
from hf_specgen.verification import ExactVerifier, VerificationSession, Verifier
from tests.fuzz.scripted import RandomDepths, Scripted
from tests.helpers import Oracle, PrefixReader, RecordingStreamer, RowWisePrefixReader, fresh_model, prompts, tiny_model
from tests.helpers.comparison import END, SEED, assert_same_tokens, plain_and_speculative, plain_output, seed
from tests.helpers.goodness_of_fit import goodness_of_fit
from tests.helpers.models import perturbed_copy
from tests.helpers.noise import RecordedNoise
from tests.helpers.oracle import ORACLES

PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "score-only": {"temperature": 0.7, "top_k": 30, "top_p": 0.95},
    "row-wise": {"repetition_penalty": 1.2, "processor": RowWisePrefixReader},
    "lockstep": {"processor": PrefixReader},
}


def arguments_of(kind: str) -> dict[str, Any]:
    """Arguments of `generate`, with new processors."""
    arguments = dict(PROCESSORS[kind])
    processor = arguments.pop("processor", None)
    return {**arguments, "logits_processor": LogitsProcessorList([processor()])} if processor else arguments


@pytest.mark.parametrize(("branching", "batch"), [(False, 1), (True, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("verification", ["rejection", "typical"])
@torch.no_grad()
def test_sampled_output_logits_are_those_of_its_text(batch: int, kind: str, verification: str, branching: bool) -> None:
    """Would catch: a rejected token left in the cache (compared with one pass over the output), tokens after EOS."""
    model, inputs = tiny_model("llama"), prompts(batch)
    width = inputs["input_ids"].shape[1]
    common = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    answers = plain_output(model, inputs, **common, **arguments_of(kind))[0][:, width:]
    oracle = Oracle(answers, 0.7, branching=branching)
    more = {"eos_token_id": [5, 6], "return_dict_in_generate": True, "output_logits": True}
    more |= {"candidate_generator": oracle, "verification": verification}
    output = model.generate(**inputs, **common, **arguments_of(kind), **more)
    ids = output.sequences
    assert output.speculation.drafted > 0
    for row in ids[:, width:].tolist():
        ends = [column for column, token in enumerate(row) if token in (5, 6)]
        if ends:
            assert not any(row[ends[0] + 1 :])
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, width:])], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    whole = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(torch.stack(output.logits, dim=1), whole[:, width - 1 : -1], atol=1e-4, rtol=1e-4)


def test_typical_acceptance_is_lossy_and_accepts_more() -> None:
    """A tiny random model has high entropy everywhere, so it finds nearly every draft token plausible."""
    model, oracle = tiny_model("llama"), partial(Oracle, accuracy=0.5)
    accepted = assert_same_tokens(model, prompts(1), oracle, max_new_tokens=16).accepted
    arguments = {"max_new_tokens": 16, "verification": "typical"}
    plain, typical = plain_and_speculative(model, prompts(1), oracle, **arguments)
    assert not torch.equal(typical.sequences, plain) and typical.speculation.accepted > accepted


@pytest.mark.parametrize("lengths", [(24, 17), (17, 24)])
def test_several_length_criteria_stop_at_the_shortest(lengths: tuple[int, int]) -> None:
    """Would catch: only the first `MaxLengthCriteria` of the list, as `StoppingCriteriaList.max_length` returns."""
    criteria = StoppingCriteriaList(map(MaxLengthCriteria, lengths))
    arguments = {"max_new_tokens": 30, "stopping_criteria": criteria}
    plain, output = plain_and_speculative(tiny_model("llama"), prompts(2), partial(Oracle, accuracy=0.9), **arguments)
    assert plain.shape[1] == 17 and torch.equal(output.sequences, plain)


def test_stop_strings_of_the_config_are_switched_off_by_none(tokenizer: Any) -> None:
    """Would catch: an explicit None that is taken for no argument, so that saved stop strings end the text."""
    model = fresh_model("llama")
    model.generation_config.stop_strings = ["!", "%", "0"]
    arguments: dict[str, Any] = {"max_new_tokens": 24, "stop_strings": None, "tokenizer": tokenizer}
    assert_same_tokens(model, prompts(2), NgramCandidates(k=3), **arguments)


def test_criterion_with_stop_strings_replaces_those_of_the_call(tokenizer: Any) -> None:
    """Plain `generate` takes the given one of two criteria of a type. Would catch: a stop at either's strings."""
    arguments: dict[str, Any] = {"max_new_tokens": 24, "stop_strings": ["!", "%", "0"], "tokenizer": tokenizer}
    assert plain_output(tiny_model("llama"), prompts(2), **arguments)[0].shape[1] < 12 + 24
    arguments["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, ["no such text"])])
    oracle = partial(Oracle, accuracy=0.9)
    assert assert_same_tokens(tiny_model("llama"), prompts(2), oracle, **arguments).lengths == [24, 24]


def test_end_tokens_of_a_criterion_without_padding_raise() -> None:
    """Plain `generate` raises a TypeError in its first step."""
    model = fresh_model("llama")
    model.generation_config.pad_token_id = None
    criteria = StoppingCriteriaList([EosTokenCriteria(torch.tensor([5]))])
    with pytest.raises(ValueError, match="give pad_token_id="):
        model.generate(**prompts(2), stopping_criteria=criteria, candidate_generator=NgramCandidates())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_processor_with_scores_of_another_dtype_same_samples(dtype: torch.dtype) -> None:
    """Would catch: noise that is not rounded as plain sampling rounds its own."""

    def convert(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.to(dtype)

    arguments: dict[str, Any] = {"max_new_tokens": 60, "do_sample": True, "output_scores": True}
    arguments["logits_processor"] = LogitsProcessorList([convert])
    oracle = partial(Oracle, accuracy=0.8)
    plain, output = plain_and_speculative(tiny_model("llama"), prompts(4), oracle, **arguments)
    assert torch.equal(output.sequences, plain) and output.scores[0].dtype == dtype


class _Recorder:
    """A processor, or with `stop_at` a criterion that stops each row at a column; records what it is called with."""

    def __init__(self, stop_at: Sequence[int] = ()):
        self.ids, self.scores, self.stop_at = list[Any](), list[torch.Tensor](), stop_at

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.ids.append(input_ids.tolist())
        if not self.stop_at:
            return PrefixReader()(input_ids, scores)
        self.scores += scores or ()
        return torch.tensor(self.stop_at[: len(input_ids)]) <= input_ids.shape[1]


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": [5, 6, 7, 8]}], ids=["no end tokens", "end tokens"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("oracle", ["always", "tree"])
def test_stateful_processor_is_not_called_behind_a_custom_stop(
    batch: int, sampling: bool, oracle: str, ends: dict[str, Any]
) -> None:
    """Would catch: a processor that counts its calls, and so changes the next call, for tokens behind the stop."""
    model, inputs, calls = tiny_model("llama"), prompts(batch), []
    arguments = {"max_new_tokens": 20, "do_sample": sampling, "pad_token_id": 0, **ends}
    texts = plain_output(model, inputs, **arguments, logits_processor=LogitsProcessorList([PrefixReader()]))[0]
    drafter = ORACLES[oracle](texts[:, inputs["input_ids"].shape[1] :], k=8)
    outputs = {"return_dict_in_generate": True, "output_scores": batch == 1 or not ends}
    for more in ({}, {"candidate_generator": drafter}):
        processor, criterion = _Recorder(), _Recorder(stop_at=(23, 17, 20))
        lists = {"logits_processor": LogitsProcessorList([processor])}
        lists |= {"stopping_criteria": StoppingCriteriaList([criterion])}
        seed(SEED)
        output = model.generate(**inputs, **arguments, **outputs, **lists, **more)
        calls.append((output.sequences.tolist(), processor.ids, criterion.ids, criterion.scores))
    plain, ours = calls
    assert ours[:3] == plain[:3] and output.speculation.accepted > 2
    torch.testing.assert_close(ours[3], plain[3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("wrong", "words"), [(lambda scores: None, "None"), (lambda scores: scores[:1], r"\(1, 99\)")])
def test_scores_of_another_shape_raise(wrong: Callable[[torch.Tensor], Any], words: str) -> None:
    """Would catch: an IndexError from the inside for scores of one row, which plain `generate` broadcasts."""
    processors = LogitsProcessorList([lambda input_ids, scores: wrong(scores)])
    with pytest.raises(ValueError, match=rf"<lambda> returned .*{words} for 3 rows; return scores"):
        tiny_model("llama").generate(
            **prompts(3), max_new_tokens=4, logits_processor=processors, candidate_generator=NgramCandidates()
        )


class _Wrong(Verifier):
    """Chooses the argmax, in a form that `choose` must not return."""

    def __init__(self, change: Callable[[torch.Tensor], Any]):
        self._change = change

    def start(self, call: Call) -> VerificationSession:
        change = self._change

        class Session(VerificationSession):
            def choose(self, scores: torch.Tensor, *_: Any) -> Any:
                return change(scores.argmax(dim=-1))

        return Session(call)


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.2}], ids=["at once", "by position"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: tokens[:, 0], r"got torch.int64 \[2\]"),
        (lambda tokens: tokens.float(), r"got torch.float32 \[2, 1\]"),
        (lambda tokens: tokens.tolist(), r"got \[\["),
    ],
)
def test_choices_of_another_form_raise(change: Any, words: str, processors: dict[str, Any]) -> None:
    """Would catch: an error of the embedding, or of a list, that does not name the verification mode."""
    words = r"Session.choose must return a tensor of \[2, 1\] token ids, " + words
    settings = {"candidate_generator": NgramCandidates(), "verification": _Wrong(change)}
    with pytest.raises(TypeError, match=words):
        tiny_model("llama").generate(**prompts(2), max_new_tokens=4, **settings, **processors)


class _FailsOnce(LogitsProcessor):
    """Makes the scores of its third call NaN."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        self._calls += 1
        return scores * float("nan") if self._calls == 3 else scores


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_that_a_stateful_processor_made_invalid_once_raise(batch: int) -> None:
    """Would catch: a processor that is called again for the same token, where plain `generate` has raised."""
    model, inputs, streamed = tiny_model("llama"), prompts(batch), []
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True}
    seed(SEED)
    answers = model.generate(**inputs, **arguments)[:, inputs["input_ids"].shape[1] :]
    for more in ({}, {"candidate_generator": Oracle(answers, accuracy=1.0)}):
        seed(SEED)
        streamer = RecordingStreamer()
        arguments |= {"logits_processor": LogitsProcessorList([_FailsOnce()]), "streamer": streamer, **more}
        with pytest.raises(RuntimeError, match="probability tensor"):
            model.generate(**inputs, **arguments)
        streamed.append(streamer.chunks)
    assert streamed[0] == streamed[1]


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("verification", ["exact", "rejection", "typical"])
def test_sampling_where_no_token_is_possible_raises(verification: str, batch: int, oracle: str) -> None:
    """Would catch: a suppressed token where all that are allowed are suppressed, in a text that may be another one."""
    model, inputs = tiny_model("llama"), prompts(batch)
    end = inputs["input_ids"].shape[1] + 5
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True}
    answers = plain_output(model, inputs, **arguments)[0][:, -10:]
    arguments["suppress_tokens"] = [30, 31]
    arguments["prefix_allowed_tokens_fn"] = lambda row, ids: [30, 31] if len(ids) >= end else list(range(90))
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**inputs, **arguments)
    more = {"candidate_generator": ORACLES[oracle](answers, k=4), "verification": verification}
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**inputs, **arguments, **more)


class _InPlace(LogitsProcessor):
    """Excludes the last token."""

    row_wise = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_(1, input_ids[:, -1:], float("-inf"))


@pytest.mark.parametrize("scores", [False, True])
def test_logits_changed_in_place_by_a_processor_are_returned_so(scores: bool) -> None:
    """Would catch: logits of padding that no processor has seen, as if plain `generate` kept a copy."""
    model, inputs, outputs = tiny_model("llama"), prompts(3), []
    arguments = {"max_new_tokens": 20, "eos_token_id": list(range(5, 30)), "pad_token_id": 0, "output_scores": scores}
    for more in ({}, {"candidate_generator": NgramCandidates(k=4)}):
        processors = LogitsProcessorList([_InPlace()])
        given = {**arguments, "logits_processor": processors, "output_logits": True, "return_dict_in_generate": True}
        outputs.append(model.generate(**inputs, **given, **more))
    assert (outputs[0].sequences[:, -1] == 0).any() and torch.equal(outputs[0].sequences, outputs[1].sequences)
    for plain, ours in zip(outputs[0].logits, outputs[1].logits, strict=True):
        assert plain.isinf().any(dim=1).all()
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


# Invalid scores that plain `generate` never computes, and what an exception leaves behind; others: `test_cases.py`

VERIFICATION = ["exact", "rejection", "typical"]


@contextmanager
def nan_behind(model: Any, token: int) -> Iterator[None]:
    """Inside, the model's logits are NaN after this token."""

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        output.logits[kwargs["input_ids"][:, -output.logits.shape[1] :] == token] = float("nan")

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("verification", VERIFICATION)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.2}], ids=["at once", "by position"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_invalid_logits_of_rejected_node_do_not_raise(verification: str, processors: dict, batch: int) -> None:
    """Would catch: an error for scores that plain `generate` never computes. Logits are NaN after token 98 only."""
    model, inputs, token = tiny_model("llama"), prompts(batch), 98
    assert not (inputs["input_ids"] == token).any()
    candidates = Scripted(lambda: lambda row, generated, depth: ([token] * depth, tuple(range(-1, depth - 1))), 3, None)
    arguments = {"max_new_tokens": 12, "do_sample": True, "suppress_tokens": [token], **processors}
    with nan_behind(model, token):
        torch.manual_seed(1)
        plain = model.generate(**inputs, **arguments)
        torch.manual_seed(1)
        ours = model.generate(**inputs, **arguments, candidate_generator=candidates, verification=verification)
    assert candidates.speculation.drafted > 0 and candidates.speculation.accepted == 0
    assert ours.shape == plain.shape
    if verification == "exact":
        assert torch.equal(plain, ours)


# After an exception in the middle of a call: sessions have ended, and the random generator is where plain `generate`

FREELY: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "top_k": 0}
FAILING = (
    "Oracle.draft",
    "Oracle.observe",
    "ExactVerifier.verify",
    "RandomDepths.depths",
    "SpeculationMonitor.observe",
)


class Failure(Exception):
    """Raised by the part that is to fail."""


def fail_in_third_call(failing: str, part: Any, ended: list[str]) -> Any:
    """The part, whose session raises in a method if it is the one named, and records its end."""
    start, name = part.start, type(part).__name__

    def start_failing(call: Call) -> Any:
        session, steps = start(call), itertools.count(1)
        for method in ("draft", "observe", "verify", "depths", "end"):
            if (own := getattr(session, method, None)) is not None:

                def reached(*given: Any, own: Any = own, method: str = method) -> Any:
                    if method == "end":
                        ended.append(name)
                    if f"{name}.{method}" == failing and next(steps) == 3:
                        raise Failure(failing)
                    return own(*given)

                setattr(session, method, reached)
        return session

    part.start = start_failing
    return part


@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("batch", [1, 3])
def test_exception_anywhere_ends_sessions_and_restores_the_random_state(failing: str, batch: int) -> None:
    """Would catch: noise drawn ahead that is not given back, a session whose `end` is never called, or called twice."""
    model, inputs, streamer, ended = tiny_model("llama"), prompts(batch), RecordingStreamer(), list[str]()
    torch.manual_seed(5)
    oracle = Oracle(model.generate(**inputs, **FREELY)[:, 12:], 0.6)
    parts = [oracle, ExactVerifier(), RandomDepths(), SpeculationMonitor(prometheus=False)]
    names = ("candidate_generator", "verification", "policy", "monitor")
    arguments = dict(zip(names, [fail_in_third_call(failing, part, ended) for part in parts], strict=True))
    torch.manual_seed(5)
    with pytest.raises(Failure, match=failing):
        model.generate(**inputs, **FREELY, **arguments, streamer=streamer)
    assert oracle.speculation is None, "statistics of the failed call"
    state, columns = torch.get_rng_state(), len(streamer.chunks) - 1
    assert sorted(ended) == ["ExactVerifier", "Oracle", "SpeculationMonitor"]
    torch.manual_seed(5)
    if columns:
        model.generate(**inputs, **{**FREELY, "max_new_tokens": columns})
    assert torch.equal(state, torch.get_rng_state())


# Who else draws from the global random generator in a sampled call


def drawing(part: Any, method: str) -> Any:
    """The part, whose session draws random numbers at its start and in each call of a method."""
    start = part.start

    def start_drawing(call: Any) -> Any:
        torch.rand(1)
        session = start(call)
        own = getattr(session, method)

        def draw(*given: Any) -> Any:
            torch.randint(5, (3,))
            return own(*given)

        setattr(session, method, draw)
        return session

    part.start = start_drawing
    return part


DRAWING: dict[str, Callable[[], dict[str, Any]]] = {
    "strategy": lambda: {"candidates": drawing(NgramCandidates(k=3), "draft")},
    "policy": lambda: {"policy": drawing(RandomDepths(), "depths")},
    "monitor": lambda: {"monitor": drawing(SpeculationMonitor(prometheus=False), "observe")},
    "generator of Transformers": lambda: {"candidates": as_candidates(DrawingGenerator())},
}


class DrawingGenerator(CandidateGenerator):
    """One of Transformers' kind that draws its candidate."""

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return torch.cat([input_ids, torch.randint(99, (1, 2))], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to update."""


@pytest.mark.parametrize("name", DRAWING)
def test_what_drafts_and_watches_may_draw_random_numbers(name: str) -> None:
    """Would catch: sampled tokens, or a random state, that silently differ from those of plain generate."""
    how = {"candidates": NgramCandidates(k=3), **FREELY, **DRAWING[name]()}
    assert_same_tokens(tiny_model("llama"), prompts(1), **how)


def test_draft_that_lacks_weights_same_tokens(tmp_path: Path) -> None:
    """Would catch: weights that are initialised at random in the call, so that other tokens are sampled after them."""
    draft = fresh_model("llama")
    weights = {name: value for name, value in draft.state_dict().items() if "layers.0.mlp.up_proj" not in name}
    draft.save_pretrained(tmp_path, state_dict=weights)
    assert_same_tokens(tiny_model("llama"), prompts(1), DraftModelCandidates(str(tmp_path), k=2), **FREELY)


def test_overlapping_calls_choose_each_token_by_noise_of_its_own() -> None:
    """Would catch: a generator that is set back to before the numbers that another thread has drawn meanwhile.

    Rows end early, so that noise is drawn which no token needs.
    """
    model, verifier = tiny_model("llama"), RecordedNoise()
    draft = DraftModelCandidates(perturbed_copy(model, 0.05), k=8)

    def call(**settings: Any) -> None:
        how = {"candidate_generator": draft, "verification": verifier, **settings}
        model.generate(**prompts(1), **FREELY, **END, **how)

    class CallsInAnotherThread(SpeculationMonitor):
        def start(self, call_of_monitor: Call) -> Any:
            session = super().start(call_of_monitor)
            observe = session.observe

            def observe_and_call(step: Any) -> None:
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
                observe(step)

            session.observe = observe_and_call
            return session

    torch.manual_seed(0)
    for _ in range(3):
        call(monitor=CallsInAnotherThread(prometheus=False))
        call()
    assert len(verifier.noise) == len(set(verifier.noise)) > 50


def _tiny_vocabulary() -> Any:
    """A target with 12 tokens, and distributions far from uniform."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(25)
    return model


def _changed(model: Any) -> None:
    """A training step that is independent of all samples."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))


def _fit(model: Any, ids: torch.Tensor, texts: torch.Tensor) -> float:
    """The p-value of the first two tokens of texts."""
    with torch.no_grad():
        first = model(ids[:1]).logits[0, -1].softmax(-1)
        two = torch.cat([ids[:1].expand(12, -1), torch.arange(12)[:, None]], dim=1)
        expected = first[:, None] * model(two).logits[:, -1].softmax(-1)
    counts = torch.bincount(12 * texts[:, 0] + texts[:, 1], minlength=144)
    return goodness_of_fit(counts.numpy()[None], (expected.double() * len(texts)).numpy().reshape(1, -1))


@pytest.mark.parametrize("name", ["ngram", "auto"])
def test_rejection_with_a_history_repeats_noise_and_has_the_distribution_of_the_target(name: str) -> None:
    """Would catch: noise that depends on the draft, or answers of a group or of the same weights that are not
    independent; noise that is not repeated once the weights have changed."""
    model, history, ids = _tiny_vocabulary(), NgramHistory(), torch.tensor([[3, 4, 5]] * 500)
    candidates: Any = NgramCandidates(k=16, tree=16) if name == "ngram" else name
    torch.manual_seed(5)

    def sampled() -> torch.Tensor:
        arguments = {"verification": "rejection", "history": history, "max_new_tokens": 6, "do_sample": True}
        return model.generate(ids, candidate_generator=candidates, top_k=0, **arguments)[:, 3:]

    first, independent = sampled(), sampled()
    assert (first == independent).float().mean() < 0.5, "the same weights"
    _changed(model)
    repeated = torch.cat([sampled(), sampled()])
    before = torch.cat([first, independent])
    assert (repeated == before).float().mean() > 0.7
    assert (repeated != before).any()
    assert _fit(model, ids, repeated) > 1e-5
    # Neighbours in a group are independent: they are equal as often as any two texts.
    neighbours = (repeated[1:, 0] == repeated[:-1, 0]).float().mean()
    distant = (repeated[100:, 0] == repeated[:-100, 0]).float().mean()
    assert abs(neighbours - distant) < 0.1
    if name == "ngram":  # the prefill, and a few steps of the row that has changed most
        assert candidates.speculation is not None and candidates.speculation.accepted > 0.5 * 500 * 6
