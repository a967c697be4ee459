"""How a case asks for speculation: as an argument, through `custom_generate`, or attached to the model."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hf_specgen import SpeculationMonitor, attached, speculate
from tests.fuzz import strategies
from tests.fuzz.cases import Case

SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "no_memory": lambda: {"memory": False},
    "monitor": lambda: {"monitor": SpeculationMonitor(prometheus=False)},
    "pack_weights": lambda: {"pack_weights": True},
    "not_compiled": lambda: {"compile": False},
}


def call_settings(case: Case) -> dict[str, Any]:
    """Verification, policy and further settings of a call, where they are not the defaults."""
    call: dict[str, Any] = {} if case.verification == "exact" else {"verification": case.verification}
    call |= {name: value for setting in case.settings for name, value in SETTINGS[setting]().items()}
    policy = strategies.call_policy(case)
    if policy is not None:
        call["policy"] = policy
    return call


@contextlib.contextmanager
def attached_to(case: Case, model: Any, candidates: Any) -> Iterator[None]:
    """The strategy is attached to the model; in every second case calls that cannot speculate are plain.

    Not where a fault is raised: plain `generate` does not put back the caller's cache.
    """
    strict = case.seed % 2 == 0 or case.fault != ""
    with attached(model, candidates, strict=strict, **call_settings(case)):
        yield


def speculation_arguments(case: Case, candidates: Any, streamer: Any) -> dict[str, Any]:
    """The arguments that ask for speculation."""
    call = call_settings(case)
    if case.entry == "keyword":
        return {"candidate_generator": candidates, **call}
    if case.entry == "custom_streamer":
        call["streamer"] = streamer
    return {"custom_generate": speculate(candidates, **call)}
