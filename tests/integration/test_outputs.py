"""What a call returns and keeps alive; scores, logits and caches are compared in `test_cases.py`."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specgen import (
    CombinedCandidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    attached,
    generate_many,
)
from hf_specgen.compat import CACHE
from tests.helpers import Oracle, RecordingStreamer, perturbed_copy, prompts, tiny_model
from tests.helpers.comparison import plain_output
from tests.helpers.encoder_decoder import encoder_decoder, encoder_inputs
from tests.helpers.medusa import random_heads
from tests.helpers.models import STATEFUL, recorded_inputs, stateful_model, width


def test_second_turn_reads_only_what_is_new() -> None:
    """Would catch: a second turn of a chat that reads the first one again; its tokens are in `test_cases.py`."""
    model, candidates = tiny_model("llama"), NgramCandidates(k=4, tree=8)
    arguments = {"max_new_tokens": 9, "return_dict_in_generate": True, "candidate_generator": candidates}
    first = model.generate(**prompts(3), **arguments)
    assert isinstance(first, GenerateDecoderOnlyOutput) and type(first[CACHE]) is DynamicCache
    ids = torch.cat([first.sequences, torch.full((3, 3), 17)], dim=1)
    mask = torch.cat([prompts(3)["attention_mask"], torch.ones(3, 12, dtype=torch.long)], dim=1)
    with recorded_inputs(model, width) as read:
        model.generate(input_ids=ids, attention_mask=mask, **{CACHE: first[CACHE]}, **arguments)
    assert 4 <= read[0] <= 4 + 4  # the second prompt, the last token of the first turn, and tokens drafted behind them


def any_model(architecture: str) -> Any:
    return stateful_model(architecture) if architecture in STATEFUL else tiny_model(architecture)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in an object, in its dicts, lists and attributes, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else vars(value).values()
    return [
        tensor
        for one in parts
        if isinstance(one, dict | list) or hasattr(one, "__dict__")
        for tensor in tensors_of(one)
    ]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek_v3", "lfm2", "falcon_h1", "glm_moe_dsa", "t5"])
def test_output_holds_what_that_of_plain_generate_holds(architecture: str) -> None:
    """Would catch: a cache of another class, with spare slots or rejected drafts; statistics in the place of the cache.

    Full attention, windows, keys and values of different sizes, convolutions, recurrent states, indexers, an encoder.
    """
    is_encoder_decoder = architecture == "t5"
    model = encoder_decoder(architecture) if is_encoder_decoder else any_model(architecture)
    inputs = encoder_inputs(architecture, 2) if is_encoder_decoder else prompts(2, length=20)
    arguments = {"max_new_tokens": 9, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **arguments)
    oracle = Oracle(plain.sequences[:, -9:], 0.6)
    ours = model.generate(**inputs, **arguments, candidate_generator=oracle)
    assert list(ours) == list(plain) and ours[-1] is ours[CACHE] and len(ours.to_tuple()) == len(plain.to_tuple())
    assert repr(ours[CACHE]) == repr(plain[CACHE])
    for mine, expected in zip(tensors_of(ours[CACHE]), tensors_of(plain[CACHE]), strict=True):
        assert mine.shape == expected.shape and mine.dtype == expected.dtype
        assert torch.allclose(mine, expected, atol=1e-3)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied.speculation.accepted == ours.speculation.accepted > 0
        assert all(map(torch.equal, tensors_of(copied[CACHE]), tensors_of(ours[CACHE])))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "falcon_h1"])
def test_returned_cache_continues_in_plain_generate_and_in_ours(architecture: str) -> None:
    """Would catch: a cache that only this package can use, or that it cannot use again; another object returned."""
    model, inputs = any_model(architecture), prompts(2, length=20)
    arguments = {"max_new_tokens": 7, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **arguments)
    ours = model.generate(**inputs, **arguments, candidate_generator=NgramCandidates(k=3))
    ids = torch.cat([plain.sequences, plain.sequences[:, :3]], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 10), value=1)
    expected, *outputs = (
        model.generate(ids, attention_mask=mask, **arguments, **{CACHE: copy.deepcopy(cache)}, **more)
        for cache, more in [
            (plain[CACHE], {}),
            (ours[CACHE], {}),
            (ours[CACHE], {"candidate_generator": NgramCandidates(k=3)}),
            (plain[CACHE], {"candidate_generator": NgramCandidates(k=3)}),
        ]
    )
    for output in outputs:
        assert torch.equal(output.sequences, expected.sequences)
        assert [one.shape for one in tensors_of(output[CACHE])] == [one.shape for one in tensors_of(expected[CACHE])]


@pytest.mark.parametrize("reads_encoder", [False, True])
def test_cache_of_an_encoder_decoder_given_to_a_decoder_is_returned(reads_encoder: bool) -> None:
    """Would catch: another object in the output, or flags by which the next turn adds the encoder's keys again."""
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, add_cross_attention=reads_encoder)
    model = GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    states = {"encoder_hidden_states": torch.randn(2, 7, 32)} if reads_encoder else {}
    texts = []
    for arguments in ({}, {"candidate_generator": NgramCandidates(k=3)}):
        cache, ids, flags = EncoderDecoderCache(DynamicCache(), DynamicCache()), prompts(2)["input_ids"], []
        for _ in range(3):
            call: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: cache, **states}
            output = model.generate(**call, max_new_tokens=6, return_dict_in_generate=True, **arguments)
            assert output[CACHE] is cache
            flags.append(dict(cache.is_updated))
            ids = torch.cat([output.sequences, torch.full((2, 1), 5)], dim=1)
        texts.append((ids.tolist(), flags, cache.get_seq_length()))
    assert texts[0] == texts[1]


