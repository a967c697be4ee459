"""Drafters with a window, with a part of the vocabulary, or that draft all tokens in one pass: the same tokens."""

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import RobertaConfig, RobertaForCausalLM

import hf_specgen
from hf_specgen import (
    AutoCandidates,
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    MTPCandidates,
    NgramCandidates,
)
from hf_specgen.candidates.draft_vocabulary import vocabulary_ids
from hf_specgen.compat import CACHE
from hf_specgen.heads.head_formats import load_head
from tests.helpers import SAMPLING, assert_same_tokens, fresh_model, perturbed_copy, prompts, tiny_model
from tests.helpers.calls import drafted_after
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.models import small_llama
from tests.helpers.policies import AfterPlainSteps

HEADS = ["eagle3_original", "speculators_peagle_llama", "dflash_zlab", "speculators_dspark_vanilla", "pard_llama"]
HEADS += ["mtp_transformers_glm4_moe_2layers"]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("batch", [1, 3])
def test_window_that_is_exceeded_again_and_again_same_tokens(name: str, batch: int) -> None:
    """Would catch: features of other tokens after a restart, rows that restart together by mistake."""
    fixture, mode = FIXTURES[name], SAMPLING["sampled" if batch == 1 else "greedy"]
    candidates = AutoCandidates.from_pretrained(fixture.checkpoint_folder, k=3, draft_window=(2, 5))
    assert_same_tokens(fixture.target, prompts(batch), candidates, max_new_tokens=24, **mode)


def drafted(draft: Any, text: list[int], **settings: Any) -> list[int]:
    """The chain that is drafted after a text."""
    return drafted_after(draft, text, DraftModelCandidates(draft, k=4, **settings))


def test_draft_model_with_a_window_drafts_what_it_drafts_after_the_window_alone() -> None:
    """Would catch: positions or cached keys of tokens outside of the window."""
    draft, text = small_llama(40, 3, initializer_range=0.3), torch.randint(2, 40, (30,)).tolist()
    kept = [*text[:-1][:2], *text[:-1][-6:], text[-1]]
    assert drafted(draft, text, draft_window=(2, 6)) == drafted(draft, kept) != drafted(draft, text)


@pytest.mark.parametrize("kind", ["draft model", "eagle"])
def test_memory_and_passes_of_a_drafter_with_a_window_do_not_grow_with_the_text(kind: str) -> None:
    """4,000 tokens: the cache of the drafter stays as short as the window."""
    if kind == "eagle":
        fixture = FIXTURES["eagle3_original"]
        drafter: Any = load_head(fixture.head_folder)
        target, candidates = fixture.target, EagleCandidates(drafter, k=2, draft_window=16)
    else:
        drafter = small_llama(40, 4, max_position_embeddings=5_000)
        target = small_llama(40, 3, max_position_embeddings=5_000)
        candidates = DraftModelCandidates(drafter, k=2, draft_window=16)
    sizes: list[int] = []

    def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        cache = kwargs[CACHE] if CACHE in kwargs else args[-1]
        sizes.append(cache.layers[0].keys.shape[2])

    drafter.register_forward_hook(record, with_kwargs=True)
    text = torch.randint(2, 40, (1, 4_000), generator=torch.Generator().manual_seed(1))
    target.generate(text, max_new_tokens=24, do_sample=False, candidate_generator=candidates, pad_token_id=0)
    assert len(sizes) > 4 and max(sizes) <= 4 + 2 * 16 + 2 * 64


def test_window_beyond_the_trained_length_is_warned_of_once(caplog: Any) -> None:
    """Would catch: a warning in each call, or where the window keeps to the trained length."""
    target, draft = small_llama(40, 3), small_llama(40, 4)
    draft.config.trained_length = 12
    for window, warnings in (((2, 5), 0), ("auto", 0), (None, 1), (None, 1), (14, 2)):
        candidates = DraftModelCandidates(draft, k=2, draft_window=window)
        assert_same_tokens(target, {"input_ids": torch.arange(2, 12)[None]}, candidates, max_new_tokens=30)
        assert caplog.text.count("but it was trained on 12") == warnings


