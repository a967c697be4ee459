"""The tokens that two vocabularies share, and the text of a row in the draft's tokens."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_specgen.candidates.cross_tokenizer import (
    FilteredTokenizer,
    Retokenizer,
    SharedVocabulary,
    shared_ids,
    token_texts,
)
from hf_specgen.candidates.draft_model import have_same_vocabulary
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT
from tests.fuzz.models import CHARACTERS, KINDS, VOCAB, tokenizer_folder

TARGET = tokenizer_folder("characters")


def reference_shared_ids(target: Any, draft: Any) -> list[int]:
    """For each token of the target, the last token of the draft that adds the same text to the same letter, or -1."""

    def added(tokenizer: Any, token: int) -> tuple[str, str]:
        letter = tokenizer.encode("x", add_special_tokens=False)[-1:]  # none if the tokenizer has no letters
        alone, both = tokenizer.decode(letter), tokenizer.decode([*letter, token])
        text = both[len(alone) :]
        name = tokenizer.convert_ids_to_tokens(token)
        return ("name", name) if not text or "\ufffd" in text else ("text", text)

    ours, theirs = ({token: added(one, token) for token in one.get_vocab().values()} for one in (target, draft))
    result = []
    for token in range(max(ours) + 1):
        same = [other for other, text in theirs.items() if text == ours.get(token)]
        result.append(max(same, default=-1))
    return result


def reference_target_logits(logits: list[float], draft_ids: list[int], target_size: int) -> list[float]:
    """The logits of a draft over the target's vocabulary, token by token."""
    result = [-1e9] * target_size
    for token, index in enumerate(draft_ids[:target_size]):
        if 0 <= index < len(logits):
            result[token] = logits[index]
    return result


