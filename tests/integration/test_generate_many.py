"""`generate_many`: every prompt gets the tokens of plain `generate` alone, whatever runs beside it."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import peft
import pytest
import torch
from torch.nn.functional import pad
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specgen
from hf_specgen import (
    AdaptiveDepth,
    Candidates,
    CombinedCandidates,
    DraftBatch,
    DraftModelCandidates,
    DraftSession,
    DraftTree,
    FixedDepth,
    LayerSkipCandidates,
    MovingWindow,
    NgramCandidates,
    RecyclingCandidates,
    Schedule,
    SpeculationMonitor,
    generate_many,
)
from hf_specgen.batching.shared_steps import SharedSteps
from hf_specgen.call import Call
from hf_specgen.compat import CACHE
from hf_specgen.depth import CostCurve, LatencyModel, Policy, PolicySession
from hf_specgen.settings import Settings
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.verification import VerificationResult
from tests.helpers import fresh_model, perturbed_copy, shared_draft, tiny_model
from tests.helpers.batching import GPU_LIKE, HEADS
from tests.helpers.calls import make_batch, make_state, with_sessions
from tests.helpers.models import stateful_model
from tests.helpers.multimodal import multimodal_model, multimodal_prompts
from tests.helpers.processors import RecordingStreamer

GREEDY = {"do_sample": False, "eos_token_id": [11, 60, 7], "pad_token_id": 0, "max_new_tokens": 20}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.7}
STRATEGIES = {
    "ngram": lambda model: NgramCandidates(k=5),
    "auto": lambda model: CombinedCandidates(),
    "recycling": lambda model: RecyclingCandidates(k=3, policy=MovingWindow()),
    "draft trees": lambda model: DraftModelCandidates(shared_draft(model), k=4, tree=6),
    "layer skip": lambda model: LayerSkipCandidates(exit_layer=1, k=3),
    "llama draft": lambda model: DraftModelCandidates(tiny_model("llama"), k=3),
}


def some_prompts(count: int = 9, longest: int = 29) -> list[list[int]]:
    """Random prompts of different lengths that repeat themselves."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [2 * torch.randint(1, 60, (size,), generator=generator).tolist() for size in sizes]


def alone(model: Any, prompts: list[list[int]], seed: int = 0, **arguments: Any) -> list[list[int]]:
    """The tokens of plain `generate` for each prompt."""
    answers = []
    for number, prompt in enumerate(prompts):
        torch.manual_seed(seed + number)
        ids = torch.tensor([prompt])
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[0, len(prompt) :].tolist())
    return answers


def many(model: Any, prompts: Sequence[Any], strategy: Any, max_rows: int = 4, **arguments: Any) -> list[list[int]]:
    completions = list(generate_many(model, prompts, strategy, max_rows=max_rows, ordered=True, **arguments))
    assert [completion.index for completion in completions] == list(range(len(prompts)))
    return [completion.tokens for completion in completions]


ARCHITECTURES: list[tuple[str, int, list[str], dict[str, Any]]] = [
    ("llama", 29, ["ngram", "recycling", "layer skip"], GREEDY),
    ("llama", 29, ["auto", "draft trees", "llama draft"], SAMPLED),
    ("gemma3_text", 120, ["auto", "draft trees"], GREEDY),  # rows that have dropped slots outside the window
    ("gpt2", 29, ["auto", "draft trees"], SAMPLED),
    ("hy_v4", 29, ["ngram", "draft trees"], GREEDY),  # keys of an indexer
    ("qwen3_next", 20, ["ngram", "llama draft"], {**SAMPLED, "max_new_tokens": 14}),
]


@pytest.mark.parametrize(("architecture", "longest", "names", "arguments"), ARCHITECTURES)
def test_strategies_same_tokens_as_alone(architecture: str, longest: int, names: list[str], arguments: Any) -> None:
    """Would catch: a row that continues in the slots of another, a sliding window that lost a slot, a lost prompt."""
    model = stateful_model(architecture) if architecture == "hy_v4" else tiny_model(architecture)
    prompts = some_prompts(6 if architecture == "qwen3_next" else 9, longest)
    expected = alone(model, prompts, seed=5, **arguments)
    assert len({len(tokens) for tokens in expected}) > 1
    for name in names:
        strategy = STRATEGIES[name](model)
        assert many(model, prompts, strategy, seed=5, **arguments) == expected, name
        assert strategy.speculation.lengths and sum(strategy.speculation.lengths) == sum(map(len, expected))


