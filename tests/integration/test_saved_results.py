"""Self-checks and latencies of earlier processes, in the folder of `HF_SPECGEN_CACHE`."""

import os
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_specgen import FixedDepth, NgramCandidates, saved_results
from hf_specgen.depth.step_times import CurveEstimator, CurvePosterior
from tests.helpers import fresh_model, prompts
from tests.helpers.depth import depth_call
from tests.helpers.processes import run_in_ranks

PASSES_OF_SELF_CHECK = 6
TOKENS = 24


class CountedPasses(TorchFunctionMode):
    """Counts embeddings of tokens, of which every pass has one."""

    passes = 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), kwargs: Any = None) -> Any:
        self.passes += function is torch.nn.functional.embedding
        return function(*arguments, **(kwargs or {}))


def first_call(folder: str | None, seed: int = 0, hooked: bool = False) -> int:
    """In a new process: the passes of a model's first call, whose drafts are empty."""
    if folder is not None:
        os.environ[saved_results.FOLDER] = folder
    torch.manual_seed(seed)
    model = fresh_model("llama")
    with torch.no_grad():
        model.lm_head.weight += seed
    if hooked:
        model.register_forward_hook(lambda module, inputs, output: None)
    strategy = NgramCandidates(policy=FixedDepth(0))
    with CountedPasses() as counted:
        model.generate(**prompts(1), max_new_tokens=TOKENS, do_sample=False, candidate_generator=strategy)
    return counted.passes


def adaptive_call(folder: str) -> list[int]:
    """In a new process: the sizes that are timed before the first call, and after it."""
    os.environ[saved_results.FOLDER] = folder
    model = fresh_model("llama")
    call = depth_call(model=model)
    before = CurveEstimator.of_earlier_calls(call, 1)
    model.generate(**prompts(1), max_new_tokens=TOKENS, do_sample=False, candidate_generator=NgramCandidates())
    return [] if before is None else sorted(before.posterior.counts)


def test_self_check_of_an_earlier_process_counts(tmp_path: Path) -> None:
    """Would catch: a check in every process, or one that counts for other weights or a model with hooks."""
    folder = str(tmp_path)
    [checked] = run_in_ranks(first_call, [(folder,)])
    assert [path.name[:11] for path in tmp_path.iterdir()] == ["self-check-"]
    [again, unasked] = [run_in_ranks(first_call, [(where,)])[0] for where in (folder, None)]
    assert unasked == checked == again + PASSES_OF_SELF_CHECK
    assert run_in_ranks(first_call, [(folder, 1)]) == [checked], "other weights"
    # With a hook also a plain pass, and a prefill and a pass as long as a draft.
    assert run_in_ranks(first_call, [(folder, 0, True)]) == [checked + 3], "a hook"
    assert len(list(tmp_path.iterdir())) == 2


def test_latencies_of_an_earlier_process_are_used(tmp_path: Path) -> None:
    """Would catch: a plain first step in every process; a file of a step that was not timed often enough."""
    assert run_in_ranks(adaptive_call, [(str(tmp_path),)]) == [[]]
    [sizes] = run_in_ranks(adaptive_call, [(str(tmp_path),)])
    assert sizes and sizes[0] == 1


SAVED = CurvePosterior.of_plain_step(1.0, 8, 1).with_step(8, 1.5).with_step(8, 1.5).saved()
INFINITE, NAN = float("inf"), float("nan")


def _changed(name: str, value: Any) -> dict[str, Any]:
    """`SAVED` with another first number in an array."""
    array = np.array(SAVED[name])
    array.flat[0] = value
    return {**SAVED, name: array.tolist()}


@pytest.mark.parametrize(
    "saved",
    [None, [], {}, *({**SAVED, "context": value} for value in (INFINITE, 0, "x")),
     *({**SAVED, "counts": value} for value in ([1], {}, {"8": 3}, {"1": 0}, {"1": 3, "17": 1}, {"1": 3, "x": 1})),
     *({**SAVED, name: value} for name in ("means", "covariance") for value in (1.0, [], [[1.0]], ["x"], None)),
     *(_changed(name, value) for name in ("means", "covariance") for value in (NAN, INFINITE, 1e300, -1e300)),
     _changed("covariance", -0.1)],
)  # fmt: skip
def test_latencies_that_cannot_be_used_count_as_absent(saved: Any) -> None:
    """Would catch: an exception in `generate`, or a curve without T(1), because of a damaged file."""
    assert CurvePosterior.from_saved(SAVED) is not None
    assert CurvePosterior.from_saved(saved) is None


def test_text_of_a_key_describes_it_or_is_refused() -> None:
    """Would catch: equal keys of different functions, whose results would be mixed up."""
    key = (1, 1.5, "a", None, torch.float32, torch.device("cpu"), torch.nn.Linear, weakref.ref(torch.nn.Linear.forward))
    text = saved_results.stable_text(key)
    assert text is not None and "torch.nn.modules.linear.Linear.forward" in text
    assert saved_results.stable_text(frozenset((1, "b"))) == saved_results.stable_text(frozenset(("b", 1)))
    for value in (lambda: None, object(), first_call, CountedPasses, weakref.ref(first_call), [1]):
        assert saved_results.stable_text((1, value)) is None


def test_unfinished_files_are_removed(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: a part of a file for every process that runs while it cannot be finished, as on a full disk."""
    monkeypatch.setenv(saved_results.FOLDER, str(tmp_path))
    saved_results.save("kind", "key", 1)
    [file] = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="cannot be written"):
        saved_results.save("kind", "key", 1)
    assert list(tmp_path.iterdir()) == [file]


def test_files_that_cannot_be_read_or_written_do_not_stop_a_call(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: `generate` that fails because of a folder, or a reason that is given in every call."""
    monkeypatch.setenv(saved_results.FOLDER, str(tmp_path))
    saved_results.save("kind", "key", {"a": 1})
    assert saved_results.load("kind", "key") == {"a": 1} and saved_results.load("kind", "other") is None
    [file] = tmp_path.iterdir()
    file.write_text('{"a"')
    assert saved_results.load("kind", "key") is None
    monkeypatch.setenv(saved_results.FOLDER, str(file))
    with pytest.warns(UserWarning, match="HF_SPECGEN_CACHE=.* cannot be written .*; name another folder, or unset it"):
        saved_results.save("kind", "key", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved_results.save("kind", "key", 1)
    monkeypatch.setenv(saved_results.FOLDER, str(tmp_path) + "/a" * 2000)
    with pytest.warns(UserWarning, match="HF_SPECGEN_CACHE=.* cannot be written .*; name another folder, or unset it"):
        saved_results.save("kind", "key", 1)
    monkeypatch.setenv(saved_results.FOLDER, "~no-such-user/cache")
    with pytest.warns(UserWarning, match="HF_SPECGEN_CACHE=.* cannot be used .*; name another folder, or unset it"):
        saved_results.save("kind", "key", 1)
    monkeypatch.delenv(saved_results.FOLDER)
    saved_results.save("kind", "key", 1)
    assert saved_results.load("kind", "key") is None and list(tmp_path.iterdir()) == [file]
