"""All commands: bad input is one sentence and exit code 2, without a traceback; what several of them share."""

from pathlib import Path

import pytest

from hf_specgen.version import __version__
from tests.helpers.cli import run
from tests.helpers.paths import DRAFT_LM, REFERENCE_LM

MODEL = str(REFERENCE_LM)


BAD_INPUT = [
    (["doctor", MODEL, "--dtype", "int3"], "'int3' is not one of 'auto', 'float32'"),
    (["doctor", MODEL, "--batch-size", "0"], "--batch-size"),
    (["doctor", MODEL, "--temperature", "-1"], "--temperature"),
    (["doctor", MODEL, "--device", "toaster"], "device 'toaster' cannot be used here"),
    (["doctor"], "Missing argument"),
    (["doctor", "there/is-none"], "there/is-none"),
    (["doctor", "/there/is/none"], "there is no folder '/there/is/none'"),
    (["doctor", MODEL, "--draft", "./none"], "there is no folder './none'"),
    (["demo", "--dtype", "int3"], "'int3' is not one of 'auto', 'float32', 'bfloat16', 'float16'"),
    (["demo", "--model", "./no-such-folder", "--prompt", "a"], "there is no folder './no-such-folder'"),
    (["demo", "--model", "org/none", "--prompt", "a"], "cannot load 'org/none'"),
    (["demo", "--device", "toaster"], "device 'toaster' cannot be used here"),
    (["demo", "--wide", "-1"], "--wide"),
    (["demo", "--adapter", "/nonexistent"], "there is no folder '/nonexistent'"),
    (["tune", MODEL, "--dtype", "int3"], "'int3' is not one of"),
    (["tune", MODEL, "--context", "100000"], "positions"),
    (["tune", MODEL, "--batch-size", "100000000000000"], "not enough memory"),
    (["tune", MODEL, "--latency", "/no/such/file.json"], "cannot be written"),
    (["tune", MODEL, "--heads", str(DRAFT_LM)], "holds no heads"),
    (["chat", "/there/is/none"], "there is no folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = run(*arguments, exit_code=2)
    assert message in output and "Traceback" not in output


def test_chat_template_that_raises_is_named(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    command = ["generate", str(tmp_path / "model"), str(tmp_path / "prompts.jsonl"), str(tmp_path / "out.jsonl")]
    for arguments in (command, ["doctor", str(tmp_path / "model"), "--device", "cpu"]):
        output = run(*arguments, exit_code=2)
        assert "the chat template of" in output and "no chats" in output


def test_version_is_printed() -> None:
    assert run("--version") == f"hf-specgen {__version__}"