@pytest.fixture(scope="module")
def answered(reference_model: Any, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what plain `generate` answers to each alone."""
    texts = ("def add(x, y):\n    return x + y\n\ndef sub", "The capital of France is", "1, 2, 3, 4,", '{"a": 1, "b":')
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    return prompts, alone(reference_model, prompts, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("name", HEADS)
def test_heads_read_the_hidden_states_of_their_row(reference_model: Any, answered: Any, name: str) -> None:
    """Would catch: hidden states of the row that was in this place before, or a pass of the drafter for each row."""
    (prompts, expected), strategy = answered, HEADS[name]()
    settings = {"policy": FixedDepth(4), "max_new_tokens": 12, "do_sample": False}
    assert many(reference_model, prompts, strategy, max_rows=3, **settings) == expected
    assert strategy.speculation.acceptance_rate > 0.1
    assert all(len(step.tokens_per_pass) <= 6 for step in strategy.speculation.batch_steps), (
        "rows share the passes of the drafter"
    )


class EndsAt(StoppingCriteria):
    """Ends a text at any of some tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1:] == torch.tensor([3, 8, 20])).any(dim=1)


class AfterSix(StoppingCriteria):
    """Ends each text after six tokens, which it counts itself."""

    text: list[int] = []
    count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        row = input_ids[0].tolist()
        self.count = self.count + 1 if row[:-1] == self.text else 1
        self.text = row
        return torch.full((len(input_ids),), self.count >= 6)


class Fading(LogitsProcessor):
    """Lowers the tokens that its text had lately."""

    text: list[int] = []
    counts = torch.zeros(())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = input_ids[0].tolist()
        self.counts = 0.8 * self.counts if row[:-1] == self.text else torch.zeros(scores.shape[-1])
        self.counts[row[-1]] += 6
        self.text = row
        return scores - self.counts


@pytest.mark.parametrize("functions", [{"stopping_criteria": [AfterSix()]}, {"logits_processor": [Fading()]}])
def test_functions_that_keep_a_state_see_one_text_after_the_other(functions: dict[str, Any]) -> None:
    """Would catch: a criterion or a processor that is shown several texts in turns."""
    model, prompts = tiny_model("llama"), some_prompts(4)
    expected = alone(model, prompts, **GREEDY, **functions)
    assert many(model, prompts, NgramCandidates(), **GREEDY, **functions) == expected


