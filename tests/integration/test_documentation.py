"""Every code block of README, documentation and recipes runs, and every command in them is read by its parser."""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from accelerate.commands.launch import launch_command_parser
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LogitsProcessorList

import hf_specgen
from benchmarks import formats
from benchmarks.micro import MICRO
from benchmarks.records import RECORDS
from benchmarks.report.tables import BEGIN, END, collect
from benchmarks.suites import SUITES
from hf_specgen import Candidates, DraftModelCandidates, EagleCandidates, NgramCandidates
from hf_specgen.candidates.draft_model import Loading
from hf_specgen.cli.__main__ import app
from hf_specgen.depth import FixedDepth, LatencyModel
from hf_specgen.heads import load_head
from hf_specgen.monitor import speedup
from hf_specgen.settings import KEYWORDS
from tests.helpers.calls import with_sessions
from tests.helpers.models import recorded_inputs
from tests.helpers.paths import BENCHMARK_ASSETS, DRAFT_LM, REFERENCE_LM, ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ELSEWHERE = ROOT / "docs" / "integrations.md"
"""A page whose examples need other libraries: run by tests/integrations."""
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8") and page != ELSEWHERE]
LENGTH = re.compile(r'max_new_tokens(=|": )\d\d+')
"""Replaced by few tokens: other tests compare long outputs with those of plain `generate`."""
COMMANDS = re.compile(
    r"```bash\n(.*?)```|"
    r"`((?:hf-specgen|python (?:-m benchmarks|-m tests|recipes)|accelerate launch (?:-m|recipes)|make|pytest) ?[^`]+)`",
    re.S,
)
PLACEHOLDERS = {"HEAD": "benchmarks/assets/medusa-heads", "FILE": "benchmarks/profiles/gpu_like.json"}
PLACEHOLDERS |= {"ID": "org/model"}
OTHER_PROGRAMS = ("hf", "transformers", "cat", "mkdir", "git", "import", "def", "with", "return", "END")
INPUTS = {"_", "adapter", "checkpoint", "exit_layer", "head_or_path", "max_k", "model_or_id", "settings", "strategies"}
"""Arguments of strategies that name what they draft with, or are not for users."""
INPUTS |= {"self", "kwargs", "loading"}
INTERNAL = {"_from_model_config", "is_assistant", "transformers_version"}
"""Fields of a `GenerationConfig` that nobody sets."""
MODEL = re.compile(r'^name = "[^"]+"', flags=re.M)
"""The model of a first example: replaced by the bundled one, since tests load nothing from the Hub."""
PUBLISHED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
"""The kind of generation settings that published models have, those of Qwen2.5-0.5B-Instruct."""
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#]*)(#[^)]*)?\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with the generation settings of a published one."""
    folder = tmp_path_factory.mktemp("published") / REFERENCE_LM.name
    shutil.copytree(REFERENCE_LM, folder, copy_function=os.symlink)
    (folder / "generation_config.json").unlink()
    settings = json.loads((REFERENCE_LM / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps(settings | PUBLISHED), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def names(published: Path) -> dict[str, Any]:
    """What a page may assume, and says so: the lines of a section of the quickstart."""
    section = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").split("## The examples of these pages")[1]
    found: dict[str, Any] = {}
    code = section.split("```python\n")[1].split("```")[0]
    exec(code.replace("benchmarks/assets/reference-lm", published.as_posix()), found)
    return found


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_of_a_page_run(
    page: Path, names: dict[str, Any], published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: an example that the API has left behind, or that fails where the model samples by default."""
    monkeypatch.chdir(ROOT)
    before = set(ROOT.iterdir())
    text = page.read_text(encoding="utf-8")
    namespace = dict(names) if "#the-examples-of-these-pages" in text else {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        code = MODEL.sub(f'name = "{published.as_posix()}"', LENGTH.sub(r"max_new_tokens\g<1>8", block))
        exec(compile(code, str(page), "exec"), namespace)
    assert set(ROOT.iterdir()) == before, "an example wrote into the working folder"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    """Would catch: a page that was moved, a page or a section that was renamed."""
    for target, section in LINK.findall(page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert "docs" not in page.parts or "docs" in linked.resolve().parts, f"{target} is no page of the site"
        if section and linked.suffix == ".md":
            headings = [re.sub(r"[^\w\- ]", "", one.lower()) for one in HEADING.findall(linked.read_text("utf-8"))]
            assert section[1:].replace("-", " ") in [one.replace("-", " ") for one in headings], target + section


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_with_an_installation_says_what_to_do_before_the_first_release(page: Path) -> None:
    """Would catch: a first command that fails for everyone, as long as the package index does not have the package."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|powershell)\n(.*?)```", text, re.S)
    installs = any(re.search(r'pip install .*"?hf-specgen(?!-demo)', block) for block in blocks)
    assert not installs or "git+https://" in text or "#before-the-first-release" in text


@pytest.mark.parametrize(("page", "folder"), [("benchmarks/README.md", "."), ("docs/benchmarks.md", "projected")])
def test_tables_are_those_of_the_records(page: str, folder: str) -> None:
    """Would catch: a record that was renewed without its tables, a figure that was changed by hand."""
    shown = (ROOT / page).read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert shown.strip() == collect(ROOT / "benchmarks" / "results" / folder).strip()


def test_records_are_made_by_the_recorded_commands() -> None:
    """Would catch: tables that the command which is said to make them does not make."""
    made = {f"benchmarks/results/{name}": shlex.split(record.arguments) for name, record in RECORDS.items()}
    suites = [[*arguments, "--out", folder] for folder, arguments in made.items() if arguments[0] == "suite"]
    recorded = (json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("*/report.json"))
    commands = [record["provenance"]["argv"][1:] for record in recorded]
    assert sorted(map(sorted, suites)) == sorted(map(sorted, commands))


def test_durations_are_about_those_of_the_records() -> None:
    """Would catch: minutes that a command or a page announces, and that a record contradicts by a factor of two."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    announced = {f"{name}.json": record.minutes for name, record in RECORDS.items()}
    announced |= {f"{name}/report.json": record.minutes for name, record in RECORDS.items()}
    shown = {
        f"{name}.json": int(minutes)
        for name, minutes in re.findall(r"^\| `([\w-]+)` \|.* (\d+) minutes?\b", page, re.M)
    }
    for name, minutes in [*announced.items(), *shown.items()]:
        if (file := RESULTS / name).exists():
            recorded = json.loads(file.read_text(encoding="utf-8"))["seconds"] / 60
            assert recorded / 2 <= minutes <= 2 * recorded + 1, name


def test_tables_of_commands_name_all_of_them() -> None:
    """Would catch: a command, a suite or a measurement that is documented nowhere."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert all(re.search(rf"^\| .*`{name}`.* \|", page, re.M) for name in (*SUITES, *MICRO))
    group: Any = typer.main.get_command(app)
    for page in ("CHANGELOG.md", "docs/command_line.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not [name for name in group.commands if f"`{name}`" not in text], page


RESULTS = ROOT / "benchmarks" / "results"
STEP_PARTS = ("tokens per step", "step, ms", "target pass, ms", "drafter passes, ms", "rest, ms")
DOMAINS = ("over plain", "math", "code", "edit", "json", "prose")
LINEAR = ("linear, ms", "fastest product, ms", "over one token by linear")
COPIED = [
    ("compilation.md", "| tokens | linear", "linear-products", LINEAR),
    ("compilation.md", "| eager |", "large-target", DOMAINS),
    ("compilation.md", '| `compile="graphs"` | over', "large-target-graphs", ("over default plain", *DOMAINS[1:])),
    ("compilation.md", "| milliseconds of a step |", "large-target-graphs", STEP_PARTS),
    ("strategies/draft_model.md", "| draft's tokenizer |", "other-tokenizer", ("tree of 16", "chain of 4")),
    ("strategies/ngram.md", "| answers |", "trace-replay", ("tokens/forward", "over prompt lookup n=2")),
    ("batches.md", "| at a time |", "packed-passes", ("passes over plain", "time over plain")),
    ("integrations.md", "| grammar |", "grammar-drafts", ("tokens/step without", "tokens/step", "ratio")),
    ("exactness.md", "| temperature |", "block-verification", ("one by one", "jointly", "ratio")),
]
"""Tables with figures of a record: page, first cell of the head, record, its columns, the last ones of the table."""


@pytest.mark.parametrize(("page", "head", "record", "columns"), COPIED, ids=lambda value: str(value)[:30])
def test_copied_figures_are_those_of_the_record(page: str, head: str, record: str, columns: tuple[str, ...]) -> None:
    """Would catch: a page that a new record contradicts."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text[text.index(head) :].split("\n\n")[0].replace("*", "").split("\n")[2:]
    shown = {tuple(cell.strip() for cell in row.split("|")[1:-1][-len(columns) :]) for row in table}
    rows = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))["rows"]
    recorded = [row for row in rows if set(columns) <= row.keys()]
    assert shown <= {tuple(f"{row[column]:.2f}" for column in columns) for row in recorded}


SENTENCES = [
    ("README.md", "a pass over 8 tokens", "as long as", "published/report.json", "cost"),
    ("README.md", "over all\nof them", "[Tables", "published/report.json", "speed"),
    ("README.md", "the worst on record", "at batch 1", "domains/report.json", "speed"),
    ("README.md", "at batch 1 (", "in batches of 4", "batches/report.json", "batch"),
    ("README.md", "23 November 2026): n-grams", "times plain", "large-target.json", "rows"),
    ("docs/integrations.md", "`benchmarks/README.md`: in `generate`", "for 8 and 16", "rollouts.json", "rows"),
    ("README.md", "in the record [rollouts]", "plain's time", "rollouts.json", "rows"),
    ("docs/migration.md", "`assistant_model` gains", "at 300M", "wide/report.json", "speed"),
    ("docs/migration.md", "the same draft gains", ", and", "wide/report.json", "speed"),
    ("docs/migration.md", "at 16M where it has", "`assistant_model` was given", "domains/report.json", "speed"),
    ("docs/batches.md", "decoding 64 prompts takes", "two cores", "generate-many.json", "rows"),
    ("docs/batches.md", "Wall time", "(record `generate-batch`", "generate-batch.json", "rows"),
    ("docs/hardware.md", "and an EAGLE-3 head gains", "On a CPU", "wide/report.json", "speed"),
    ("docs/strategies/ngram.md", "that left", "(record `repeated-prompts`", "repeated-prompts.json", "rows"),
    ("docs/strategies/ngram.md", "groups of 8 took", "of plain's time", "repeated-prompts.json", "rows"),
    ("docs/rl.md", "recorded are", "for 16", "rollouts.json", "rows"),
    ("README.md", "over graphs without drafts", "captures included", "large-target-graphs.json", "rows"),
    ("docs/hardware.md", "lower: eagerly", "with CUDA", "large-target.json", "rows"),
    ("docs/hardware.md", "graphs over no drafts", "compilation.md", "large-target-graphs.json", "rows"),
    ("docs/hardware.md", "| situation |", "\n\n", "projected/report.json", "projected by domain"),
    ("docs/compilation.md", "`generate` has", "of the speed", "large-target.json", "rows"),
    ("docs/compilation.md", "on the H100, and", "on the H200", "large-target-graphs.json", "rows"),
    ("docs/hardware.md", "over all of them n-grams gain", "Projected", "published/report.json", "speed"),
    ("docs/strategies/draft_model.md", "about 1,700 tokens it yields", "without it", "draft-window.json", "rows"),
]
"""Text with figures of a record: page, its first and last words, file, table."""


@pytest.mark.parametrize(("page", "first", "last", "file", "table"), SENTENCES, ids=lambda value: str(value)[:25])
def test_figures_in_sentences_are_those_of_the_record(page: str, first: str, last: str, file: str, table: str) -> None:
    """Would catch: a sentence that a new record contradicts."""
    text = (ROOT / page).read_text(encoding="utf-8").split(first)[1].split(last)[0]
    record = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    values = [value for row in record.get("tables", record)[table] for value in row.values()]
    shown = re.findall(r"\b\d+\.(\d+)\b", text), re.findall(r"\b\d+\.\d+\b", text)
    for digits, figure in zip(*shown, strict=True):
        assert figure in {f"{value:.{len(digits)}f}" for value in values if isinstance(value, float)}, figure


def best_depth(rate: float, latency: Any = None, draft_pass: float = 0.0) -> str:
    """The k with the highest speedup, and that speedup."""
    gains = {k: speedup(rate, k, latency, draft_pass) for k in range(1, 17)}
    best = max(gains, key=gains.__getitem__)
    return f"{best}: {gains[best]:.2f}"


def test_best_depths_are_those_of_the_formula() -> None:
    """Would catch: a table of `docs/hardware.md` that `speedup` contradicts."""
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    for row in text[text.index("| pass of the drafter |") :].split("\n\n")[0].split("\n")[2:]:
        first, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        for rate, cell in zip((0.4, 0.5, 0.6, 0.7, 0.8, 0.9), cells, strict=True):
            assert cell == best_depth(rate, draft_pass=float(first.split()[0]))
    (curve, _), *_ = LatencyModel.load(ROOT / "benchmarks" / "profiles" / "gpu_like.json").buckets
    for row in text[text.index("| acceptance | 1 |") :].split("\n\n")[0].split("\n")[2:]:
        rate, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        for number, cell in enumerate(cells):
            rows = 2**number
            assert cell == best_depth(float(rate), lambda q, rows=rows: curve(rows * q) / curve(rows), 0.05)


def test_navigation_has_four_groups_with_every_page() -> None:
    """Would catch: a page that nobody finds, or one that is listed twice."""
    groups = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]

    def files(entry: Any) -> list[str]:
        parts = entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ()
        return [entry] if isinstance(entry, str) else [file for part in parts for file in files(part)]

    assert [name for group in groups for name in group] == ["Start", "Use", "Understand", "Develop"]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(files(groups)) == sorted(pages)


@pytest.mark.parametrize(
    "word", ["4-bit", "Apple", "MacBook", "MPS", "RTX", "Colab", "Windows", "XPU", "ROCm", "git clone"]
)
def test_words_that_people_search_are_in_the_documentation(word: str) -> None:
    """Would catch: a question of many users that no page answers."""
    assert any(word in page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(("page", "head", "record", "columns"), COPIED, ids=lambda value: str(value)[:30])
def test_copied_figures_name_the_commit_of_their_record(page: str, head: str, record: str, columns: Any) -> None:
    """Would catch: figures of an older version that are shown as those of the present one."""
    commit = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))["provenance"]["commit"]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert commit[:12] in text[: text.index(head)].rsplit("\n## ", 1)[-1], f"commit {commit[:12]} of {record}"


def test_api_reference_has_every_public_name() -> None:
    """Would catch: a public name without a reference."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    described = " ".join(pages).split()
    assert {f"hf_specgen.{name}" for name in hf_specgen.__all__ if name != "__version__"} <= set(described)


def popular_targets() -> list[list[str]]:
    """Rows of the table of targets: names, classes with their result, published heads, whether they load, others."""
    page = (ROOT / "docs" / "my_model.md").read_text(encoding="utf-8").split("## Popular targets")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_popular_targets_have_the_results_of_their_classes() -> None:
    """Would catch: a target that is said to work, while its class is refused, or verifies chains alone."""
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for name, *results in re.findall(r"^\| .*? \| `(\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.M):
        found.setdefault(name, set()).update(result.rpartition(": ")[2].strip() for result in results)
    for drafts in ("trees", "chains"):
        section = re.split(rf"## (?:Draft )?{drafts} and batches\n", page, flags=re.I)[1].split("\n## ")[0]
        found |= {name: {drafts} for name in re.findall(r"`(\w+)`", section)}
    for target, classes, _, heads, *_ in popular_targets():
        names, _, result = classes.partition(": ")
        assert all(found[name] - {""} == {result} for name in re.findall("`(.*?)`", names)), target
        assert names != "none" or heads == "refused"


KINDS = {
    **{"eagle-?3": "EAGLE-3", "p-?eagle": "P-EAGLE", "eagle": "EAGLE", "dflash2": "DFlash2", "dflash": "DFlash"},
    **{"dspark": "DSpark", "domino": "Domino", "jetspec": "JetSpec", "assistant": "assistants", "medusa": "Medusa"},
}
"""By what names of repositories contain, the first one that does: the kind of head."""


def names_on_the_hub(targets: str) -> list[str]:
    """What ids of the targets of a row contain: of "Qwen3 14B, 32B" these are qwen3-14b and qwen3-32b."""
    first, *others = targets.lower().split(", ")
    family = re.sub(r"[ -]?[^ -]*$", "", first)
    names = [first, *(name if name.startswith(family) else f"{family} {name}" for name in others)]
    return [name.replace(" ", "-") for name in names]


def test_published_heads_are_in_the_rows_of_their_targets() -> None:
    """Would catch: a head that `benchmarks formats --hub` loads, while the page says otherwise or does not know it."""
    rows = {name: row for row in popular_targets() for name in names_on_the_hub(row[0])}
    checked = 0
    for head, target in formats.published().items():
        names = [name for name in rows if name in target.lower()]
        if not names:
            continue
        _, _, kinds, heads, *_ = rows[max(names, key=len)]
        matching = (kind for pattern, kind in KINDS.items() if re.search(pattern, head.lower()))
        kind = "MTP layers" if head == target else next(matching)
        assert heads.startswith("loads") and re.search(rf"(?<![\w-]){kind}(?![\w-])", kinds), (head, kind)
        checked += 1
    assert checked > 50


CONCEPT = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", re.M)
PLACE = re.compile(r"`(\w+)` in `([\w/]+\.py)`")


def test_concepts_are_defined_where_the_page_says() -> None:
    """Would catch: a class or file that was renamed or moved, a page of concepts that grows into a glossary."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    rows = [row for row in CONCEPT.findall(page) if row[0] not in ("noun", "---")]
    nouns = [noun for cell, _ in rows for noun in cell.split(", ")]
    assert len(rows) <= 60 and len(nouns) == len(set(nouns))
    for noun, places in rows:
        found = PLACE.findall(places)
        assert ", ".join(f"`{name}` in `{file}`" for name, file in found) == places, noun
        for name, file in found:
            tree = ast.parse((ROOT / "hf_specgen" / file).read_text(encoding="utf-8"))
            assert name in {getattr(node, "name", "") for node in tree.body}, f"{noun}: {name} is not in {file}"


def test_page_of_keywords_names_every_setting() -> None:
    """Would catch: a setting of `generate` or of a strategy that is documented nowhere."""
    page = (ROOT / "docs" / "keywords.md").read_text(encoding="utf-8")
    strategies = [getattr(hf_specgen, name) for name in hf_specgen.__all__ if name.endswith("Candidates")]
    settings = {name for one in strategies for name in inspect.signature(one).parameters if one is not Candidates}
    settings |= Loading.__annotations__.keys()
    settings |= set(KEYWORDS) | set(inspect.signature(inspect.unwrap(GenerationMixin.generate)).parameters)
    settings |= set(GenerationConfig().to_dict()) - INTERNAL
    for name in settings - INPUTS:
        assert re.search(rf"`{name}[ =`]", page), name


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command, without placeholders, comments and what another program prints."""
    text = page.read_text(encoding="utf-8")
    for block, inline in COMMANDS.findall(text):
        for line in (block or inline.replace("\n", " ")).replace("\\\n", " ").split("\n"):
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:  # variables of the environment
                words.pop(0)
            words = [PLACEHOLDERS.get(word, word).split("|")[0] for word in words if "…" not in word]
            if len(words) > 1 and words[0] not in OTHER_PROGRAMS:
                yield words


def read_recipe(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that a recipe would have; it is stopped there."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    module = importlib.import_module(Path(script).stem)
    own = (value for name, value in vars(module).items() if name.endswith("Arguments"))
    settings = next(value for value in own if value.__module__ == module.__name__)
    if "--output" in arguments:  # else some of them were left out on the page
        importlib.import_module("arguments").parse(settings, None, arguments)


def read_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error unless the program of a command understands its arguments."""
    program, *rest = words
    if program == "hf-specgen":
        group: Any = typer.main.get_command(app)
        command = group if rest[0].startswith("-") else group.commands[rest[0]]
        known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
        passed_on = rest[0] in ("serve", "lm-eval")  # to `transformers serve`, to the harness
        rest = rest[: rest.index("--")] if "--" in rest else rest  # the others are a recipe's
        assert passed_on or {word.split("=")[0] for word in rest if word.startswith("--")} <= known
    elif program == "accelerate":
        options = launch_command_parser().parse_args(rest[1:])
        if options.module:
            read_command(["python", "-m", options.training_script, *options.training_script_args], monkeypatch)
        else:
            read_recipe(options.training_script, options.training_script_args, monkeypatch)
    elif program == "python" and words[1].startswith("recipes/"):
        read_recipe(words[1], words[2:], monkeypatch)
    elif words[:2] == ["python", "-m"]:
        if words[2] == "hf_specgen.cli":
            read_command(["hf-specgen", *words[3:]], monkeypatch)
        elif words[2] == "benchmarks" and "--help" not in words:
            commands: Any = typer.main.get_command(importlib.import_module("benchmarks.__main__").app)
            commands.commands[words[3]].make_context(words[3], words[4:])
        elif "--help" not in words:
            module = importlib.import_module(words[2])
            if hasattr(module, "__path__"):
                importlib.import_module(f"{words[2]}.__main__").make_parser().parse_args(words[3:])
            else:
                assert not words[3:], "no options"
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"\[(.*?)\]", " ".join(rest)):
            assert set(extra.split(",")) <= set(extras)
    elif program == "pytest":
        options = (ROOT / "tests" / "conftest.py").read_text()
        for word in rest:
            assert not word.startswith("--") or f'"{word}"' in options
            assert not word.startswith("tests/") or (ROOT / word).exists()
    else:
        raise AssertionError(f"no test reads {program!r}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a command with an option, a file, an extra or a make target that is gone."""
    monkeypatch.chdir(ROOT)
    for words in commands(page) if page.name != "changelog.md" else ():
        try:
            read_command(words, monkeypatch)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}: {error}") from error


# The reference implementation in `docs/how_it_works.md` generates the tokens of plain `generate`, and so do we

PROMPT = "def add(x, y):\n    return x + y\n\ndef add(x, y):"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50}
TOKENS = 12
EAGLE_HEAD = BENCHMARK_ASSETS / "eagle3-head"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The names that the document's first and third block define."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    loop, _, loop_with_head, *_ = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict[str, Any] = {}
    for block, most_lines in ((loop, 62), (loop_with_head, 93)):
        assert block.count("\n") <= most_lines, "a reference that is no longer short"
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def draft() -> Any:
    """The bundled draft model in float32."""
    return AutoModelForCausalLM.from_pretrained(DRAFT_LM, dtype=torch.float32)


@pytest.mark.parametrize(("strategy", "sampled"), [("n-grams", True), ("draft model", False)])
def test_reference_loop_gives_the_tokens_of_generate(
    reference: Any, reference_model: Any, draft: Any, tokenizer: Any, strategy: str, sampled: bool
) -> None:
    """Would catch: a published algorithm that is not lossless, or a loop of ours that differs from it."""
    target, inputs = reference_model, tokenizer(PROMPT, return_tensors="pt")
    settings = SAMPLING if sampled else {}
    warpers = [transformers.TemperatureLogitsWarper(0.8), transformers.TopKLogitsWarper(50)]
    processors = LogitsProcessorList(warpers if sampled else [])
    if strategy == "n-grams":
        propose, candidates = reference["prompt_lookup"], NgramCandidates(k=5)
    else:
        propose, candidates = reference["draft_with"](draft), DraftModelCandidates(draft, k=5)
    more = {"do_sample": sampled, "processors": processors, "end_tokens": (target.generation_config.eos_token_id,)}
    torch.manual_seed(3)
    with recorded_inputs(target) as passes:
        ours = reference["reference_loop"](target, inputs["input_ids"], propose, TOKENS, **more)
    state = torch.get_rng_state()
    for options in ({}, {"candidate_generator": candidates}):
        torch.manual_seed(3)
        assert torch.equal(ours, target.generate(**inputs, max_new_tokens=TOKENS, **settings, **options))
        assert torch.equal(state, torch.get_rng_state())
    assert len(passes) < ours.shape[1] - inputs["input_ids"].shape[1], "no draft token was accepted"


def paths_of(tree: Any) -> list[tuple[int, ...]]:
    """The nodes of the tree of one row, each as the path of tokens that leads to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_lists()[0], tree.parents[0], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def with_recorded_steps(candidates: Any) -> tuple[Any, list[tuple[Any, int]]]:
    """A strategy, and the list to which it adds the tree of each step and how many of its tokens were accepted."""
    steps: list[tuple[Any, int]] = []

    def record(session: Any) -> None:
        draft = session.draft
        observe = session.observe
        trees: list[Any] = []

        def recorded_draft(max_depths: Any) -> Any:
            trees.append(draft(max_depths))
            return trees[-1]

        def recorded_observe(result: Any) -> None:
            steps.append((paths_of(trees[-1]), result.accepted[0]))
            observe(result)

        session.draft = recorded_draft
        session.observe = recorded_observe

    return with_sessions(candidates, record), steps


@pytest.mark.parametrize(("tree", "sampled"), [(None, False), (8, True)], ids=["chains", "trees"])
def test_reference_loop_with_head_makes_the_drafts_of_the_package(
    reference: Any, reference_model: Any, tokenizer: Any, tree: int | None, sampled: bool
) -> None:
    """Would catch: a head whose features, positions or cache are off by one, a tree without its best nodes."""
    target, inputs = reference_model, tokenizer(PROMPT, return_tensors="pt")
    head = load_head(EAGLE_HEAD).float()
    settings = SAMPLING if sampled else {}
    warpers = [transformers.TemperatureLogitsWarper(0.8), transformers.TopKLogitsWarper(50)]
    more = {"do_sample": sampled, "processors": LogitsProcessorList(warpers if sampled else [])}
    more["end_tokens"] = (target.generation_config.eos_token_id,)
    torch.manual_seed(3)
    more["children"] = 1 if tree is None else 8
    ours, passes = reference["reference_loop_with_head"](target, head, inputs["input_ids"], 2 * TOKENS, **more)
    state = torch.get_rng_state()
    candidates, steps = with_recorded_steps(EagleCandidates(head, k=4, tree=tree, policy=FixedDepth()))
    for options in ({}, {"candidate_generator": candidates}):
        torch.manual_seed(3)
        assert torch.equal(ours, target.generate(**inputs, max_new_tokens=2 * TOKENS, **settings, **options))
        assert torch.equal(state, torch.get_rng_state())
    assert passes[1:] == steps, "the first pass is the prefill"
    assert sum(accepted for _, accepted in steps) > 4
