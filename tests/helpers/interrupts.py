"""Ctrl-C between two statements of a function."""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def interrupted_at_each_line(function: Any, work: Callable[[], Any]) -> Iterator[int]:
    """Run `work` once for each line of a function, with Ctrl-C before it; yields the line afterwards.

    A line that is reached several times is interrupted the first time, and in another run the second time. Lines from
    `finally:` on are left out: an interrupt there ends what restores the state.
    """
    code = inspect.unwrap(function).__code__
    lines, first = inspect.getsourcelines(code)
    end = next((number for number, line in enumerate(lines) if line.strip() == "finally:"), len(lines))
    for line in sorted({number for *_, number in code.co_lines() if number and first < number < first + end}):
        # A `with` is reached again before it ends, where Python itself takes no signal.
        is_with = lines[line - first].strip().startswith("with ")
        for occurrence in (1,) if is_with else (1, 2):
            if not _is_interrupted(work, code, line, occurrence):
                break
            yield line


def _is_interrupted(work: Callable[[], Any], code: Any, line: int, occurrence: int) -> bool:
    reached = 0

    def in_function(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal reached
        reached += event == "line" and frame.f_lineno == line
        if reached == occurrence:
            sys.settrace(None)
            raise KeyboardInterrupt
        return in_function

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: in_function if frame.f_code is code else None)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