def test_outputs_criteria_and_streamers_are_those_of_each_call() -> None:
    """Would catch: scores, a cache, a criterion or a streamer of another prompt."""
    model, prompts = tiny_model("llama"), some_prompts(7)
    arguments = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    arguments |= {"repetition_penalty": 1.3, "stopping_criteria": [EndsAt()]}
    streamers = [RecordingStreamer() for _ in prompts]
    completions = generate_many(
        model, (torch.tensor(one) for one in prompts), NgramCandidates(), streamer=streamers.__getitem__, **arguments
    )
    for completion in completions:
        ids = torch.tensor([prompts[completion.index]])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        output = completion.output
        assert torch.equal(output.sequences, expected.sequences)
        for one, other in zip(output.scores, expected.scores, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        keys, length = expected[CACHE].layers[1].keys, expected[CACHE].get_seq_length()
        found = output[CACHE].layers[1].keys[:, :, :length]
        torch.testing.assert_close(found, keys, atol=1e-4, rtol=1e-4)
        streamed = streamers[completion.index]
        prompt, *tokens = streamed.chunks
        assert prompt[0] + [token for [token] in tokens] == expected.sequences[0].tolist() and streamed.ended == 1


def test_rows_are_replaced_as_they_end_and_prompts_read_as_rows_become_free() -> None:
    """Would catch: all prompts read at once, or rows that stay empty until the slowest one ends."""
    model, read = tiny_model("llama"), list[int]()

    def prompts() -> Iterator[list[int]]:
        for number, prompt in enumerate(some_prompts(10)):
            read.append(number)
            yield prompt

    strategy = NgramCandidates(k=4)
    completions = generate_many(model, prompts(), strategy, max_rows=3, **GREEDY)
    assert read == []
    first = next(completions)
    assert len(read) <= 4 and len(first.tokens) <= 20
    rest = list(completions)
    assert len(rest) == 9 and all(step.batch <= 3 for step in strategy.speculation.batch_steps)
    steps = max(len(row) for row in strategy.speculation.rows)
    assert len(strategy.speculation.batch_steps) < 10 / 3 * steps + steps


def test_rows_of_the_common_cache_are_held_once() -> None:
    """Would catch: the cache of each prompt, which stays in memory beside its row of the common cache."""
    targets, slots = list[Any](), list[int]()

    def keep(session: Any) -> None:
        targets.append(session.batch.target)
        draft = session.draft

        def counted(depths: Any) -> Any:
            buffers = [keys for target in targets for keys, _ in target.cache.buffers()]
            slots.append(sum(keys.shape[0] for keys in {id(keys): keys for keys in buffers}.values()))
            return draft(depths)

        session.draft = counted

    model, prompts = tiny_model("llama"), some_prompts(4)
    strategy = with_sessions(NgramCandidates(k=3), keep)
    found = [
        answer.tokens for answer in generate_many(model, prompts, max_rows=4, candidate_generator=strategy, **GREEDY)
    ]
    assert len(found) == 4
    assert max(slots) == 4 * model.config.num_hidden_layers, "rows of all layers"


def test_exception_and_early_exit_end_the_sessions_of_all_rows() -> None:
    """Would catch: a session that goes on after its call, and changes what later calls read."""
    model, prompts = tiny_model("llama"), some_prompts(6)
    history = hf_specgen.NgramHistory()
    with pytest.raises(ValueError, match="the prompt is empty"):
        list(generate_many(model, [*prompts[:3], []], NgramCandidates(history=history), max_rows=2, **GREEDY))
    completions = generate_many(model, prompts, NgramCandidates(history=history), max_rows=4, **GREEDY)
    next(completions)
    completions.close()
    assert many(model, prompts, NgramCandidates(), **GREEDY) == alone(model, prompts, **GREEDY)


class RepeatedTokens(Candidates):
    """Drafts the last token again, in sessions whose rows can join and leave, and keeps these sessions."""

    def __init__(self) -> None:
        super().__init__(k=2)
        self.sessions: list[RepeatedTokensSession] = []

    def start(self, batch: DraftBatch) -> DraftSession:
        self.sessions.append(RepeatedTokensSession(batch))
        return self.sessions[-1]


class RepeatedTokensSession(DraftSession):
    """The session of `RepeatedTokens`; `ends` counts the calls of `end`."""

    rows_can_change = True
    ends = 0

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        tokens = zip(self.batch.state.pending(), max_depths, strict=True)
        return DraftTree.chains([[token] * depth for token, depth in tokens])

    def end(self) -> None:
        self.ends += 1


class PlainBeginnings(Policy):
    """Drafts three tokens once a text is long enough; nothing for prompts of an odd length."""

    def start(self, call: Call) -> PolicySession:
        return PlainBeginning(call)


class PlainBeginning(PolicySession):
    """The session of `PlainBeginnings`."""

    def __init__(self, call: Call):
        self._call = call

    def depths(self, limits: Sequence[int]) -> list[int]:
        may_draft = len(self._call.state.prompts[0]) % 2 == 0 and len(self._call.state.generated[0]) > 3
        return [min(3, limit) if may_draft else 0 for limit in limits]


@pytest.mark.parametrize("name", ["eagle trees", "draft model", "dspark and n-grams", "medusa"])
def test_call_joins_a_shared_drafter_when_it_first_drafts(reference_model: Any, answered: Any, name: str) -> None:
    """Would catch: the prompt of a call without drafts in the drafter, states of steps before a draft that it lacks."""
    prompts, _ = answered
    prompts = [prompt[len(prompt) % 2 :] for prompt in prompts]
    prompts.append(prompts[0][1:])
    arguments = {"policy": PlainBeginnings(), "do_sample": False, "max_new_tokens": 16, "memory": False}
    expected, accepted = list[list[int]](), 0
    for prompt in prompts:
        strategy = HEADS[name]()
        expected += alone(reference_model, [prompt], **arguments, candidate_generator=strategy)
        accepted += strategy.speculation.accepted
    joined, strategy = set[int](), HEADS[name]()

    def record(session: Any) -> None:
        draft = session.draft
        session.draft = lambda depths: (joined.update(map(len, session.batch.state.prompts)), draft(depths))[1]

    with_sessions(getattr(strategy, "strategies", [strategy])[-1], record)
    assert many(reference_model, prompts, strategy, max_rows=5, **arguments) == expected
    assert joined == {len(prompt) for prompt in prompts[:-1]}
    assert strategy.speculation.accepted >= 0.9 * accepted > 0


def test_call_joins_a_draft_model_that_another_call_has_outgrown() -> None:
    """Would catch: a prefill that waits for the first draft, with what a row has generated beyond the last position."""
    model = tiny_model("llama")
    draft = perturbed_copy(model)
    draft.config.max_position_embeddings = 20
    prompts = [*[prompt[:20] for prompt in some_prompts(12, 40) if len(prompt) >= 20][:2], [5, 6, 7, 8], [9, 5, 9, 5]]
    arguments = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    # The second call ends before the first one, so that the third joins while the first is beyond the last position.
    first, second = alone(model, prompts[:2], **arguments)
    arguments["eos_token_id"] = next(token for token in second[2:] if token not in first)
    strategy = DraftModelCandidates(draft, k=3, draft_window=None, policy=FixedDepth())
    assert many(model, prompts, strategy, max_rows=2, **arguments) == alone(model, prompts, **arguments)
    assert strategy.speculation.drafted > 0


class OwnSessions(RepeatedTokens):
    """As `RepeatedTokens`, in a session for each call."""

    def start(self, batch: DraftBatch) -> DraftSession:
        session = super().start(batch)
        session.rows_can_change = False
        return session


@pytest.mark.parametrize("shared_is_last", [False, True])
def test_passes_of_shared_and_own_sessions_are_both_counted(shared_is_last: bool) -> None:
    """Would catch: passes without a cost where another drafter has rows, latencies by the last of several drafters."""
    model, prompts = tiny_model("llama"), some_prompts(3)
    members: list[Candidates] = [OwnSessions(), RepeatedTokens()]
    for member, passes in zip(members, [(5,), (7, 7)], strict=True):
        with_sessions(member, lambda session, passes=passes: setattr(session, "tokens_per_pass", passes))
    strategy = CombinedCandidates(members[:: 1 if shared_is_last else -1], tree=4, policy=FixedDepth(2))
    answers = many(model, prompts, strategy, max_rows=3, **GREEDY)
    assert answers == alone(model, prompts, **GREEDY)
    for step in strategy.speculation.batch_steps:
        drafting = sum(depth > 0 for depth in step.requested)
        assert sorted(step.tokens_per_pass) == [5] * drafting + [7, 7] * bool(drafting)
    assert any(sum(depth > 0 for depth in step.requested) > 1 for step in strategy.speculation.batch_steps)
    batch = make_batch(make_state([[1, 2]]), model=model)
    SharedSteps(Settings.parse(strategy)).settings.start(batch).end()
    assert batch.call.state.drafts_together is False


def test_every_session_that_a_strategy_begins_ends_once() -> None:
    """Would catch: a session that only showed whether rows can change, and keeps what it holds, such as a file."""
    model, prompts, strategy = tiny_model("llama"), some_prompts(5), RepeatedTokens()
    assert many(model, prompts, strategy, max_rows=3, **GREEDY) == alone(model, prompts, **GREEDY)
    assert len(strategy.sessions) > len(prompts), "one for each prompt, and those that rows share"
    assert all(session.ends == 1 for session in strategy.sessions)


@pytest.mark.parametrize("ordered", [False, True])
def test_failing_prompt_is_named_after_the_prompts_before_it_are_answered(ordered: bool) -> None:
    """Would catch: answers of rows in work that are lost, an error that does not say which of many prompts it means."""
    model, prompts, answered = tiny_model("llama"), [[1, 2, 3], [4, 5], [6, 7, 8], [], [9, 9]], []
    arguments = {"max_rows": 2, "max_new_tokens": 5, "do_sample": False, "ordered": ordered}
    with pytest.raises(ValueError, match="prompt 3: the prompt is empty"):
        for completion in generate_many(model, prompts, NgramCandidates(), **arguments):
            answered.append(completion.index)
    assert sorted(answered) == [0, 1, 2]


class Failing(BaseStreamer):
    """Raises when it receives the prompt or token of this number; None: never."""

    def __init__(self, number: int | None):
        self._number = number
        self._received = 0

    def put(self, value: torch.Tensor) -> None:
        self._received += 1
        if self._received == self._number:
            raise RuntimeError("a failing step")

    def end(self) -> None:
        pass


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("max_rows", [1, 3, 5])
@pytest.mark.parametrize("kind", ["n-grams", "shared drafter", "one by one"])
def test_error_in_a_step_of_a_prompt_loses_no_other_row(kind: str, max_rows: int, ordered: bool) -> None:
    """Would catch: rows in work that are lost by the verification of another, or that continue in its slots."""
    model, prompts, answers = tiny_model("llama"), some_prompts(7), dict[int, list[int]]()
    arguments = {**GREEDY, "eos_token_id": None, "stopping_criteria": [AfterSix()] if kind == "one by one" else []}
    expected = alone(model, prompts, **arguments)
    arguments |= {
        "max_rows": max_rows,
        "ordered": ordered,
        "streamer": lambda number: Failing({4: 3, 3: 5}.get(number)),
    }
    strategy = STRATEGIES["draft trees" if kind == "shared drafter" else "ngram"](model)
    with pytest.raises(RuntimeError, match=r"(?m)\Aprompt 3: a failing step$"):
        for completion in generate_many(model, prompts, strategy, **arguments):
            answers[completion.index] = completion.tokens
    assert {0, 1, 2} <= set(answers) and not answers.keys() & {3, 4}
    assert all(tokens == expected[index] for index, tokens in answers.items())


def test_answers_after_a_failed_prompt_come_before_its_error() -> None:
    """Would catch: answers that wait for their turn behind the prompt that failed, and are lost."""
    model, prompts, answered = tiny_model("llama"), some_prompts(4), list[int]()
    arguments = {**GREEDY, "eos_token_id": None, "streamer": lambda index: Failing(3 if index == 1 else None)}
    with pytest.raises(RuntimeError, match=r"^prompt 1: a failing step$"):
        for completion in generate_many(model, prompts, NgramCandidates(), max_rows=4, ordered=True, **arguments):
            answered.append(completion.index)
    assert answered == [0, 2, 3]


class FailingPart(RepeatedTokens):
    """Raises in a part of a step of the prompt whose last token is 8, in a session of its own."""

    def __init__(self, part: str, error: Exception):
        super().__init__()
        self._part = part
        self._error = error

    def start(self, batch: DraftBatch) -> DraftSession:
        session: Any = super().start(batch)
        session.rows_can_change = False
        if batch.state.prompts[0][-1] == 8:
            original = getattr(session, self._part)

            def part(*arguments: Any) -> Any:
                if len(batch.state.generated[0]) > 2:
                    raise self._error
                return original(*arguments)

            setattr(session, self._part, part)
        return session


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("plan", RuntimeError("a failure")),
        ("draft", RuntimeError("a failure")),
        ("end", RuntimeError("a failure")),
        ("draft", FileNotFoundError(2, "a failure", "name")),
        ("draft", KeyError("a failure")),
    ],
)
def test_error_in_planning_drafting_or_finishing_a_prompt_loses_no_other_row(part: str, error: Exception) -> None:
    """Would catch: an error without the prompt that it is about, or answers that are lost by it."""
    model, prompts, answers = tiny_model("llama"), [[1, 5, 6], [1, 7, 8], [1, 4], [1, 9]], dict[int, list[int]]()
    arguments = {**GREEDY, "eos_token_id": None}
    expected = alone(model, prompts, **arguments)
    with pytest.raises(type(error)) as raised:
        for answer in generate_many(model, prompts, FailingPart(part, error), max_rows=3, **arguments):
            answers[answer.index] = answer.tokens
    shown = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert any(text.startswith("prompt 1") for text in shown) and "a failure" in shown[0]
    assert isinstance(error, RuntimeError) or error.args[-1] == "a failure"
    assert {0, 2} <= answers.keys() and all(tokens == expected[index] for index, tokens in answers.items())


