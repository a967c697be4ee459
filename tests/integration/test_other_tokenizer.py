"""Drafts of another tokenizer: the tokens of plain `generate`, and as many accepted as the text allows."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from hf_specgen import Candidates, CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.candidates import pair_speed, translated
from hf_specgen.candidates.reencoding import Codec, Reencoder
from hf_specgen.depth import AdaptiveDepth, CostCurve, LatencyModel
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT
from tests.helpers import SAMPLING, assert_same_tokens
from tests.helpers.captures import graphs_on_cpu
from tests.helpers.goodness_of_fit import goodness_of_fit


def permuted(folder: Path, merges: int | None = None) -> Path:
    """The embedded draft model with its vocabulary in another order, and with its first merges only."""
    shutil.copytree(EMBEDDED_DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ids = sorted(index for index in vocabulary.values() if index not in special)
    new = dict(zip(ids, reversed(ids), strict=True))
    tokenizer["model"]["vocab"] = {token: new.get(index, index) for token, index in vocabulary.items()}
    if merges is not None:
        del tokenizer["model"]["merges"][merges:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32)
    order = torch.arange(model.config.vocab_size)
    for old, index in new.items():
        order[index] = old
    with torch.no_grad():
        tables = {id(table.weight): table.weight for table in (model.get_input_embeddings(), model.lm_head)}
        for weight in tables.values():
            weight.copy_(weight[order].clone())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tokenizer: Any, edit_prompts: list[str]) -> Any:
    texts = [edit_prompts[0], edit_prompts[1][:120], "def fib(n):\n"]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield permuted(tmp_path_factory.mktemp("drafts") / "permuted")


def load(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def drafts(draft: Path) -> dict[str, Any]:
    """The same draft model with the target's vocabulary and with the permuted one, loaded once for all tests."""
    return {"same": load(EMBEDDED_DRAFT), "permuted": load(draft)}


