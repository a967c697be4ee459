"""`hf-specgen generate`: the answers of plain generation, resumable, in the order of the source."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_specgen.cli import generate as command
from hf_specgen.cli.app import app

PROMPTS = ["def add(x, y):", "The quick brown fox jumps over the lazy dog. " * 3, "Hello", "1, 2, 3, 1, 2, 3, 1,", "A"]


@pytest.fixture(autouse=True)
def model(folder: Path, tmp_path: Path) -> None:
    """A tiny target beside the prompts."""
    (tmp_path / "model").symlink_to(folder / "target")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    return file


def run(source: Path, output: Path, *options: str, exit_code: int = 0) -> str:
    arguments = [
        "generate",
        str(output.parent / "model"),
        str(source),
        str(output),
        "--max-new-tokens",
        "12",
        "--dtype",
        "float32",
    ]
    result = CliRunner().invoke(app, [*arguments, "--batch-size", "2", *options])
    assert result.exit_code == exit_code, result.output
    return " ".join(result.output.split())


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8")], ids=["greedy", "sampled"])
def test_answers_are_those_of_plain_generation_in_the_order_of_the_source(source: Path, sampling: tuple) -> None:
    plain, ours = source.with_name("plain.jsonl"), source.with_name("ours.jsonl")
    run(source, plain, "--plain", *sampling)
    output = run(source, ours, *sampling)
    assert rows(ours) == rows(plain)
    assert [row["id"] for row in rows(ours)] == [0, 1, 2, 3, 4] and all("answer" in row for row in rows(ours))
    assert "5 rows" in output and "tokens per step" in output
    if not sampling:  # would catch: an answer beside the prompt of another row
        (alone := source.with_name("alone.jsonl")).write_text(json.dumps(rows(plain)[1] | {"answer": None}) + "\n")
        run(alone, source.with_name("one.jsonl"), "--answer-column", "again")
        assert rows(source.with_name("one.jsonl"))[0]["again"] == rows(plain)[1]["answer"]
    assert not list(source.parent.glob("*.parts")) and not list(source.parent.glob("*.unfinished"))


def test_interrupted_run_is_resumed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: answers that are generated twice, lost, or other ones than those of an uninterrupted run."""
    complete, resumed = source.with_name("complete.jsonl"), source.with_name("resumed.jsonl")
    run(source, complete, "--temperature", "0.8")
    answer, calls = command.answer, []

    def failing(*arguments: Any) -> Any:
        calls.append(len(arguments[2]))
        for number, completion in enumerate(answer(*arguments)):
            if number == 2 and len(calls) == 1:
                raise OSError("no power")
            yield completion

    monkeypatch.setattr(command, "answer", failing)
    assert "no power" in run(source, resumed, "--temperature", "0.8", exit_code=2)
    assert not resumed.exists()
    part = next(source.parent.glob("resumed.jsonl.parts/process-0.jsonl"))
    part.write_text(part.read_text() + '[3, "cut o')
    assert "belongs to a run with other settings" in run(source, resumed, exit_code=2)
    assert "2 answered already" in run(source, resumed, "--temperature", "0.8")
    assert rows(resumed) == rows(complete) and calls == [5, 3]


def test_messages_and_other_columns_are_read(source: Path) -> None:
    file, output = source.with_name("chats.jsonl"), source.with_name("out.jsonl")
    file.write_text(json.dumps({"chat": [{"role": "user", "content": "Hello"}]}) + "\n")
    run(file, output, "--column", "chat", "--answer-column", "reply")
    assert list(rows(output)[0]) == ["chat", "reply"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a"}\n', (), "row 1 of {} has no prompt in column 'prompt'; its columns are text"),
        ("nonsense\n", (), "{}, line 1: expected a JSON object, got 'nonsense'"),
        ("\n", (), "{} has no rows"),
        ('{"prompt": "a"}\n', ("--draft", "/no/such"), "there is no folder '/no/such'"),
        ('{"prompt": "a"}\n', ("--answer-column", "prompt"), "row 1 of {} has a column 'prompt' already"),
        ('{"prompt": "a", "answer": "b"}\n', (), "row 1 of {} has a column 'answer' already; name another one"),
        ('{"prompt": "\\ud800"}\n', (), "row 1 of {} has a lone surrogate"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
            (),
            "row 1 of {} ends with a message of the assistant",
        ),
        ('{"prompt": ["a"]}\n', (), "row 1 of {} has no chat messages"),
        (b"\xff", (), "{} is not UTF-8"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, content: str | bytes, options: tuple, message: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    output = run(source, tmp_path / "out.jsonl", *options, exit_code=2).replace(" ", "")
    assert message.format(source).replace(" ", "") in output


def test_missing_file_and_existing_output_are_named(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert "No such file" in run(tmp_path / "none.jsonl", output, exit_code=2)
    (tmp_path / "empty").mkdir()
    assert "cannot load the dataset" in run(tmp_path / "empty", output, exit_code=2)
    output.touch()
    assert "exists already; delete it" in run(source, output, exit_code=2)