class FailingTogether(RepeatedTokens):
    """Raises in the third draft for several rows together."""

    def start(self, batch: DraftBatch) -> DraftSession:
        session: Any = super().start(batch)
        draft, rows = session.draft, list[int]()

        def fail(max_depths: Sequence[int]) -> DraftTree:
            rows.append(len(max_depths))
            if len(rows) == 3:
                raise RuntimeError("a failing drafter")
            return draft(max_depths)

        session.draft = fail
        return session


@pytest.mark.parametrize("max_rows", [1, 3])
def test_error_in_a_shared_draft_names_its_prompts(max_rows: int) -> None:
    """Would catch: an error without the prompts that it may be about."""
    arguments = {"eos_token_id": None, "max_rows": max_rows, **GREEDY}
    prompts = "prompts 0, 1, 2" if max_rows == 3 else "prompt 0"
    with pytest.raises(RuntimeError, match=f"^{prompts}: a failing drafter$"):
        list(generate_many(tiny_model("llama"), some_prompts(5), FailingTogether(), **arguments))


@pytest.mark.parametrize("last", ["shared draft", "prompt"])
def test_errors_of_several_prompts_are_raised_together(last: str) -> None:
    """Would catch: the error of a prompt lost behind that of a later pass, or of an earlier prompt."""
    fails_at = {2: 3, 0: 5 if last == "prompt" else None}
    arguments = {**GREEDY, "eos_token_id": None, "streamer": lambda index: Failing(fails_at.get(index)), "max_rows": 3}
    strategy = NgramCandidates() if last == "prompt" else FailingTogether()
    raised_text = "prompt 0: a failing step" if last == "prompt" else "prompts 0, 1: a failing drafter"
    with pytest.raises(RuntimeError, match=f"(?m)\\A{raised_text}$") as raised:
        list(generate_many(tiny_model("llama"), some_prompts(5), strategy, **arguments))
    (note,) = raised.value.__notes__
    assert note.startswith("Another prompt has failed:\nTraceback") and "in put" in note
    assert note.endswith("RuntimeError: prompt 2: a failing step")


