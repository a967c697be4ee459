"""Commands in the test's own process."""

from typer.testing import CliRunner

from hf_specgen.cli.__main__ import app


def run(*arguments: str, exit_code: int = 0) -> str:
    """The output of a command, with single spaces and without frames."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output or result.exception
    return " ".join(result.output.replace("│", " ").split())
