"""Encoder-decoder targets give the tokens, scores and cache of plain `generate`."""

import copy
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, LogitsProcessorList, WhisperForCausalLM

from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    Statistics,
    attach,
    statistics,
)
from hf_specgen.compat import CACHE
from hf_specgen.heads import MedusaHeads
from hf_specgen.targets.replay_queue import MAX_ROW_SKEW
from tests.fuzz.heads import random_head
from tests.helpers import SAMPLING, RowWisePrefixReader, assert_same_tokens, perturbed_copy, shared_draft, tiny_model
from tests.helpers.comparison import SEED, plain_and_speculative
from tests.helpers.encoder_decoder import START, encoder_decoder, encoder_inputs, fresh_encoder_decoder
from tests.helpers.models import VOCAB, recorded_inputs, width
from tests.helpers.oracle import ORACLES, Oracle

ENDS: dict[str, Any] = {"eos_token_id": list(range(4, 24)), "pad_token_id": 0}


def assert_same(kind: str, inputs: dict[str, Any], candidates: Any, model: Any = None, **arguments: Any) -> Statistics:
    return assert_same_tokens(model or encoder_decoder(kind), inputs, candidates, **arguments)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", ["marian", "mbart", "pegasus", "m2m_100", "mt5", "t5gemma", "t5", "whisper"])
def test_partly_accepted_drafts_same_tokens(kind: str, sampling: str) -> None:
    """Would catch: positions of rows that are ahead, a cross-attention cache that is rolled back or filled twice."""
    attention = "eager" if kind in ("t5", "whisper") else "sdpa"  # with SDPA in `test_same_tokens.py`
    model, inputs = encoder_decoder(kind, attention), encoder_inputs(kind, 3)
    speculation = assert_same(kind, inputs, ORACLES["sometimes"], model, max_new_tokens=20, **SAMPLING[sampling])
    assert 0 < speculation.accepted < speculation.drafted


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_embeddings_of_the_encoders_text_same_tokens(kind: str, sampling: str) -> None:
    """Would catch: the embeddings that the encoder reads taken for the prompt of the decoder."""
    model, inputs = encoder_decoder(kind), encoder_inputs(kind, 3)
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    given = {**inputs, "inputs_embeds": embeddings}
    prompt = torch.tensor([[START, 5, 6], [START, 7, 8], [START, 9, 4]])
    for more in ({}, {"decoder_input_ids": prompt}):
        assert_same(kind, given | more, ORACLES["sometimes"], model, max_new_tokens=12, **SAMPLING[sampling])
    with pytest.raises(ValueError, match="the draft's encoder reads token ids"):
        model.generate(**given, max_new_tokens=4, candidate_generator=DraftModelCandidates(perturbed_copy(model)))


PROCESSORS: dict[str, dict[str, Any]] = {
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 9},
    "minimum": {"min_length": 9, **ENDS},
    "encoder": {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    "suppressed": {"suppress_tokens": [4, 5, 6], "begin_suppress_tokens": [7, 8], "do_sample": True},
}


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_processors_see_what_plain_generate_shows_them(kind: str, processors: str) -> None:
    """Would catch: a prefix without the start token, or a processor that reads the encoder's ids of another row."""
    inputs = encoder_inputs(kind, 3)
    assert assert_same(kind, inputs, ORACLES["sometimes"], max_new_tokens=14, **PROCESSORS[processors]).drafted > 0