def test_cache_made_in_inference_mode_continues_outside() -> None:
    """Would catch: an in-place write to an inference tensor."""
    model, inputs = tiny_model("llama"), prompts(1)
    with torch.inference_mode():
        arguments = {"max_new_tokens": 6, "return_dict_in_generate": True}
        first = model.generate(**inputs, **arguments, candidate_generator=NgramCandidates())
    ids = first.sequences.clone()
    mask = {"attention_mask": torch.ones_like(ids)}  # the padding id is also a real token
    expected = model.generate(ids, max_new_tokens=8, **mask)
    cache = {CACHE: first[CACHE], **mask}
    ours = model.generate(ids, max_new_tokens=8, **cache, candidate_generator=NgramCandidates())
    assert torch.equal(ours, expected)


# Peak memory: what a call keeps alive beyond what plain `generate` keeps

VOCAB = 2_000
COLUMNS = 40
K = 8
KEEP = {"scores": {"output_scores": True}, "scores and logits": {"output_scores": True, "output_logits": True}}
PROCESSORS: dict[str, Any] = {"at once": {"suppress_tokens": [5]}, "by position": {"repetition_penalty": 1.2}}


def logits_bytes() -> int:
    """Bytes of the storages kept alive by tensors of logits or scores, or views into them, since `gc.freeze()`."""
    found = (item for item in gc.get_objects() if type(item) is torch.Tensor)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in found
        if tensor.dim() and tensor.shape[-1] == VOCAB
    }
    return sum(storages.values())