def test_error_in_a_shared_pass_names_its_prompts() -> None:
    """Would catch: an error without the prompts that it may be about."""
    model = fresh_model("llama")
    limits: Any = lambda index: Shrinking(model) if index == 1 else None  # noqa: E731
    arguments = {**GREEDY, "eos_token_id": None, "streamer": limits, "max_rows": 2}
    with pytest.raises(IndexError, match=r"^prompts 0, 1: index out of range"):
        list(generate_many(model, some_prompts(5), NgramCandidates(), **arguments))


class Shrinking(BaseStreamer):
    """Leaves one embedding in the model after three tokens."""

    def __init__(self, model: Any):
        self._weight = model.get_input_embeddings().weight
        self._received = 0

    def put(self, value: torch.Tensor) -> None:
        self._received += 1
        if self._received == 4:
            self._weight.data = self._weight.data[:1]

    def end(self) -> None:
        pass


class RecordingCurve(CostCurve):
    """Records for how many tokens it is asked."""

    queried = list[float]()

    def seconds_of(self, tokens: float) -> float:
        self.queried.append(tokens)
        return super().seconds_of(tokens)


class TwoTokens(Policy):
    """Drafts two tokens, with the latencies of a `RecordingCurve`."""

    def start(self, call: Call) -> PolicySession:
        session = FixedDepth(2).start(call)
        session.latency = LatencyModel.from_curves(RecordingCurve((1, 64), (1.0, 9.0), context=64, batch=4))
        return session


