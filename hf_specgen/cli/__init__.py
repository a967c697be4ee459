"""The command line `hf-specgen`."""

from __future__ import annotations


def main() -> None:
    """Entry point of `hf-specgen`."""
    try:
        from hf_specgen.cli.__main__ import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        raise SystemExit(f"hf-specgen needs {error.name}: pip install 'hf-specgen[cli]'") from None
    app()