class MeasureAtColumn(StoppingCriteria):
    """Never stops; measures once, when `column` tokens have been generated."""

    def __init__(self, column: int):
        self.column, self.bytes = column, 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if input_ids.shape[1] == 12 + self.column:
            self.bytes = logits_bytes()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate_measured(inputs: dict[str, torch.Tensor], column: int = COLUMNS - 2, **arguments: Any) -> tuple[Any, int]:
    """The output, and the bytes held at a column (near the end of the call), without those held before it."""
    gc.collect()
    gc.freeze()
    model, measure = tiny_model("llama", vocab_size=VOCAB), MeasureAtColumn(column)
    arguments |= {"stopping_criteria": StoppingCriteriaList([measure]), "return_dict_in_generate": True}
    return model.generate(**inputs, **arguments, max_new_tokens=COLUMNS), measure.bytes


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("accuracy", [0.0, 1.0], ids=["rejected", "accepted"])
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("keep", KEEP)
def test_output_scores_keep_no_rejected_nodes_alive(batch: int, accuracy: float, processors: str, keep: str) -> None:
    """Would catch: scores kept as views of whole steps, or a second copy of every emitted position.

    A step of these trees has 17 nodes: kept alive, they are 17 times what plain `generate` keeps where all are
    rejected. Allowed are the nodes of three steps: the current one, its processed copy and a temporary.
    """
    arguments, inputs = {**KEEP[keep], **PROCESSORS[processors]}, prompts(batch)
    plain, plain_bytes = generate_measured(inputs, **arguments)
    oracle = Oracle(plain.sequences[:, 12:], accuracy, k=K, branching=True)
    ours, our_bytes = generate_measured(inputs, **arguments, candidate_generator=oracle)
    assert torch.equal(plain.sequences, ours.sequences)
    assert plain_bytes >= 4 * (COLUMNS - 3) * batch * VOCAB, "the measurement must see the scores of plain generate"
    step = 4 * batch * (1 + 2 * K) * VOCAB
    assert our_bytes <= 1.05 * plain_bytes + 3 * step
    for tensor in (*ours.scores, *(ours.logits or ())):  # none is a view of a larger one
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == 4 * batch * VOCAB


def test_scores_of_a_row_that_is_ahead_keep_no_steps_alive() -> None:
    """Would catch: views of the scores of whole steps, for columns that slower rows have not reached."""
    inputs = prompts(3)
    answers = generate_measured(inputs, output_scores=True)[0].sequences[:, 12:]
    answers[1:] += 1
    oracle = Oracle(answers, 1.0, k=K, branching=True)
    _, held = generate_measured(inputs, 8, output_scores=True, candidate_generator=oracle)
    assert held <= 4 * VOCAB * (COLUMNS + 3 * 8) + 3 * (4 * 3 * (1 + 2 * K) * VOCAB)


@pytest.mark.parametrize("chunk", [None, 7, 25])
def test_draft_model_prefill_is_chunked_as_that_of_the_target_with_logits_of_the_last_token(chunk: int | None) -> None:
    """Would catch: `[1, prompt, vocab]` logits, 8 GB for 32,000 tokens of a large vocabulary; a prompt in one pass."""
    model = tiny_model("llama")
    draft = perturbed_copy(model)
    call = {name: tensor.repeat(1, 5) for name, tensor in prompts(1).items()} | {"prefill_chunk_size": chunk}
    with recorded_inputs(draft, width) as read, recorded_inputs(draft.lm_head, width) as scored:
        # The self-check of both models, which have hooks now, is made in their first call.
        model.generate(**prompts(1), max_new_tokens=2, candidate_generator=DraftModelCandidates(draft, k=4))
        read.clear()
        scored.clear()
        model.generate(**call, max_new_tokens=8, candidate_generator=DraftModelCandidates(draft, k=4))
    assert read[0] == (chunk or 60) and max(read) <= (chunk or 60) and scored[0] == 1


def test_repeated_calls_do_not_accumulate_tensors() -> None:
    """Would catch: a call whose cache, logits or sessions stay alive after its end."""
    model, inputs = tiny_model("llama"), prompts(2)
    strategy = Oracle(model.generate(**inputs, max_new_tokens=20)[:, 12:], 0.5, branching=True)
    counts = []
    for _ in range(3):
        model.generate(**inputs, max_new_tokens=20, candidate_generator=strategy)
        gc.collect()
        counts.append(sum(type(item) is torch.Tensor for item in gc.get_objects()))
    assert counts[1] == counts[2]