def test_step_in_which_a_prompt_fails_takes_the_time_of_all_rows() -> None:
    """Would catch: the seconds of a pass over the rows that remain, although it had the row that failed too."""
    model, prompts, strategy = tiny_model("llama"), some_prompts(4), RepeatedTokens()
    RecordingCurve.queried.clear()
    arguments = {**GREEDY, "eos_token_id": None, "streamer": lambda index: Failing(4 if index == 1 else None)}
    with pytest.raises(RuntimeError, match="prompt 1: a failing step"):
        list(generate_many(model, prompts, strategy, max_rows=4, policy=TwoTokens(), **arguments))
    steps = strategy.speculation.batch_steps
    assert any(step.batch == 3 and step.pass_rows == 4 for step in steps)
    # Each step needs the seconds of its pass, and those of a plain step.
    assert RecordingCurve.queried[0::2] == [step.pass_rows * step.tokens_per_row for step in steps]
    assert RecordingCurve.queried[1::2] == [step.pass_rows for step in steps]


@pytest.mark.parametrize("do_sample", [False, True])
def test_random_generator_is_used_by_sampled_prompts_alone(do_sample: bool) -> None:
    """Would catch: greedy calls that change what the program samples afterwards; one seed for all sampled calls."""
    model, before = tiny_model("llama"), torch.get_rng_state()
    list(generate_many(model, some_prompts(2), NgramCandidates(), do_sample=do_sample, max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), before) is not do_sample


def test_prompt_of_an_iterator_without_a_seed_is_named_after_the_others_are_answered() -> None:
    """Would catch: an IndexError, whose message says nothing, or answers that are lost by it."""
    model, answered = tiny_model("llama"), []
    arguments = {"max_rows": 2, "max_new_tokens": 5, "do_sample": True, "seed": [4, 5, 6]}
    with pytest.raises(ValueError, match="prompt 3: there is no seed for it, as seed has 3 entries; give one for each"):
        for completion in generate_many(model, iter([[1, 2], [3, 4], [5], [6]]), NgramCandidates(), **arguments):
            answered.append(completion.index)
    assert sorted(answered) == [0, 1, 2]


def test_prompt_may_be_what_a_tokenizer_returns(tokenizer: Any, reference_model: Any) -> None:
    """Would catch: "Could not infer dtype of tokenizers.Encoding", padding that is read as text."""
    text, arguments = "def add(x, y):", {"max_new_tokens": 4, "do_sample": False, "ordered": True}
    padded = tokenizer(text, padding="max_length", max_length=20, return_tensors="pt", padding_side="left")
    prompts = [tokenizer(text).input_ids, tokenizer(text), tokenizer(text).encodings[0], padded]
    first, *others = generate_many(reference_model, prompts, NgramCandidates(), **arguments)
    assert all(other.tokens == first.tokens for other in others)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_5_vl"])
def test_prompt_with_images_is_answered_as_by_generate(kind: str) -> None:
    """Would catch: images, token types and the like of a processor's output that are left out without an error."""
    model, arguments = multimodal_model(kind), {"max_new_tokens": 6, "do_sample": False}
    inputs = multimodal_prompts(kind, 1)
    expected = model.generate(**inputs, **arguments)[0, inputs["input_ids"].shape[1] :].tolist()
    by_token = {name for name, value in inputs.items() if value.shape == inputs["input_ids"].shape}
    padding = dict.fromkeys(by_token, (3, 0))
    padded = {name: pad(value, padding.get(name, (0, 0))) for name, value in inputs.items()}
    unused = {"labels": inputs["input_ids"], "special_tokens_mask": [0], "offset_mapping": None}
    assert many(model, [{**inputs, **unused}, padded], NgramCandidates(), **arguments) == [expected] * 2


