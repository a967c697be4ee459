"""Draws the pictures of the documentation into docs/images: `python docs/screenshots.py [measured] [demo] [chat] …`.

`measured` shows the recorded suite `published`, `report` the suite `domains`, `speed` the suite `projected`. The demo
and a chat run as they would on a terminal of 80 columns; the benchmark report is drawn by a headless Chromium, if there
is one.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import typer
from rich.console import Console

from hf_specgen.cli.settings import errors

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the package `benchmarks`
IMAGES = ROOT / "docs" / "images"
PROJECTED = ROOT / "benchmarks" / "results" / "projected" / "report.json"
DRAWN = ("n-grams", "n-grams + recycling", "draft model", "EAGLE", "n-grams + EAGLE")
MEASURED = ROOT / "benchmarks" / "results" / "published" / "report.json"
REPORT = ROOT / "benchmarks" / "results" / "domains" / "report.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUESTION = (
    "Rename `fxn` to `target` in this code.\n\ndef return_module(self, name):\n"
    "    fxn = self.module_for_loader(lambda self, module: module)\n    return fxn(self, name)"
)


def terminal() -> Console:
    """A terminal of 80 columns that records what it shows."""
    return Console(record=True, width=80, file=io.StringIO())


def demo() -> Path:
    """`hf-specgen demo`."""
    from hf_specgen.cli.demo import show
    from hf_specgen.cli.settings import DemoSettings

    console = terminal()
    show(DemoSettings(), console)
    return save(console, "hf-specgen demo", "demo.svg")


def chat() -> Path:
    """A question in `hf-specgen chat` with a 300M target, answered with a strategy and without."""
    import torch

    from benchmarks.harness.wide import widen
    from hf_specgen import Candidates, DraftModelCandidates
    from hf_specgen.cli.chat import Chat
    from hf_specgen.evaluation.workloads import BUNDLED_DRAFT, PLAIN, load

    model, tokenizer = load()
    draft = DraftModelCandidates(str(BUNDLED_DRAFT), dtype=model.dtype)
    model = widen(model, 300 * 10**6)
    settings: dict[str, Any] = {"candidate_generator": draft}
    cast(Any, model).generate(torch.tensor([[1, 2]]), max_new_tokens=24, **settings)  # loads and checks
    console = terminal()
    lines = iter([QUESTION, "/plain", "/again", "/quit"])

    def read() -> str:
        line = next(lines)
        console.print(f"[bold cyan]>[/] {line}", highlight=False)
        return line

    choices: dict[str, Candidates | None] = {PLAIN: None, "draft model": draft}
    Chat(model, tokenizer, choices, console, max_new_tokens=64, do_sample=False).run(read)
    return save(console, "hf-specgen chat", "chat.svg")


def measured() -> Path:
    """Tokens per second of every strategy and its peer in Transformers."""
    from benchmarks.report.figures import throughput

    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["tables"]["speed"]
    rows = [row for row in rows if row["domain"] in ("edit-code", "qa", "all")]  # most gain, least gain, and all ten
    image = IMAGES / "measured.png"
    throughput(rows).savefig(image, dpi=160, facecolor="white")
    return image


def speed() -> Path:
    """Projected speedups by domain of the strategies that are best for some text."""
    from benchmarks.report.figures import figures
    from benchmarks.report.figures import save as save_figures

    rows = json.loads(PROJECTED.read_text(encoding="utf-8"))["tables"]["projected by domain"]
    rows = [row for row in rows if row["variant"].rsplit(" ", 1)[0] in DRAWN]
    save_figures({"speed": figures({"projected by domain": rows})["projected by domain"]}, IMAGES)
    (IMAGES / "speed.svg").unlink()
    return IMAGES / "speed.png"


def report() -> Path:
    """The first screen of the benchmark report.

    Raises:
        FileNotFoundError: without a browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"the report needs a browser to be drawn by: {', '.join(BROWSERS)}")
    image = IMAGES / "report.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,650", f"--screenshot={image}"]
    subprocess.run([browser, *options, REPORT.as_uri()], check=True, capture_output=True)
    return image


def save(console: Console, title: str, name: str) -> Path:
    """Write what was shown as an SVG."""
    IMAGES.mkdir(exist_ok=True)
    image = IMAGES / name
    console.save_svg(str(image), title=title)
    return image


PICTURES: dict[str, Callable[[], Path]] = {
    "measured": measured,
    "speed": speed,
    "demo": demo,
    "chat": chat,
    "report": report,
}

if __name__ == "__main__":
    for picture in sys.argv[1:] or PICTURES:
        try:
            with errors():
                print(PICTURES[picture]())
        except typer.Exit:
            print(f"{picture} was not drawn")
