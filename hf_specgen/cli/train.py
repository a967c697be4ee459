"""`hf-specgen train`: from prompts to a measured drafter in one process, by the folder `recipes` of a clone."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import typer

import hf_specgen
from hf_specgen.cli.settings import TrainSettings, terminal

RECIPES = Path(hf_specgen.__file__).parents[1] / "recipes"


def show(settings: TrainSettings) -> None:
    """Plan, then run every stage that is not done; a signal ends it with a sentence that says how to go on."""
    if not (RECIPES / "training.py").exists():
        raise ValueError(
            "hf-specgen train runs the scripts of the folder recipes/, which an installed package does not have: clone "
            "the repository of hf-specgen and run pip install -e '.[train]' in it"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("hf-specgen train is one process; for several, start the recipes as docs/training.md says")
    sys.path.insert(0, str(RECIPES))
    arguments = import_module("arguments")
    import_module("datasets").disable_progress_bars()
    try:
        with arguments.expected_errors():
            import_module("whole_training").Training(settings, terminal()).run()
    except KeyboardInterrupt as stop:
        typer.echo(f"hf-specgen train: {stop.args[0] if stop.args else arguments.STOPPED}", err=True)
        raise typer.Exit(130) from None
