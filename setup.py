"""The long description of the package index: README.md with absolute links; all else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]


def absolute(link: re.Match[str]) -> str:
    """A link to a page of the documentation leads to the site, an image to its file, any other to the repository."""
    path, section = link.groups(default="")
    if path.startswith("docs/") and path.endswith(".md"):
        page = path.removeprefix("docs/").removesuffix(".md").removesuffix("index")
        return f"]({URLS['Documentation']}{page.rstrip('/')}/{section})"
    kind = "raw" if path.endswith((".png", ".svg")) else "blob"
    return f"]({URLS['Repository']}/{kind}/main/{path}{section})"


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"\]\((?!https?://)([^)#]+)(#[^)]*)?\)", absolute, readme),
    long_description_content_type="text/markdown",
)
