"""The comparison of tokenizers: memory, damaged tokenizers, and failures that are tried again (B19)."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specgen.candidates import draft_model
from hf_specgen.candidates.draft_model import VocabularyDigests, have_same_vocabulary
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT


@pytest.fixture(autouse=True)
def _no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "vocabulary_digests", VocabularyDigests())


def model(name: str, size: int) -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=size))
    return SimpleNamespace(name_or_path=name, config=config)


def with_vocabulary(monkeypatch: pytest.MonkeyPatch, tokens: dict[str, int]) -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: tokens)
    monkeypatch.setattr(draft_model.AutoTokenizer, "from_pretrained", lambda name: tokenizer)


def test_digest_of_150_000_tokens_is_small_and_depends_on_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: keeping the pairs themselves, 31 MiB for each tokenizer."""
    tokens = {f"token {index}": index for index in range(150_000)}
    swapped = tokens | {"token 7": 8, "token 8": 7}
    digests, vocabularies = VocabularyDigests(), [tokens, dict(reversed(tokens.items())), swapped, {"a\udc80": 0}]
    found = []
    for number, vocabulary in enumerate(vocabularies):  # the last has tokens that are no valid Unicode
        with_vocabulary(monkeypatch, vocabulary)
        found.append(digests.digest(f"model {number}"))
    assert found[0] == found[1] != found[2] and None not in found
    assert sys.getsizeof(found[0]) < 1000


@pytest.mark.parametrize(
    "error", [ImportError("needs sentencepiece"), KeyError("model"), OSError("no"), RuntimeError("x"), ValueError("y")]
)
def test_digest_of_tokenizer_that_cannot_be_loaded_is_none_and_tried_again_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a KeyError out of `generate`; a failure that is kept for the life of the process."""
    now, loads = 0.0, []

    def fail(name: str) -> Any:
        loads.append(name)
        raise error

    monkeypatch.setattr(draft_model.AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(draft_model, "monotonic", lambda: now)
    digests = VocabularyDigests()
    assert digests.digest("org/model") is None is digests.digest("org/model") and len(loads) == 1
    assert type(error).__name__ in caplog.text and "org/model" in caplog.text
    now = 301.0
    with_vocabulary(monkeypatch, {"a": 0})
    known = digests.digest("org/model")
    assert known is not None
    monkeypatch.setattr(draft_model.AutoTokenizer, "from_pretrained", fail)
    assert digests.digest("org/model") == known, "a success is kept"


def test_have_same_vocabulary_damaged_tokenizer_and_other_size_names_the_reason(tmp_path: Path) -> None:
    broken = Path(shutil.copytree(EMBEDDED_DRAFT, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}", encoding="utf-8")
    draft, target = model(str(broken), 100), model(str(EMBEDDED_DRAFT), 99)
    with pytest.raises(ValueError, match=rf"of 100, the target of 99.*tokenizer of '{broken}' cannot be loaded"):
        have_same_vocabulary(draft, target)
    have_same_vocabulary(model(str(broken), 99), target)  # the same size: not proved, but likely


def test_have_same_vocabulary_unnamed_models_of_one_size_pass_and_others_do_not() -> None:
    have_same_vocabulary(model("", 99), model("", 99))
    with pytest.raises(ValueError, match="not loaded from a folder or repository"):
        have_same_vocabulary(model("", 99), model("", 98))


def test_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with_vocabulary(monkeypatch, {})
    digests = VocabularyDigests(max_entries=4)
    for number in range(9):
        digests.digest(f"model-{number}")
    assert len(digests._digests) == 4