@pytest.mark.parametrize("prompt", [None, {"text": "x"}, [1.5], [["x"]]])
def test_prompt_that_is_no_token_ids_is_refused(prompt: Any) -> None:
    """Would catch: an error of PyTorch about a data type, without the number of the prompt."""
    with pytest.raises(TypeError, match=r"prompt 1: a prompt must be token ids, such as tokenizer\(text\)"):
        list(generate_many(tiny_model("llama"), [[1, 2], prompt], NgramCandidates(), max_new_tokens=2))


def test_policy_with_a_latency_model_sizes_drafts_for_all_rows() -> None:
    """Would catch: a draft for each row as if it were alone, so that a common pass is too large."""
    model, prompts = tiny_model("llama"), some_prompts(8)
    strategy = NgramCandidates()
    assert many(model, prompts, strategy, policy=GPU_LIKE, **GREEDY) == alone(model, prompts, **GREEDY)
    assert strategy.speculation.drafted > 0
    assert max(step.batch * step.tokens_per_row for step in strategy.speculation.batch_steps) <= 4 * 65
    many(model, prompts, strategy, policy=Schedule({1: 4, 2: 0}), **GREEDY)  # counts the other rows
    assert not any(step.has_draft for step in strategy.speculation.batch_steps if step.batch > 1)


def test_rows_pause_together_once_drafting_has_lost_time() -> None:
    """Would catch: every prompt that loses as much again as those before it, or rows that each pay for all passes."""
    model, prompts = tiny_model("llama"), some_prompts(12)
    latency = LatencyModel.from_curves(CostCurve((1, 64), (1.0, 2.0), context=64, batch=4), draft_token=0.5)
    strategy = DraftModelCandidates(shared_draft(model, 9.0), policy=AdaptiveDepth(latency))
    assert many(model, prompts, strategy, **GREEDY) == alone(model, prompts, **GREEDY)
    assert 0 < sum(step.has_draft for step in strategy.speculation.batch_steps) <= 3


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_prompt_that_is_decoded_alone_pauses_as_generate_does(architecture: str) -> None:
    """Would catch: drafts of a call that shares no passes, whose loss nobody counts, so that they never pause."""
    model, [prompt] = tiny_model(architecture), some_prompts(1)
    latency = LatencyModel.from_curves(CostCurve((1, 64), (1.0, 64.0), context=64, batch=1))
    functions = {"stopping_criteria": [EndsAt()] if architecture == "llama" else []}
    arguments = {**GREEDY, **functions, "eos_token_id": None, "memory": False, "policy": AdaptiveDepth(latency)}
    requested = []
    for run in (alone, many):
        strategy = RepeatedTokens()
        name = {"candidate_generator": strategy} if run is alone else {"strategy": strategy}
        run(model, [prompt], **arguments, **name)
        steps = strategy.speculation.rows[0]
        requested.append([step.depth for step in steps])
    assert requested[0] == requested[1]
    assert any(requested[0]) and not all(requested[0])


class RecordedOutcomes(RepeatedTokens):
    """Drafts one token twice for prompts of an even length, with estimates, and records what its session observes."""

    adaptive_tree = True  # so that drafts have two tokens where one would be faster

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self._is_shared = is_shared
        self.outcomes: list[tuple[list[int], list[int], list[int]]] = []  # drafted, verified, accepted of each row

    def start(self, batch: DraftBatch) -> DraftSession:
        session: Any = super().start(batch)
        session.rows_can_change = self._is_shared
        drafted = list[int]()

        def draft(max_depths: Sequence[int]) -> DraftTree:
            texts = zip(batch.state.pending(), batch.state.prompts, max_depths, strict=True)
            rows = [[token] * (depth if len(prompt) % 4 else 0) for token, prompt, depth in texts]
            drafted[:] = map(len, rows)
            chains = [(row, tuple(range(-1, len(row) - 1))) for row in rows]
            return DraftTree.from_nodes(chains, tuple((0.9, 0.1)[: len(row)] for row in rows))

        session.draft = draft
        session.observe = lambda result: self.outcomes.append(([*drafted], result.num_in_pass, result.accepted))
        return session


@pytest.mark.parametrize("is_shared", [True, False])
def test_drafter_observes_how_many_nodes_the_common_cut_has_left(is_shared: bool) -> None:
    """Would catch: nodes that were cut off before verification, which the drafter counts as rejected."""
    model, prompts = tiny_model("llama"), some_prompts(4)
    latency = LatencyModel.from_curves(CostCurve((1, 2, 3), (1.0, 1.1, 2.0), context=64, batch=4))
    strategy = RecordedOutcomes(is_shared)
    assert many(model, prompts, strategy, policy=AdaptiveDepth(latency), **GREEDY) == alone(model, prompts, **GREEDY)
    assert any(2 in drafted for drafted, _, _ in strategy.outcomes), "the drafts would be cut"
    assert any(0 in drafted for drafted, _, _ in strategy.outcomes)
    for drafted, verified, accepted in strategy.outcomes:
        assert [min(count, 1) for count in drafted] == verified
        assert all(count <= most for count, most in zip(accepted, verified, strict=True))