@pytest.mark.parametrize("make_processors", [None, lambda: LogitsProcessorList([RowWisePrefixReader()])])
@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_outputs_are_those_of_plain_generate(kind: str, make_processors: Any) -> None:
    """Would catch: slots overwritten while a row had ended, padding not read, spare slots in a returned cache."""
    arguments = {"max_new_tokens": 16, "output_scores": True, "output_logits": True, **ENDS}
    model, inputs = encoder_decoder(kind), encoder_inputs(kind, 3)
    ids, ours = plain_and_speculative(model, inputs, ORACLES["sometimes"], make_processors=make_processors, **arguments)
    processors = {} if make_processors is None else {"logits_processor": make_processors()}
    plain = model.generate(**inputs, **arguments, **processors, return_dict_in_generate=True)
    assert list(plain.keys()) == list(ours.keys()) and plain.sequences.tolist() == ids.tolist()
    assert plain.sequences.tolist() == ours.sequences.tolist()
    for expected, got in zip(plain.scores + plain.logits, ours.scores + ours.logits, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for part in ("self_attention_cache", "cross_attention_cache"):
        caches = [getattr(output[CACHE], part).layers for output in (plain, ours)]
        for expected, got in zip(*caches, strict=True):
            torch.testing.assert_close(got.keys, expected.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(got.values, expected.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_prompt_of_the_decoder_may_be_padded(kind: str) -> None:
    """Would catch: the encoder's mask taken for the decoder's, or the other way round."""
    inputs = encoder_inputs(kind, 2)
    inputs["decoder_input_ids"] = torch.tensor([[START, 0, 11, 12], [START, 21, 22, 23]])
    inputs["decoder_attention_mask"] = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    assert assert_same(kind, inputs, ORACLES["sometimes"], max_new_tokens=12).accepted > 0
    draft = DraftModelCandidates(shared_draft(encoder_decoder(kind)), k=3)
    assert assert_same(kind, inputs, draft, max_new_tokens=12).drafted > 0


def test_first_call_may_return_several_sequences() -> None:
    """Would catch: an equivalence test with settings of the call that greedy search does not take."""
    model, inputs = fresh_encoder_decoder("bart"), encoder_inputs("bart", 2)
    assert assert_same(
        "bart", inputs, NgramCandidates(k=3), model, do_sample=True, num_return_sequences=2, max_new_tokens=8
    ).steps


def test_draft_with_an_encoder_of_given_encoder_outputs_is_refused() -> None:
    """Would catch: the -100 that `generate` fills in for ids that were not given, read by the draft's encoder."""
    model, inputs = encoder_decoder("t5"), encoder_inputs("t5", 1)
    given = {"encoder_outputs": model.get_encoder()(**inputs), "max_new_tokens": 4}
    with pytest.raises(ValueError, match="needs the input of the target's encoder"):
        model.generate(**given, candidate_generator=DraftModelCandidates(shared_draft(model), k=3))


def test_rows_far_ahead_wait_for_the_slowest() -> None:
    """Would catch: passes that grow without end, tokens of a waiting row that are lost or read twice."""

    def first_row_right(answers: torch.Tensor) -> Oracle:
        wrong = (answers[1:] + 1) % VOCAB
        return Oracle(torch.cat([answers[:1], wrong]), accuracy=1.0)

    with recorded_inputs(encoder_decoder("bart").get_decoder(), width) as widths:
        speculation = assert_same("bart", encoder_inputs("bart", 3), first_row_right, max_new_tokens=60)
    assert speculation.rows[0][0].accepted == 4
    assert MAX_ROW_SKEW < max(widths) <= MAX_ROW_SKEW + 4 + 1 + 4  # with what a step adds, the pending token, a draft


TABLES = {
    "bart": "max_position_embeddings",
    "whisper": "max_target_positions",
    "led": "max_decoder_position_embeddings",
}


@pytest.mark.parametrize("kind", ["m2m_100", "nllb-moe", "speech_to_text"])
def test_generated_padding_tokens_same_tokens(kind: str) -> None:
    """Would catch: other tokens after a padding token in the text, which M2M-100 skips when it numbers a pass."""
    model, inputs = encoder_decoder(kind), encoder_inputs(kind, 3)
    call = {"suppress_tokens": [token for token in range(VOCAB) if token % 24], "max_new_tokens": 30, "do_sample": True}
    for name in ("always", "sometimes"):
        plain, output = plain_and_speculative(model, inputs, ORACLES[name], **call, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain) and output.speculation.accepted > 0
        assert (plain[:, 2:-8] == model.generation_config.pad_token_id).sum() > 2  # and others after them


@pytest.mark.parametrize("kind", TABLES)
def test_drafts_stay_within_the_table_of_positions(kind: str) -> None:
    """Would catch: a draft token behind the last position, an index error in the embedding."""
    model = encoder_decoder(kind, **{TABLES[kind]: 24})
    assert assert_same(kind, encoder_inputs(kind, 2), ORACLES["sometimes"], model, max_length=24).accepted > 0


# N-grams over the encoder's text


class CopiesSource(LogitsProcessor):
    """Makes each row repeat a text."""

    row_wise = True

    def __init__(self, texts: torch.Tensor):
        self.texts = texts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.texts[:, (input_ids.shape[1] - 1) % self.texts.shape[1]]
        return scores.scatter_add(1, wanted[:, None], torch.full((len(scores), 1), 1000.0))


@pytest.mark.parametrize("candidates", [NgramCandidates(k=6), CombinedCandidates(policy=FixedDepth())])
def test_ngrams_copy_from_the_text_of_the_encoder(candidates: Candidates) -> None:
    """Would catch: matches looked up in the decoder's text alone, which holds none of them."""
    inputs = encoder_inputs("t5", 2, length=30)
    inputs["attention_mask"][:] = 1
    inputs["input_ids"] = torch.stack([torch.randperm(90)[:30] + 4 for _ in range(2)])
    make = lambda: LogitsProcessorList([CopiesSource(inputs["input_ids"])])  # noqa: E731
    speculation = assert_same("t5", inputs, candidates, make_processors=make, max_new_tokens=24)
    assert speculation.accepted > 24


# Draft models


def test_draft_runs_its_own_encoder_once() -> None:
    """Would catch: the encoder's input read again in every draft."""
    draft = perturbed_copy(encoder_decoder("bart"))
    runs: list[int] = []
    draft.get_encoder().register_forward_hook(lambda *_: runs.append(1))
    assert assert_same("bart", encoder_inputs("bart", 3), DraftModelCandidates(draft, k=3), max_new_tokens=12).accepted
    assert len(runs) == 1


@pytest.mark.parametrize("kind", ["whisper", "t5"])
def test_draft_with_the_weights_of_the_targets_encoder_shares_it(kind: str) -> None:
    """Would catch: an encoder that runs twice on the same input."""
    model = encoder_decoder(kind)
    draft = perturbed_copy(model)
    draft.get_encoder().load_state_dict(model.get_encoder().state_dict())
    draft.get_encoder().register_forward_hook(lambda *_: pytest.fail("the draft's encoder was run"))
    assert assert_same(kind, encoder_inputs(kind, 2), DraftModelCandidates(draft, k=3), max_new_tokens=12).accepted > 5


def decoder_alone() -> WhisperForCausalLM:
    """A draft for the tiny Whisper."""
    model = encoder_decoder("whisper")
    draft = WhisperForCausalLM(copy.deepcopy(model.config)).eval()
    draft.model.decoder.load_state_dict(shared_draft(model).model.decoder.state_dict())
    draft.proj_out.load_state_dict(model.proj_out.state_dict())
    return draft


@pytest.mark.parametrize("is_shared", [True, False])
def test_draft_may_have_another_dtype(is_shared: bool) -> None:
    """Would catch: features or encoder outputs that reach the draft in the target's dtype."""
    draft = decoder_alone() if is_shared else copy.deepcopy(encoder_decoder("whisper"))
    candidates = DraftModelCandidates(draft.to(torch.bfloat16), k=3)
    assert assert_same("whisper", encoder_inputs("whisper", 1), candidates, max_new_tokens=10).accepted > 0


def test_decoder_alone_of_another_size_is_refused() -> None:
    """Would catch: a matrix product that fails in the draft's cross attention."""
    model = encoder_decoder("whisper")
    config = copy.deepcopy(model.config)
    config.d_model //= 2
    draft = WhisperForCausalLM(config).eval()
    inputs = encoder_inputs("whisper", 1)
    with pytest.raises(ValueError, match=f"outputs of size {config.d_model}, those of the target have .*of its own"):
        model.generate(**inputs, max_new_tokens=4, candidate_generator=DraftModelCandidates(draft))


@pytest.mark.parametrize("batch", [1, 3])
def test_decoder_alone_reads_the_targets_encoder_outputs(batch: int) -> None:
    """Distil-Whisper's use: `AutoModelForCausalLM` loads its decoder alone."""
    candidates = DraftModelCandidates(decoder_alone(), k=4)
    assert assert_same("whisper", encoder_inputs("whisper", batch), candidates, max_new_tokens=16).accepted > 5


# Draft heads, which read states of the decoder


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", ["t5gemma", "bart", "t5", "m2m_100", "whisper"])
def test_heads_same_tokens(kind: str, sampling: str) -> None:
    """Would catch: sizes or embeddings of the encoder, a prompt of one token, states of rows that are ahead."""
    model, inputs = encoder_decoder(kind), encoder_inputs(kind, 3)
    for name, strategy in (("eagle3", EagleCandidates), ("dflash", DFlashCandidates)):
        candidates = strategy(random_head(name, model, Random(2)), k=3)
        assert assert_same(kind, inputs, candidates, max_new_tokens=12, **SAMPLING[sampling]).drafted > 0
    heads = MedusaHeads.from_target(model, num_heads=2)
    assert_same(kind, inputs, MedusaCandidates(heads, k=2), max_new_tokens=12, **SAMPLING[sampling])


@pytest.mark.parametrize("kind", ["t5gemma", "bart"])
@torch.no_grad()
def test_heads_read_the_decoders_states_of_the_accepted_tokens(kind: str) -> None:
    """Would catch: states of the encoder or of rejected tokens, of which heads would only be accepted less often."""
    model, inputs = encoder_decoder(kind), encoder_inputs(kind, 2)
    head = random_head("dflash", model, Random(2))
    read: list[list[torch.Tensor]] = [[], []]

    class Recording(DFlashCandidates):
        def begin(self, *arguments: Any) -> Any:
            session = super().begin(*arguments)
            take = session.drafter.take_uncached

            def recorded(depths: Any) -> Any:
                text = take(depths)
                for row, features in enumerate(text.features if text is not None else ()):
                    read[row].append(features.clone())
                return text

            session.drafter.take_uncached = recorded
            return session

    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    both = CombinedCandidates([Recording(head, k=2), ORACLES["sometimes"](plain[:, 1:])])
    ids = model.generate(**inputs, candidate_generator=both, max_new_tokens=12, do_sample=False)
    states = model(**inputs, decoder_input_ids=ids, output_hidden_states=True).decoder_hidden_states
    expected = torch.cat([states[layer] for layer in head.config.aux_hidden_state_layers], dim=-1)
    for row, parts in enumerate(read):
        found = torch.cat(parts)
        assert len(found) > 3
        torch.testing.assert_close(found, expected[row, : len(found)], rtol=1e-4, atol=1e-4)


# What is refused

REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "cache": (lambda: {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())}, CACHE),
    "static": (lambda: {"cache_implementation": "static"}, 'cache_implementation="dynamic"'),
    "layers": (lambda: drafting(LayerSkipCandidates(1, k=2)), "does not work with BartFor.*decoder-only models"),
    "embeddings": (lambda: {"decoder_inputs_embeds": torch.zeros(1, 1, 32)}, "decoder_inputs_embeds= has no tokens"),
    "decoder alone": (
        lambda: drafting(DraftModelCandidates(tiny_model("llama"), k=2)),
        "is an encoder-decoder and the draft LlamaForCausalLM a decoder-only model",
    ),
}


def drafting(candidates: Candidates) -> dict[str, Any]:
    return {"candidate_generator": candidates}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_calls_are_refused(case: str) -> None:
    """Would catch: an error from the inside of the decoder, or other tokens."""
    make, message = REFUSED[case]
    model, inputs = encoder_decoder("bart"), encoder_inputs("bart", 1)
    with pytest.raises(ValueError, match=message):
        model.generate(**{**inputs, "max_new_tokens": 4, "candidate_generator": NgramCandidates(), **make()})


def shifting_with_every_call() -> Any:
    """A model with a state of its own."""
    model, calls = fresh_encoder_decoder("bart"), itertools.count(1)
    shift = lambda module, arguments, output: output * (1 + 0.1 * (next(calls) % 7))  # noqa: E731
    model.get_decoder().embed_positions.register_forward_hook(shift)
    return model


def ignoring_positions() -> Any:
    model = fresh_encoder_decoder("whisper")
    ignore = lambda module, args, kwargs: (args, {**kwargs, "position_ids": None})  # noqa: E731
    model.get_decoder().register_forward_pre_hook(ignore, with_kwargs=True)
    return model


UNVERIFIABLE: dict[str, tuple[Callable[[], Any], int, str]] = {
    "bart": (shifting_with_every_call, 1, "in the self-check its logits differed"),
    "whisper": (ignoring_positions, 2, ""),
    "fsmt": (lambda: encoder_decoder("fsmt"), 1, "its logits differed"),
    "prophetnet": (lambda: encoder_decoder("prophetnet"), 1, "only supported for `decoder_input_ids` of length 1"),
}


@pytest.mark.parametrize("kind", UNVERIFIABLE)
def test_model_that_cannot_verify_is_refused(kind: str) -> None:
    """Would catch: an encoder-decoder that is not checked before its first token."""
    make, batch, reason = UNVERIFIABLE[kind]
    with pytest.raises(ValueError, match=f"cannot verify draft tokens.*{reason}"):
        make().generate(**encoder_inputs(kind, batch), max_new_tokens=4, candidate_generator=NgramCandidates())


# Attached strategies and Whisper's own `generate`


def transcriber() -> Any:
    """A random Whisper with the settings that its `generate` needs for timestamps and languages."""
    model = copy.deepcopy(encoder_decoder("whisper"))
    settings = {"no_timestamps_token_id": 60, "is_multilingual": False, "return_timestamps": False, "max_length": 24}
    settings |= {"max_initial_timestamp_index": 5, "begin_suppress_tokens": [5, 6], "suppress_tokens": [7]}
    settings |= {"eos_token_id": 2, "alignment_heads": [[0, 0]], "prev_sot_token_id": 4}
    vars(model.generation_config).update(settings)
    return model


WHISPER: dict[str, tuple[int, dict[str, Any]]] = {
    "short": (40, {}),
    "timestamps": (40, {"return_timestamps": True, "force_unique_generate_call": True}),
    "long": (100, {"return_timestamps": True}),
    "segments": (100, {"return_timestamps": True, "return_segments": True}),
    "previous": (100, {"return_timestamps": True, "condition_on_prev_tokens": True}),
    "fallback": (40, {"temperature": (0.0, 0.6), "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35}),
}


@pytest.mark.filterwarnings("error:settings of assistant_model")  # of which none is given
@pytest.mark.parametrize("case", WHISPER)
def test_transcriptions_are_those_of_whispers_generate(case: str) -> None:
    """Would catch: processors of Whisper out of step, prompts of segments with padding, a cache of another form."""
    frames, arguments = WHISPER[case]
    model = transcriber()
    features = torch.randn(2, 8, frames, generator=torch.Generator().manual_seed(3))
    arguments = {"attention_mask": torch.ones(2, frames, dtype=torch.long), **arguments}

    def run(**more: Any) -> Any:
        torch.manual_seed(SEED)
        return model.generate(features, **arguments, **more)

    plain, candidates = run(), NgramCandidates(k=3)
    ours = run(candidate_generator=candidates)
    if case == "segments":
        plain, ours = plain["sequences"], ours["sequences"]
    assert plain.tolist() == ours.tolist()
    assert candidates.speculation.drafted > 0


@pytest.mark.filterwarnings("ignore:.*`attention_mask`")
def test_refusal_names_the_argument_of_whispers_generate() -> None:
    """Would catch: output_attentions as the reason, which Whisper sets itself and the user did not give."""
    features = torch.randn(1, 8, 40)
    with pytest.raises(ValueError, match=r"^return_token_timestamps=True needs the attention weights(?!.*output_)"):
        transcriber().generate(features, return_token_timestamps=True, candidate_generator=NgramCandidates())


def test_strategy_attached_to_whisper_speculates() -> None:
    """Would catch: an attached strategy that Whisper's own `generate` does not reach."""
    model, features = transcriber(), torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(3))
    plain = model.generate(features)
    attach(model, NgramCandidates(k=3))
    assert model.generate(features).tolist() == plain.tolist()
    assert statistics(model).drafted > 0 and not statistics(model).plain_calls
