"""All commands: bad input is one sentence and exit code 2, without a traceback; what several of them share."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_specgen.cli import settings
from hf_specgen.cli.app import app
from hf_specgen.heads import load_medusa
from hf_specgen.version import __version__
from tests.helpers.medusa import random_heads
from tests.helpers.paths import DRAFT_LM, REFERENCE_LM

MODEL = str(REFERENCE_LM)


def run(*arguments: str, exit_code: int = 0) -> str:
    """The output of a command, with single spaces."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return " ".join(result.output.replace("│", " ").split())


BAD_INPUT = [
    (["doctor", MODEL, "--dtype", "int3"], "'int3' is not one of 'auto', 'float32'"),
    (["doctor", MODEL, "--batch-size", "0"], "--batch-size"),
    (["doctor", MODEL, "--temperature", "-1"], "--temperature"),
    (["doctor", MODEL, "--device", "toaster"], "device 'toaster' cannot be used here"),
    (["doctor"], "name one target: hf-specgen doctor MODEL"),
    (["doctor", MODEL, "--model", MODEL], "name one target"),
    (["doctor", "there/is-none"], "there/is-none"),
    (["doctor", "/there/is/none"], "there is no folder '/there/is/none'"),
    (["doctor", MODEL, "--draft", "./none"], "there is no folder './none'"),
    (["demo", "--dtype", "int3"], "'int3' is not one of 'float32', 'bfloat16', 'float16'"),
    (["demo", "--verification", "maybe"], "'maybe' is not one of 'exact', 'rejection', 'typical'"),
    (["demo", "--batch-size", "0"], "--batch-size"),
    (["demo", "--k", "0"], "--k"),
    (["demo", "--model", "./no-such-folder", "--prompt", "a"], "there is no folder './no-such-folder'"),
    (["demo", "--model", "org/none", "--prompt", "a"], "cannot load 'org/none'"),
    (["demo", "--device", "toaster"], "device 'toaster' cannot be used here"),
    (["demo", "--adapter", "/nonexistent"], "there is no folder '/nonexistent'"),
    (["demo", "--prompts", "5"], "use --prompts-per-domain 5"),
    (["demo", "--json", "/no/such/file.json"], "'/no/such/file.json' cannot be written"),
    (["demo", "--json", "/"], "'/' is a folder"),
    (["tune", MODEL, "--dtype", "int3"], "'int3' is not one of"),
    (["tune", MODEL, "--output", "somewhere"], "name them with --heads"),
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


def test_piped_output_is_not_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert settings.terminal().width == 200
    monkeypatch.setenv("COLUMNS", "80")
    assert settings.terminal().width == Console().width == 80


@pytest.mark.parametrize("to", ["medusa", "tgi", "vllm"])
def test_export_writes_every_format_of_medusa_heads(to: str, reference_model: Any, tmp_path: Path) -> None:
    random_heads(reference_model, num_heads=2).save_pretrained(tmp_path / "heads")
    command = ["export", str(tmp_path / "heads"), "--to", to, "--output", str(tmp_path / "out")]
    run(*command, "--target", MODEL)
    assert load_medusa(tmp_path / "out", reference_model).config.num_heads == 2
    assert "unknown format 'onnx'" in run(*command[:3], "onnx", *command[4:], exit_code=2)


def test_demo_json_needs_no_file_yet(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    settings.check_writable(file)
    file.write_text(json.dumps({}))
    settings.check_writable(file)
    settings.check_writable(None)
