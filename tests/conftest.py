"""Command-line options, and markers and order of the tests by folder; the fixtures are in `tests.helpers.fixtures`."""

import gc
import os
from collections import defaultdict
from functools import cache
from pathlib import Path
from zlib import crc32

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

TESTS = Path(__file__).parent
TIERS = ("unit", "integration", "integrations", "slow")
OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""Python looks for cycles after every 700 new objects, while tests make millions that need none."""
gc.disable()  # while everything is imported and collected; see `pytest_collection_finish`
LONGEST_FIRST = ("slow", "integrations", "integration")


def pytest_collection(session: pytest.Session) -> None:
    """Load fixtures and PyTorch where tests run: with several workers, not in the process that starts them."""
    if hasattr(session.config, "workerinput") or not getattr(session.config.option, "tx", None):
        session.config.pluginmanager.import_plugin("tests.helpers.fixtures")
        if session.config.option.part > 1:
            from hypothesis import settings

            examples = settings.default.max_examples // session.config.option.part
            settings.register_profile("part", settings.default, max_examples=examples)
            settings.load_profile("part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with the name of its folder (doctests: unit); folders with long files come first."""
    if config.option.part > 1:
        left_out = _left_out(items, config.option.part)
        config.hook.pytest_deselected(items=left_out)
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.unit)
        for tier in _tiers(item.path):
            item.add_marker(getattr(pytest.mark, tier))
    items.sort(key=lambda item: next((place for place, tier in enumerate(LONGEST_FIRST) if tier in item.keywords), 9))


def _left_out(items: list[pytest.Item], part: int) -> list[pytest.Item]:
    """The cases that `--part` leaves out: always the same ones, by their names alone. Every test keeps one."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    left_out: list[pytest.Item] = []
    for cases in tests.values():
        kept = [case for case in cases if not crc32(case.nodeid.encode()) % part] or cases[:1]
        left_out += [case for case in cases if case not in kept]
    return left_out


@cache
def _tiers(path: Path) -> list[str]:
    """The folders of `TIERS` that contain a file."""
    return [tier for tier in TIERS if TESTS / tier in path.parents]


def pytest_collection_finish() -> None:
    """Exempt all that is loaded by now from garbage collection, which would traverse it again and again."""
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_specgen")
    # pytest has a flag of this name that lists its own fixtures; here only its alias --funcargs does.
    group._arggroup.conflict_handler = "resolve"
    group.addoption(
        "--fixtures",
        dest="head_fixtures",
        metavar="DIR",
        type=Path,
        default=TESTS / "assets" / "fixtures",
        help="folder of draft-head fixtures, with their targets in DIR/targets",
    )
    group.addoption(
        "--part",
        metavar="N",
        type=int,
        default=1,
        help="of every test one case or generated example in N, and at least one",
    )
    group.addoption("--thread-seconds", type=float, default=5, help="how long the threads of tests/slow run")