def byte_level() -> Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [*"abcxthe", "Ġ", "Ġt", "Ġth", "Ġthe", "Ã", "©", "Ċ"]
    backend = Tokenizer(BPE({text: token for token, text in enumerate(texts)}, [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    return backend


def sentence_piece() -> Tokenizer:
    texts = ["<unk>", "<0x0A>", "<0xC3>", "<0x61>", *"xabthe▁", "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {text: token for token, text in enumerate(texts)}
    backend = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(WordPiece({"[UNK]": 0, "x": 1, "the": 2, "##the": 3, "##a": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return backend


MADE = {"byte-level": byte_level, "SentencePiece": sentence_piece, "WordPiece": word_piece}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("byte-level", {" the": 10, "t": 4, "a": 0, " ": 7, "\n": 13}),  # "Ġ" alone is a space
        ("SentencePiece", {" the": 13, "t": 7, "a": 5, " ": 10, "\n": 1}),  # 5, not the byte of "a"
        ("WordPiece", {" the": 2, "the": 3, "a": 4, " x": 1}),
    ],
)
def test_token_texts_of_different_kinds_of_tokenizers_agree(kind: str, expected: dict[str, int]) -> None:
    """Would catch: tokens compared by their names, "Ġthe" and "▁the"; a space lost at the beginning of a text."""
    found = token_texts(PreTrainedTokenizerFast(tokenizer_object=MADE[kind]()))
    assert {text: found.get(("text", text)) for text in expected} == expected


def test_shared_ids_name_of_a_byte_is_the_text_of_a_token_matches_neither(tmp_path: Path) -> None:
    """Would catch: byte C3, whose name is "Ã", taken for the character "Ã", whose bytes are C3 and 83."""
    folders = [str(tmp_path / name) for name in ("bytes", "characters")]
    bytes_only = {"x": 0, "Ã": 1, "ĥ": 2, "©": 3}
    vocabularies = (bytes_only, []), (bytes_only | {"Ãĥ": 4}, [("Ã", "ĥ")])
    for folder, (vocabulary, merges) in zip(folders, vocabularies, strict=True):
        backend = Tokenizer(BPE(vocabulary, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    assert shared_ids(*folders) == (0, 1, 2, 3)
    assert shared_ids(folders[1], folders[1]) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["characters", "bytes"])
def test_shared_ids_agree_with_the_reference(target: str, kind: str) -> None:
    """Would catch: tokens with other texts that count as the same, or one token of the draft for two of the target."""
    folders = str(tokenizer_folder(target)), str(tokenizer_folder(kind))
    found = shared_ids(*folders)
    assert list(found) == reference_shared_ids(*map(AutoTokenizer.from_pretrained, folders))
    shared = [index for index in found if index >= 0]
    assert shared and len(set(shared)) == len(shared), "two tokens of the target with one of the draft"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("target_size", "draft_size"), [(99, 99), (104, 99), (99, 60), (80, 99)])
def test_target_logits_agree_with_the_reference(target_size: int, draft_size: int, dtype: torch.dtype) -> None:
    """Would catch: padded tables, tokens that the model does not have, q that is not renormalised, float16's range."""
    ids = shared_ids(str(TARGET), str(tokenizer_folder("pairs")))
    logits = torch.randn(2, 3, draft_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    shared = SharedVocabulary(ids, target_size, draft_size)
    found = shared.target_logits(logits)
    for row, wanted in zip(found.flatten(0, 1), logits.flatten(0, 1), strict=True):
        assert row.tolist() == reference_target_logits(wanted.tolist(), list(ids), target_size)
    q, of_draft = found.softmax(dim=-1), logits.float().softmax(dim=-1)
    known = {token: shared.draft_token(token) for token in range(target_size)}
    common = [(token, index) for token, index in known.items() if index is not None]
    kept = of_draft[..., [index for _, index in common]]
    torch.testing.assert_close(q[..., [token for token, _ in common]], kept / kept.sum(dim=-1, keepdim=True))
    assert float(q.sum()) == pytest.approx(6)
    assert shared.draft_token(10**6) is None, "a token of the prompt may be beyond the target's logits"


def retokenizer(kind: str, prompt: list[int], is_shared: bool = True) -> tuple[Retokenizer, Any]:
    folders = str(TARGET), str(tokenizer_folder(kind))
    ours, theirs = map(AutoTokenizer.from_pretrained, folders)
    shared = SharedVocabulary(shared_ids(*folders) if is_shared else [], VOCAB, VOCAB)
    return Retokenizer(FilteredTokenizer(ours, theirs), FilteredTokenizer(theirs, ours), prompt, shared), theirs


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("kind", ["reversed", "pairs", "bytes"])
def test_retokenizer_keeps_the_text(kind: str, is_shared: bool) -> None:
    """Would catch: text lost or doubled where shared tokens and encoded text meet; a space where encoding begins."""
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    tokens = [token - token % 2 for token in tokens]  # "pairs" has every second character
    row, theirs = retokenizer(kind, tokens[:5], is_shared)
    for start in range(5, 60, 3):
        assert row.extend(tokens[5 : start + 3])
        assert theirs.decode(row.tokens).strip() == "".join(CHARACTERS[token] for token in tokens[: start + 3])


def test_retokenizer_shared_tokens_are_not_encoded_again() -> None:
    """A token that both have is taken over as it is, even if the draft's tokenizer would have merged it."""
    row, theirs = retokenizer("pairs", [10])
    row.extend([0, 2])  # both shared, and also a pair
    assert theirs.convert_ids_to_tokens(row.tokens[-2:]) == [CHARACTERS[0], CHARACTERS[2]]
    both = CHARACTERS[0] + CHARACTERS[2]
    assert theirs.convert_ids_to_tokens(theirs.encode(both))[-1] == both


# The comparison of tokenizers


def model(name: str, size: int) -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=size))
    return SimpleNamespace(name_or_path=name, config=config)


@pytest.mark.parametrize(
    "error", [ImportError("needs sentencepiece"), KeyError("model"), OSError("no"), RuntimeError("x"), ValueError("y")]
)
def test_have_same_vocabulary_tokenizer_that_cannot_be_loaded_is_tried_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a KeyError out of `generate`; an attempt over the network in every call."""
    loads, name = [], f"org/{type(error).__name__}"  # failures are kept by name

    def fail(name: str) -> Any:
        loads.append(name)
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    for _ in range(2):
        assert have_same_vocabulary(model(name, 99), model(name, 98))  # of one repository
        assert have_same_vocabulary(model(name, 99), model("", 99))
    assert loads == [name] and f"{type(error).__name__}: " in caplog.text and name in caplog.text


def test_have_same_vocabulary_damaged_tokenizer_and_other_size_names_the_reason(tmp_path: Path) -> None:
    """Would catch: two vocabularies called different without saying that a tokenizer is damaged."""
    broken = Path(shutil.copytree(BUNDLED_DRAFT, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}", encoding="utf-8")
    draft, target = model(str(broken), 100), model(str(BUNDLED_DRAFT), 99)
    with pytest.raises(ValueError, match=rf"of 100, the target of 99.*tokenizer of '{broken}' cannot be loaded"):
        have_same_vocabulary(draft, target)
    have_same_vocabulary(model(str(broken), 99), target)  # the same size: not proved, but likely


def test_have_same_vocabulary_unnamed_models_of_one_size_pass_with_one_warning(caplog: Any) -> None:
    """Would catch: models from code refused, or accepted whatever their size or without a word."""
    for _ in range(2):
        assert have_same_vocabulary(model("", 97), model("", 97))
    assert caplog.text.count("is not checked, only that both have 97 tokens") == 1
    with pytest.raises(ValueError, match="not loaded from a folder or repository"):
        have_same_vocabulary(model("", 99), model("", 98))
