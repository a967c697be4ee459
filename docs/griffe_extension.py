"""Griffe extension of the API reference: inherited docstrings, arguments described together, examples as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
"""Several arguments with one description."""


class ApiReference(griffe.Extension):
    """Completes the docstrings of all classes before they are rendered."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Change the docstrings of a package that has been read."""
        for module in _modules(pkg):
            _complete(module)
            for one in module.classes.values():
                if not one.is_alias:
                    _inherit_docstrings(one)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    own = [part for part in module.modules.values() if not part.is_alias]
    return [module, *(inner for part in own for inner in _modules(part))]


def _complete(owner: griffe.Object) -> None:
    """Rename `Example:` to `Examples:`, which is rendered as code; give every argument a description of its own."""
    if owner.docstring is not None:
        text = re.sub(r"^Example:$", "Examples:", owner.docstring.value, flags=re.MULTILINE)
        owner.docstring.value = TOGETHER.sub(_described_alone, text)
    for member in owner.members.values():
        if not member.is_alias and not member.is_module:
            _complete(member)


def _described_alone(found: re.Match[str]) -> str:
    indentation, names, description = found.groups()
    return "\n".join(f"{indentation}{name}: {description}" for name in names.split(", "))


def _inherit_docstrings(one: griffe.Class) -> None:
    """Give public methods and attributes without a docstring that of the first base class which has one."""
    for name, member in one.members.items():
        if name.startswith("_") or member.is_alias or member.docstring is not None:
            continue
        inherited = (base.members[name].docstring for base in one.mro() if name in base.members)
        member.docstring = next((docstring for docstring in inherited if docstring is not None), None)
