"""The wheel, without the clone: what it contains; the README's first example and its command run from it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.paths import DRAFT_LM, REFERENCE_LM, ROOT

pytestmark = pytest.mark.slow
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
VERSION = "7.8.9"
MODEL = re.compile(r'name = "[^"]+"')
"""The model of an example: replaced by the bundled one, since tests load nothing from the Hub."""
FAST = "--rounds 1 --max-new-tokens 4 --prompt a"
MODELS = {"org/target": str(REFERENCE_LM), "org/small-model": str(DRAFT_LM)}
CONSOLE_SCRIPT = """
import sys
from importlib.metadata import distribution

[script] = distribution("hf-specgen").entry_points
sys.argv[0] = script.name
sys.exit(script.load()())
"""
"""What the script does that pip writes for the wheel's entry point."""


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel that is built from the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # not the clone itself, whose build folder may hold files of earlier builds
    shutil.copytree(ROOT / "hf_specgen", source / "hf_specgen", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": VERSION}  # in place of a tag
    subprocess.run([*build, folder, source], check=True, capture_output=True, text=True, env=environment)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


def test_wheel_contains_the_package_and_its_type_marker(site_packages: Path) -> None:
    """Would catch: a folder without `__init__.py`, tests or benchmarks in the wheel, a missing py.typed."""
    packaged = {path.relative_to(site_packages) for path in site_packages.glob("hf_specgen/**/*.py")}
    assert packaged == {path.relative_to(ROOT) for path in (ROOT / "hf_specgen").rglob("*.py")}
    assert (site_packages / "hf_specgen" / "py.typed").is_file()
    assert {path.name for path in site_packages.iterdir() if not path.name.endswith(".dist-info")} == {"hf_specgen"}


def test_wheel_has_the_version_of_the_tag_and_a_description_with_absolute_links(site_packages: Path) -> None:
    """Would catch: a version that is written down somewhere, a page of the package index whose links lead nowhere."""
    [metadata] = site_packages.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("#")]
    assert f"\nVersion: {VERSION}\n" in text and "\nLicense-Expression: Apache-2.0\n" in text
    assert len(links) > 30 and all(link.startswith("https://") for link in links)
    pages = [link.split("readthedocs.io/")[1].partition("#")[0] for link in links if "readthedocs.io/" in link]
    assert all((ROOT / "docs" / f"{page.rstrip('/')}.md").is_file() or page.endswith("strategies/") for page in pages)


def test_first_example_and_command_of_the_readme_run_from_the_wheel(site_packages: Path, tmp_path: Path) -> None:
    """One after the other in a new process, whose folder is another one.

    Would catch: an example, a command or an import of the package that needs a file of the clone, or benchmarks; an
    entry point that names no function.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks, commands = (
        re.findall(r"```python\n(.*?)```", readme, flags=re.S),
        re.findall(r"^hf-specgen (.*)$", readme, re.M),
    )
    code = MODEL.sub(f'name = "{REFERENCE_LM}"', blocks[0]).replace("max_new_tokens=64", "max_new_tokens=8")
    code += f"\nimport hf_specgen\nassert hf_specgen.__file__.startswith({str(site_packages)!r})\n"
    environment = {"PYTHONPATH": str(site_packages), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    [command] = commands
    arguments = [*(MODELS.get(word, word) for word in shlex.split(command)), *FAST.split()]
    process = [sys.executable, "-c", code + CONSOLE_SCRIPT, *arguments]
    run = subprocess.run(process, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "model.generate(**inputs" in run.stdout
