"""Calls of an attached model: inner calls, settings of one call, threads, functions that hold the model."""

import threading
from typing import Any

import pytest
import torch
from datasets.fingerprint import Hasher

import hf_specgen
from hf_specgen import NgramCandidates, Schedule, SpeculationMonitor
from tests.helpers import fresh_model, prompts

NEW = 16


@pytest.fixture
def model() -> Any:
    return fresh_model("llama", num_hidden_layers=2)


def generate(model: Any, **arguments: Any) -> Any:
    return model.generate(**prompts(1), max_new_tokens=NEW, **arguments)


@pytest.mark.parametrize("how", ["attached", "keyword"])
def test_token_healing_same_tokens(reference_model: Any, tokenizer: Any, how: str) -> None:
    """Would catch: a tokenizer that does not reach `generate`, or a prompt that is healed twice."""
    inputs = tokenizer("def add(x, y):\n    return x + y\n\ndef ad", return_tensors="pt")
    arguments = {"max_new_tokens": NEW, "do_sample": False, "token_healing": True, "tokenizer": tokenizer}
    plain = reference_model.generate(**inputs, **arguments)
    if how == "keyword":
        ids = reference_model.generate(**inputs, **arguments, candidate_generator="auto")
    else:
        with hf_specgen.attached(reference_model, strict=True) as totals:
            ids = reference_model.generate(**inputs, **arguments)
        assert totals.calls == 1
    assert torch.equal(ids, plain)


def test_fingerprint_of_a_function_over_an_attached_model_is_stable(model: Any) -> None:
    """Would catch: `datasets.map` that never finds its cache, since counters are part of the fingerprint."""
    hf_specgen.attach(model, NgramCandidates(k=4))

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"ids": model.generate(row["ids"])}

    before = Hasher.hash(answer)
    generate(model)
    assert Hasher.hash(answer) == before


def test_inner_calls_of_an_early_exit_are_plain_and_counted_once(model: Any) -> None:
    hf_specgen.attach(model, NgramCandidates())
    expected = generate(model, candidate_generator=None)
    with pytest.warns(UserWarning, match="without speculation"):
        assert torch.equal(generate(model, assistant_early_exit=1), expected)
    totals = hf_specgen.statistics(model)
    assert totals.calls == 0 and list(totals.plain_calls.values()) == [1]


@pytest.mark.parametrize("name", ["verification", "policy", "monitor", "memory"])
def test_setting_of_one_call_replaces_that_of_attach(model: Any, name: str) -> None:
    """Would catch: a keyword of `speculate` that `generate` rejects, or that stays for the next call."""
    monitor = SpeculationMonitor(prometheus=False)
    given = {"verification": "rejection", "policy": Schedule({1: 0}), "monitor": monitor, "memory": False}[name]
    hf_specgen.attach(model, NgramCandidates(k=4), strict=True)
    expected = generate(model, candidate_generator=None)
    assert torch.equal(generate(model, **{name: given}), expected)
    drafted = hf_specgen.statistics(model).drafted
    assert (drafted == 0) == (name == "policy") and monitor.calls == (name == "monitor")
    generate(model)
    assert hf_specgen.statistics(model).drafted > drafted and monitor.calls == (name == "monitor")


def test_overlapping_blocks_of_two_threads_leave_the_model_detached(model: Any) -> None:
    """The first block ends before the second. Would catch: a model that stays attached, calls counted elsewhere."""
    entered, left, totals = threading.Event(), threading.Event(), {}

    def second() -> None:
        with hf_specgen.attached(model, NgramCandidates(k=2)) as counted:
            entered.set()
            assert left.wait(30)
            generate(model)
            totals["second"] = counted

    thread = threading.Thread(target=second)
    with hf_specgen.attached(model, NgramCandidates(k=4)) as counted:
        thread.start()
        assert entered.wait(30)
        generate(model)
        generate(model)
    left.set()
    thread.join()
    assert (counted.calls, totals["second"].calls) == (2, 1)
    with pytest.raises(ValueError, match="no strategy is attached"):
        hf_specgen.statistics(model)