@pytest.mark.parametrize("falls", [True, False])
def test_acceptance_that_falls_with_the_length_is_warned_of_once(falls: bool, caplog: Any) -> None:
    """Would catch: no warning, one in each call, one where acceptance is the same in long texts."""
    target = small_llama(40, 3, max_position_embeddings=5_000)
    draft = copy.deepcopy(target)

    def worse(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        if falls and int(inputs["position_ids"].max()) > 256:
            output.logits = -output.logits

    draft.register_forward_hook(worse, with_kwargs=True)
    text = {"input_ids": torch.arange(126)[None] % 40}
    for warnings in (falls, falls):
        assert_same_tokens(target, text, DraftModelCandidates(draft, k=2), max_new_tokens=170)
        assert caplog.text.count("after more than 256 tokens far fewer drafts") == warnings


# A drafter with a smaller output matrix: the same text; its distributions, restricted to the tokens that are left

IDS = [2, 3, 5, 8, 13, 21, 34]
MTP = ["mtp_transformers_glm4_moe", "mtp_transformers_glm4_moe_2layers"]


@pytest.mark.parametrize(("mode", "vocabulary"), [("greedy", "frequent"), ("sampled", IDS)])
@pytest.mark.parametrize("name", ["draft model", *MTP])
def test_restricted_drafter_same_tokens(name: str, mode: str, vocabulary: Any) -> None:
    """Would catch: ids of rows of the smaller output matrix taken for tokens."""
    if name == "draft model":
        target, drafter = small_llama(99, 3), DraftModelCandidates(small_llama(99, 3), k=3, draft_vocabulary=vocabulary)
    else:
        target = FIXTURES[name].target
        drafter = MTPCandidates(FIXTURES[name].checkpoint_folder, k=2, draft_vocabulary=vocabulary)
    assert_same_tokens(target, prompts(3), drafter, max_new_tokens=12, **SAMPLING[mode])


@pytest.mark.parametrize("vocabulary", ["frequent", IDS, list(range(40))])
def test_restricted_draft_model_drafts_the_most_likely_of_its_tokens(vocabulary: Any) -> None:
    """Would catch: ids of rows instead of tokens, in the draft or in what the draft model reads next."""
    draft, text = small_llama(40, 3, initializer_range=0.3), torch.randint(2, 40, (1, 9))
    candidates = DraftModelCandidates(draft, k=4, draft_vocabulary=vocabulary)
    drafted = drafted_after(draft, text[0].tolist(), candidates)
    seen = [token for token, _ in Counter(text[0, :-1].tolist()).most_common()]
    allowed = sorted([*dict.fromkeys([*seen, *range(40)])][:10]) if vocabulary == "frequent" else vocabulary
    expected = text
    for _ in range(4):
        logits = draft(expected).logits[0, -1, allowed]
        expected = torch.cat([expected, torch.tensor([[allowed[int(logits.argmax())]]])], dim=1)
    assert [text[0].tolist() + drafted] == expected.tolist()
    assert draft.get_output_embeddings().out_features == 40


def roberta(seed: int) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"intermediate_size": 96, "type_vocab_size": 1, "is_decoder": True, "initializer_range": 0.2}
    return RobertaForCausalLM(RobertaConfig(vocab_size=99, pad_token_id=1, eos_token_id=None, **settings)).eval()


@pytest.mark.parametrize("kind", ["matrix in a part", "target itself", "hooks of accelerate"])
def test_restricted_draft_model_is_left_as_it_is(kind: str) -> None:
    """Would catch: the output matrix replaced in a part that the caller's model has too; a `forward` bound to that."""
    target, draft = (small_llama(99, 0), small_llama(99, 3)) if "hooks" in kind else (roberta(0), roberta(3))
    if kind == "target itself":
        draft = target
    if "hooks" in kind:
        add_hook_to_module(draft, ModelHook())
    matrix, inputs = draft.get_output_embeddings(), {"input_ids": torch.tensor([[5, 9, 23, 5, 9, 23, 5]])}
    expected = draft.generate(**inputs, max_new_tokens=12, do_sample=False)
    for _ in range(2):
        candidates = DraftModelCandidates(draft, k=3, draft_vocabulary=IDS, policy=FixedDepth(3))
        assert assert_same_tokens(target, inputs, candidates, max_new_tokens=12).drafted > 0
    assert draft.get_output_embeddings() is matrix and matrix.out_features == 99
    assert torch.equal(draft.generate(**inputs, max_new_tokens=12, do_sample=False), expected)


def test_restricted_draft_model_with_a_replaced_forward_is_refused() -> None:
    """Would catch: a function that calls the whole model, whose logits are then taken for those of the few tokens."""
    draft = small_llama(99, 3)
    forward = draft.forward
    draft.forward = functools.wraps(forward)(lambda *given, **named: forward(*given, **named))
    with pytest.raises(ValueError, match=r"forward of this LlamaForCausalLM was replaced by .*types.MethodType"):
        drafted(draft, [5, 9, 23, 5], draft_vocabulary=IDS)


@pytest.mark.parametrize("tree", [None, 5])
def test_rejection_sampling_with_a_restricted_draft_model_has_the_distribution_of_the_target(tree: Any) -> None:
    """Would catch: q over the whole vocabulary."""
    candidates = DraftModelCandidates(small_llama(7, 3), k=2, tree=tree, draft_vocabulary=[1, 4, 5])
    assert fit_of_two_tokens(small_llama(7, 0), torch.tensor([[0, 2, 5]]), candidates, calls=4) > 1e-3