class NeverDrafts(Policy):
    """Plans no draft, for a call whose drafter has a short prefill or a long one."""

    def __init__(self, prefill_is_short: bool):
        self._prefill_is_short = prefill_is_short

    def start(self, call: Call) -> PolicySession:
        return NoDraft(self._prefill_is_short)


class NoDraft(PolicySession):
    """The session of `NeverDrafts`."""

    def __init__(self, prefill_is_short: bool):
        self._prefill_is_short = prefill_is_short

    def depths(self, limits: Sequence[int]) -> list[int]:
        return [0] * len(limits)

    def prefill_is_short(self) -> bool:
        return self._prefill_is_short


@pytest.mark.parametrize("may_join", [False, True])
def test_hidden_states_are_kept_of_calls_only_that_may_join_a_shared_drafter(may_join: bool) -> None:
    """Would catch: the hidden states of a whole text of a call that cannot draft, or has ended."""
    strategy: Any = RepeatedTokens()
    strategy.target_requirements = lambda model: TargetRequirements((1,))
    batch: Any = make_batch(make_state([[1, 2, 3]]), policy=NeverDrafts(may_join))
    states = list[weakref.ref[torch.Tensor]]()

    def committed_states(layers: Sequence[int]) -> list[torch.Tensor]:
        new = torch.zeros(3, 8)
        states.append(weakref.ref(new))
        return [new]

    batch.target.committed_states = committed_states
    session = SharedSteps(Settings.parse(strategy)).settings.start(batch)
    for _ in range(3):
        session.plan([0])
        assert not session.draft([0]).nodes
        session.observe(VerificationResult([[]], [[9]], [0], num_in_pass=[0]))
    assert sum(state() is not None for state in states) == (3 if may_join else 0)
    session.end()
    assert not any(state() is not None for state in states)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_rows": 0}, "max_rows must be a number of prompts, at least 1, got 0"),
        ({"num_return_sequences": 2, "do_sample": True}, "one answer to each prompt"),
        ({"verification": "rejection"}, "verifies exactly, .*; leave verification= out"),
        ({"compile": "graphs", "monitor": SpeculationMonitor()}, "leave monitor= and compile= out"),
        ({"num_beams": 2}, "num_beams=1"),
        ({"attention_mask": torch.ones(1, 4)}, "makes attention_mask= from each prompt; leave it out"),
        ({"streamer": RecordingStreamer()}, "streamer must be a function .*, got <.*RecordingStreamer"),
    ],
)
def test_calls_that_cannot_be_made_are_refused(arguments: dict[str, Any], words: str) -> None:
    """Would catch: an argument that is ignored, an error after some answers, or one that does not name its cause."""
    with pytest.raises((ValueError, TypeError), match=words):
        many(tiny_model("llama"), some_prompts(2), NgramCandidates(), **{"max_new_tokens": 4, **arguments})


def test_prompts_that_are_no_list_are_refused_at_once() -> None:
    """Would catch: an error that does not name the prompts, and only where the first completion is taken."""
    with pytest.raises(TypeError, match=r"prompts must be a list of token ids for each prompt, .* got 5"):
        generate_many(tiny_model("llama"), 5)  # type: ignore[arg-type]


def test_prompt_with_an_attention_mask_of_another_length_is_named() -> None:
    """Would catch: an index error of PyTorch."""
    with pytest.raises(ValueError, match=r"prompt 0: its attention_mask has 1 values for 2 tokens"):
        many(tiny_model("llama"), [{"input_ids": [1, 2], "attention_mask": [1]}], NgramCandidates())  # type: ignore


def test_adapters_of_single_calls_are_refused() -> None:
    """Would catch: later passes with the adapter that is active, as PEFT's hooks end with the prefill."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(fresh_model("llama"), lora, adapter_name="one")
    model.add_adapter("two", lora)
    model.eval()
    with pytest.raises(ValueError, match=r"prompt 0: generate\(\) changes the model while it runs"):
        list(generate_many(model, [[5, 6, 7]], NgramCandidates(), adapter_names=["two"], **GREEDY))


class Immutable(NgramCandidates):
    """A strategy that keeps no statistics."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "speculation":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_an_immutable_strategy_loses_no_answer() -> None:
    """Would catch: an exception after the last token, since the statistics have no place."""
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    [answer] = generate_many(model, ids, Immutable(), **GREEDY)
    plain = model.generate(ids, **GREEDY)
    assert answer.tokens == plain[0, 3:].tolist()
    assert torch.equal(model.generate(ids, candidate_generator=Immutable(), **GREEDY), plain)