@pytest.fixture
def encodes_all_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Translation by encoding text again, however many tokens are shared."""
    monkeypatch.setattr(translated, "MIN_SHARED", 1.1)


@pytest.mark.parametrize(("tree", "sampling"), [(None, "sampled"), (12, "greedy")])
def test_permuted_vocabulary_drafts_what_the_same_vocabulary_does(
    reference_model: Any, prompts: Any, drafts: dict[str, Any], tree: int | None, sampling: str
) -> None:
    """Would catch: a wrong map of ids, a text or a cache that is not the row's, noise that is not the target's."""
    steps = []
    for draft in drafts.values():
        candidates = DraftModelCandidates(draft, k=4, tree=tree)
        statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=16, **SAMPLING[sampling])
        steps.append(statistics.rows)
    assert steps[0] == steps[1]
    assert sum(step.accepted for row in steps[1] for step in row) > 10


def test_reencoded_draft_is_accepted_as_often_as_the_same_vocabulary(
    reference_model: Any, prompts: Any, drafts: dict[str, Any], encodes_all_text: None
) -> None:
    """Would catch: text that is lost or doubled in translation, a draft cache that goes on from other tokens."""
    same, other = DraftModelCandidates(drafts["same"], k=4), DraftModelCandidates(drafts["permuted"], k=4)
    expected = assert_same_tokens(reference_model, prompts, same, max_new_tokens=16)
    statistics = assert_same_tokens(reference_model, prompts, other, max_new_tokens=16)
    assert statistics.accepted >= 0.8 * expected.accepted > 0


def test_reencoded_draft_sampled_batch_same_tokens(
    reference_model: Any, prompts: Any, drafts: dict[str, Any], encodes_all_text: None
) -> None:
    """Would catch: proposals that change the text."""
    candidates = DraftModelCandidates(drafts["permuted"], k=4, confidence_threshold=0.2)
    statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=12, **SAMPLING["sampled"])
    assert statistics.accepted > 0


def test_vocabulary_with_fewer_merges_same_tokens(reference_model: Any, prompts: Any, tmp_path: Path) -> None:
    """Would catch: tokens of the draft taken for tokens of the target where one is several of the other."""
    draft = permuted(tmp_path / "fewer", merges=600)
    candidates = DraftModelCandidates(str(draft), k=6, tree=12, dtype=torch.float32)
    statistics = assert_same_tokens(reference_model, prompts, candidates, max_new_tokens=16)
    assert statistics.accepted > 0


def test_reencoder_follows_a_text_token_by_token(tokenizer: Any, draft: Path) -> None:
    """Would catch: characters of several tokens, and text that is divided otherwise once it grows."""
    text = "for each naïve café: print(“ok”) 🙂 done\n    return values[index]"
    tokens = tokenizer.encode(text)
    other = AutoTokenizer.from_pretrained(draft)
    row = Reencoder(Codec(tokenizer, other), Codec(other, tokenizer), tokens[:3])
    for token in tokens[3:]:
        row.extend([token])
    assert other.decode(row.tokens) == text
    continuation = other.encode(" and more", add_special_tokens=False)
    assert tokenizer.decode(row.translate(continuation)) == " and more"


# Small models whose tokenizers are written for the test.


def tokenizer_of(characters: Sequence[str], folder: Path) -> Path:
    """A tokenizer with these tokens, in this order; all of them, but for the unknown token, have the same length."""
    length = len(characters[0])
    backend = Tokenizer(WordLevel({character: token for token, character in enumerate(characters)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("." * length), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(folder)
    return folder


def small_model(characters: Sequence[str], folder: Path, seed: int, positions: int = 64) -> Any:
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.name_or_path = str(tokenizer_of(characters, folder))
    return model


@pytest.mark.parametrize("tree", [None, 5])
def test_shared_vocabulary_rejection_sampling_has_the_distribution_of_the_target(tree: Any, tmp_path: Path) -> None:
    """Would catch: q that includes tokens which are never drafted, q in the draft's order.

    Three of six tokens are shared. 2,000 samples of two tokens; fails by chance once in 1,000 runs of another seed.
    """
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("gfxcy?a", tmp_path / "draft", 3)
    ids = torch.tensor([[0, 2, 5]])
    first = target(ids).logits[0, -1].softmax(-1)
    second = torch.stack([target(torch.cat([ids, torch.tensor([[t]])], 1)).logits[0, -1].softmax(-1) for t in range(7)])
    candidates = DraftModelCandidates(draft, k=2, tree=tree)
    torch.manual_seed(11)
    counts = torch.zeros(49)
    for _ in range(4):
        output = target.generate(
            ids,
            do_sample=True,
            max_new_tokens=3,
            num_return_sequences=500,
            candidate_generator=candidates,
            verification="rejection",
        )
        counts += torch.bincount(output[:, 3] * 7 + output[:, 4], minlength=49)
    assert candidates.speculation is not None and candidates.speculation.accepted > 100
    expected = (first[:, None] * second).flatten().detach().numpy()
    assert goodness_of_fit(counts.numpy()[None], (expected * float(counts.sum()))[None]) > 1e-3


@pytest.mark.parametrize(("prompt", "session"), [("abcd", "SharedVocabularySession"), ("efef", "ReencodingSession")])
def test_translation_is_by_what_the_prompt_shares(prompt: str, session: str, tmp_path: Path) -> None:
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?dcba", tmp_path / "draft", 3)
    sessions = []
    candidates = DraftModelCandidates(draft, k=2)
    start = candidates.start
    candidates.start = lambda call: sessions.append(start(call)) or sessions[-1]  # type: ignore[method-assign]
    inputs = {"input_ids": torch.tensor([["abcdef".index(character) for character in prompt]])}
    assert_same_tokens(target, inputs, candidates, max_new_tokens=8)
    assert {type(one).__name__ for one in sessions} == {session}


def test_prompt_of_one_token_is_read_once(tmp_path: Path) -> None:
    """Would catch: a second pass over the last token of a prompt, whose logits the prefill has returned."""
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?fedcba", tmp_path / "draft", 3)
    read: list[list[int]] = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    candidates = DraftModelCandidates(draft, k=1)
    target.generate(torch.tensor([[0]]), max_new_tokens=2, candidate_generator=candidates)  # checks the draft
    read.clear()
    target.generate(torch.tensor([[0]]), max_new_tokens=2, candidate_generator=candidates)
    assert read == [[6]]


def test_captured_draft_with_another_tokenizer_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: passes for trees and texts in the draft's tokens that do not fit the captured buffers."""
    graphs_on_cpu(monkeypatch)
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?fedcba", tmp_path / "draft", 0)
    candidates = DraftModelCandidates(draft, k=3, tree=6, compile="graphs")
    statistics = assert_same_tokens(target, {"input_ids": torch.tensor([[0, 1, 2]])}, candidates, max_new_tokens=12)
    assert statistics.drafted > 10


