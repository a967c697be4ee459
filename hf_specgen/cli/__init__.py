"""The command line `hf-specgen`."""

from __future__ import annotations

from importlib.util import find_spec


def main() -> None:
    """Entry point of `hf-specgen`."""
    if missing := [name for name in ("typer", "rich", "scipy") if find_spec(name) is None]:
        raise SystemExit(f"hf-specgen needs {', '.join(missing)}: pip install 'hf-specgen[cli]'")
    from hf_specgen.cli.__main__ import app

    app()