def test_vocabulary_of_a_parallel_draft_model_is_refused() -> None:
    """Would catch: a setting that is ignored for draft models that predict all tokens at once."""
    fixture = FIXTURES["pard_llama"]
    candidates = DraftModelCandidates(str(fixture.checkpoint_folder), draft_vocabulary=[1])
    with pytest.raises(ValueError, match="with a draft model that drafts all tokens in one pass"):
        fixture.target.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)


# Parallel draft models (PARD, PARD-2): one pass a draft, and the tokens of plain generate

DRAFTS = ["pard_llama", "pard2_llama"]


def drafts(name: str, **settings: Any) -> Any:
    return AutoCandidates.from_pretrained(FIXTURES[name].head_folder, **settings)


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id"])
@pytest.mark.parametrize("token", [0, 5])
def test_draft_model_with_any_mask_token_drafts_in_one_pass(name: str, token: int) -> None:
    """Would catch: token 0 taken for no mask token, and a draft model that is then run once a token."""
    model = tiny_model("llama")
    draft = perturbed_copy(model)
    setattr(draft.config, name, token)
    statistics = assert_same_tokens(model, prompts(1), DraftModelCandidates(draft, k=4), max_new_tokens=8)
    assert all(len(step.tokens_per_pass) == 1 for step in statistics.batch_steps if step.has_draft)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_parallel_draft_same_tokens_in_one_pass_a_draft(name: str, batch: int) -> None:
    """Would catch: mask tokens left in the cache, features of another token, a pass for each token."""
    target, mode = FIXTURES[name].target, SAMPLING["sampled" if batch == 3 else "greedy"]
    for settings in ({"k": 5}, {"k": 4, "tree": 12}, {"k": 5, "policy": AfterPlainSteps(2)}):
        candidates = drafts(name, **settings)
        assert isinstance(candidates, DraftModelCandidates)
        assert_same_tokens(target, prompts(batch), candidates, max_new_tokens=14, **mode)
        passes = [step.tokens_per_pass for step in candidates.speculation.batch_steps if step.has_draft]
        assert passes and all(len(step) == 1 for step in passes)


def test_parallel_draft_at_its_last_positions_same_tokens() -> None:
    """Would catch: as many masks in each row as in that of the deepest draft, at positions that the model lacks."""
    draft = fresh_model("gpt2", n_positions=16)
    draft.config.pard_token = 98
    candidates = DraftModelCandidates(draft, k=6, draft_window=None, policy=FixedDepth())
    statistics = assert_same_tokens(tiny_model("gpt2"), prompts(3), candidates, max_new_tokens=12)
    assert statistics.drafted > 0


def test_auto_depth_of_one_pass_is_less_than_that_of_a_pass_for_each_level() -> None:
    """Would catch: mask tokens for depths that are hardly ever accepted, in every pass."""
    target, fixed = FIXTURES["pard_llama"].target, hf_specgen.FixedDepth()
    parallel, serial = drafts("pard_llama", policy=fixed), DraftModelCandidates(target, policy=fixed)
    for candidates in (parallel, serial):
        assert_same_tokens(target, prompts(1), candidates, max_new_tokens=40)
    assert max(max(step.tokens_per_pass, default=0) for step in parallel.speculation.batch_steps) < 32
    assert max(step.depth for step in serial.speculation.batch_steps) == 32


@pytest.mark.parametrize("name", DRAFTS)
def test_parallel_draft_beside_others_and_with_ended_rows_same_tokens(name: str) -> None:
    """Would catch: features of an ended row, or of tokens that another drafter proposed, read as those of the text."""
    target = FIXTURES[name].target
    plain = target.generate(**prompts(3), max_new_tokens=12, do_sample=False)
    ends = {"eos_token_id": int(plain[0, prompts(3)["input_ids"].shape[1] + 3]), "pad_token_id": 0}
    assert_same_tokens(target, prompts(3), drafts(name, k=3), max_new_tokens=12, **ends)
    both = CombinedCandidates([NgramCandidates(k=4), drafts(name, k=4)], policy=hf_specgen.FixedDepth())
    assert_same_tokens(target, prompts(3), both, max_new_tokens=12)


def test_frequent_tokens_are_tokens_of_the_drafter() -> None:
    """Would catch: placeholders of images in the prompt, such as -200, that count from the end of a matrix."""
    assert vocabulary_ids("frequent", [[-200, -200, 9, 64]], 16).tolist() == [0, 1, 2, 9]