def test_prompt_longer_in_the_tokens_of_the_draft_is_refused(tmp_path: Path) -> None:
    target = small_model("abcdef?", tmp_path / "target", 0)
    draft = small_model("?fedcba", tmp_path / "draft", 3, positions=4)
    with pytest.raises(ValueError, match="at most 4"):
        target.generate(torch.tensor([[0] * 5]), max_new_tokens=2, candidate_generator=DraftModelCandidates(draft, k=2))


def test_prompt_longer_in_the_tokens_of_the_target_same_tokens(tmp_path: Path) -> None:
    """Would catch: a prompt counted in the target's tokens, of which it has twice as many as of the draft's."""
    target = small_model("abcdef?", tmp_path / "target", 0)
    draft = small_model(["ab", "cd", "?"], tmp_path / "draft", 3, positions=12)
    inputs = {"input_ids": torch.tensor([[0, 1, 2, 3] * 4])}
    statistics = assert_same_tokens(target, inputs, DraftModelCandidates(draft, k=2), max_new_tokens=6)
    assert statistics.drafted > 0


def warnings_of(model: Any, draft: Any, pass_seconds: float, calls: int, combined: bool = False) -> list[str]:
    """The warnings of some calls, by a latency model in which a pass of the draft takes so long."""
    latency = LatencyModel.from_curves(CostCurve((1, 65), (0.010, 0.011), 256, 1), draft_token=pass_seconds)
    policy = AdaptiveDepth(latency)
    candidates: Candidates = DraftModelCandidates(draft, policy=policy)
    if combined:
        candidates = CombinedCandidates([candidates, NgramCandidates()], policy=policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(calls):
            ids = torch.tensor([[number % 6, 1, 2]])
            model.generate(ids, max_new_tokens=48, do_sample=True, top_k=0, candidate_generator=candidates)
    found = [one for one in caught if "another tokenizer" in str(one.message)]
    assert all(one.filename == __file__ for one in found), "the warning names a line inside a library"
    return [str(one.message) for one in found]


def test_draft_that_is_slower_is_warned_of_once(tmp_path: Path) -> None:
    """Would catch: a warning in every call, before there are enough steps, or with other figures than observed."""
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?fedcba", tmp_path / "draft", 3)
    assert not warnings_of(target, draft, pass_seconds=0.016, calls=8, combined=True), "its members are not told apart"
    found = warnings_of(target, draft, pass_seconds=0.016, calls=12)
    assert len(found) == 1 and str(tmp_path / "draft") in found[0]
    assert "100% of the prompt's tokens" in found[0] and "tokens per step" in found[0]
    assert not warnings_of(target, draft, pass_seconds=0.016, calls=2)


def test_draft_that_is_faster_is_not_warned_of(tmp_path: Path) -> None:
    target, draft = small_model("abcdef?", tmp_path / "target", 0), small_model("?fedcba", tmp_path / "draft", 0)
    assert not warnings_of(target, draft, pass_seconds=0.0001, calls=2)
    (total,) = pair_speed._observed[target].values()
    assert total is not None and total.steps >= pair_speed.MIN_DRAFTED_STEPS, "it tests nothing"
