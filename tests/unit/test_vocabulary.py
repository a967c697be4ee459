"""The comparison of tokenizers: memory, damaged tokenizers, and failures that are tried again (B19)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specgen.candidates import vocabulary
from hf_specgen.candidates.vocabulary import digest, have_same_vocabulary, vocabulary_of
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_known", {})


def model(name: str, size: int) -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=size))
    return SimpleNamespace(name_or_path=name, config=config)


def test_digest_of_150_000_tokens_is_small_and_depends_on_every_entry() -> None:
    """Would catch: keeping the pairs themselves, 31 MiB for each tokenizer."""
    tokens = {f"token {index}": index for index in range(150_000)}
    known = digest(tokens)
    assert sum(map(sys.getsizeof, (known, *known))) < 1000
    swapped = tokens | {"token 7": 8, "token 8": 7}
    assert digest(dict(reversed(tokens.items()))) == known != digest(swapped)
    assert digest({"a\udc80": 0}).size == 1  # tokens that are no valid Unicode


@pytest.mark.parametrize(
    "error", [ImportError("needs sentencepiece"), KeyError("model"), OSError("no"), RuntimeError("x"), ValueError("y")]
)
def test_vocabulary_of_tokenizer_that_cannot_be_loaded_is_none_and_tried_again_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a KeyError out of `generate`; a failure that is kept for the life of the process."""
    now, loads = 0.0, []

    def fail(name: str) -> Any:
        loads.append(name)
        raise error

    monkeypatch.setattr(vocabulary.AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(vocabulary, "monotonic", lambda: now)
    assert vocabulary_of("org/model") is None is vocabulary_of("org/model") and len(loads) == 1
    assert type(error).__name__ in caplog.text and "org/model" in caplog.text
    now = vocabulary.RETRY_AFTER + 1
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    monkeypatch.setattr(vocabulary.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    assert vocabulary_of("org/model") == digest({"a": 0})
    monkeypatch.setattr(vocabulary.AutoTokenizer, "from_pretrained", fail)
    assert vocabulary_of("org/model") == digest({"a": 0}), "a success is kept"


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


def test_known_tokenizers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary.AutoTokenizer, "from_pretrained", lambda name: SimpleNamespace(get_vocab=dict))
    for number in range(vocabulary.MAX_KNOWN + 5):
        vocabulary_of(f"model-{number}")
    assert len(vocabulary._known) == vocabulary.MAX_KNOWN