def live_states() -> int:
    """How many tensors of keys, values, hidden states or logits exist; indices of slots are kept for later calls."""
    return sum(type(item) is torch.Tensor and item.dim() > 2 for item in gc.get_objects())


@pytest.mark.parametrize("strategy", ["ngram", "draft", "medusa", "skip", "combined"])
def test_tensors_of_a_call_are_freed_without_garbage_collection(strategy: str) -> None:
    """Would catch: cycles of references by which a call keeps its cache until the collector runs."""
    model, rows = tiny_model("llama"), [prompts(1)["input_ids"][0].tolist()] * 3
    draft, arguments = DraftModelCandidates(model, k=2), {"max_new_tokens": 6, "do_sample": True}
    candidates = {
        "ngram": NgramCandidates(k=3, tree=6),
        "draft": draft,
        "medusa": MedusaCandidates(random_heads(model)),
        "skip": LayerSkipCandidates(1, k=2),
        "combined": CombinedCandidates([NgramCandidates(k=3), draft], tree=6),
    }[strategy]

    def calls() -> None:
        model.generate(**prompts(2), **arguments, candidate_generator=candidates)
        list(generate_many(model, rows, candidates, max_rows=2, **arguments))
        with attached(model, candidates):
            model.generate(**prompts(2), **arguments, return_dict_in_generate=True, output_scores=True)

    calls()
    gc.collect()
    gc.disable()
    try:
        before = live_states()
        calls()
        assert live_states() == before
    finally:
        gc.enable()


# Rows that end leave the batch, and streamers receive the columns


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("kind", ["oracle", "draft", "skip"])
def test_generate_ended_rows_leave_the_batch(sampling: dict, kind: str) -> None:
    """Would catch: rows that change places once others have left the batch; ended rows that stay in it."""
    model, inputs = tiny_model("llama"), prompts(6)
    arguments = {"max_new_tokens": 30, "eos_token_id": list(range(0, 12)), "pad_token_id": 0, **sampling}
    torch.manual_seed(8)
    plain = model.generate(**inputs, **arguments)
    candidates: dict[str, Any] = {"draft": DraftModelCandidates(model, k=2), "skip": LayerSkipCandidates(1, k=2)}
    candidates["oracle"] = Oracle(plain[:, 12:], 0.6, branching=True)
    torch.manual_seed(8)
    with recorded_inputs(model.lm_head, len) as rows:
        assert torch.equal(model.generate(**inputs, **arguments, candidate_generator=candidates[kind]), plain)
    assert len(set((plain[:, 12:] != 0).sum(dim=1).tolist())) > 2, "the rows must end at different lengths"
    assert min(rows) < 6


def test_criterion_is_evaluated_before_the_streamer_receives_a_column() -> None:
    """As in plain `generate`."""
    order: list[str] = []

    class Streamer(RecordingStreamer):
        def put(self, value: torch.Tensor) -> None:
            order.append("streamer")

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            order.append("criterion")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    arguments = {"max_new_tokens": 6, "stopping_criteria": StoppingCriteriaList([Criterion()]), "streamer": Streamer()}
    tiny_model("llama").generate(**prompts(1), **arguments, candidate_generator=NgramCandidates())
    assert order == ["streamer", *("criterion", "streamer") * 6]  # first the prompt


def test_text_iterator_streamer_receives_the_text(reference_model: Any, tokenizer: Any) -> None:
    """Would catch: the first token dropped where the streamer skips the prompt, a reader that waits for ever."""
    ids = tokenizer("def add(x, y):", return_tensors="pt").input_ids
    plain = plain_output(reference_model, {"input_ids": ids}, max_new_tokens=20)[0]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    reference_model.generate(ids, max_new_tokens=20, candidate_generator=NgramCandidates(k=4), streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(plain[0, ids.shape[1] :])
