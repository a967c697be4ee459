"""Latency models: interpolation, files, and the assumed GPU profile."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.depth import Bucket, CostCurve, DraftLatency, LatencyModel
from hf_specgen.depth.latency import FORMAT

GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
positive = st.floats(1e-6, 1e3)


@st.composite
def models(draw: st.DrawFn) -> LatencyModel:
    buckets = []
    for _ in range(draw(st.integers(1, 4))):
        queries = sorted({1, *draw(st.lists(st.integers(2, 300), max_size=5))})
        seconds = draw(st.lists(positive, min_size=len(queries), max_size=len(queries)))
        curve = CostCurve(tuple(queries), tuple(seconds), draw(st.integers(1, 10**5)), draw(st.integers(1, 64)))
        widths = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
        times = draw(st.lists(st.floats(0, 10), min_size=len(widths), max_size=len(widths)))
        draft = DraftLatency(tuple(widths), tuple(times), draw(st.floats(0, 1)))
        buckets.append(Bucket(curve, {"draft_model": draft}))
    return LatencyModel(tuple(buckets), "draft_model")


@settings(max_examples=100, deadline=None)
@given(models())
def test_model_survives_a_file(model: LatencyModel) -> None:
    with TemporaryDirectory() as folder:
        model.save(Path(folder) / "latency.json")
        assert LatencyModel.load(Path(folder) / "latency.json").select("draft_model") == model


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 100), st.integers(1, 10**5), st.integers(1, 5000))
def test_model_times_are_positive_and_do_not_fall_beyond_the_last_point(
    model: LatencyModel, rows: int, context: int, tokens: int
) -> None:
    step = model.at(rows, context)
    last = step.target.queries[-1] * step.target.batch
    beyond = [step.target.seconds_of(size) for size in (last, last + tokens, last + 2.0 * tokens)]
    assert step.target.seconds_of(tokens) > 0
    assert (np.diff(beyond) >= -1e-9).all()
    assert step.drafter.draft([1, tokens]) >= step.drafter.overhead


@pytest.mark.parametrize(
    ("rows", "context", "batch"), [(1, 100, 1), (2, 100, 1), (5, 300, 16), (16, 512, 16), (100, 9000, 16)]
)
def test_model_uses_the_nearest_bucket(rows: int, context: int, batch: int) -> None:
    curves = [CostCurve((1, 2), (1.0, 2.0), context=512, batch=batch) for batch in (1, 16)]
    assert LatencyModel.from_curves(*curves).at(rows, context).target.batch == batch


def test_model_rows_count_as_tokens() -> None:
    """A pass over 4 tokens in each of 4 rows takes as long as one over 16 tokens in one row."""
    step = LatencyModel.from_curves(CostCurve((1, 16), (1.0, 2.5), context=512, batch=1)).at(4, 100)
    assert step.target.seconds_of(4 * 4) == 2.5


def test_selecting_a_drafter_that_the_profile_lacks_raises() -> None:
    model = LatencyModel.load(GPU_LIKE)
    with pytest.raises(ValueError, match=r"no drafter 'crystal_ball'; it has .*'draft_model'"):
        model.select("crystal_ball")
    free = model.select("crystal_ball", negligible_draft_cost=True).at(1, 1).drafter
    assert free.draft([1, 1, 1]) == 0.0


CURVE = {"queries": [1, 2], "seconds": [1.0, 1.5], "context": 1, "batch": 1}
ANY = {"tokens": [1], "seconds": [0.0], "overhead": 0.0, "prefill": 0.0}
VALID: dict[str, Any] = {
    "format": FORMAT, "slices": [{"target": CURVE, "drafters": {"any": ANY}}]
}  # fmt: skip


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(VALID))
    place: Any = data
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {},
        {"format": VALID["format"]},
        _changed("format", "something else"),
        _changed("slices", []),
        _changed("slices", [VALID["slices"][0]] * 1000),
        _changed("slices.0.target.queries", [2, 1]),
        _changed("slices.0.target.queries", ["a", "b"]),
        _changed("slices.0.target.seconds", [1.0]),
        _changed("slices.0.target.seconds", [1.0, float("nan")]),
        _changed("slices.0.target.seconds", [1.0, -1.0]),
        _changed("slices.0.target.batch", 0),
        _changed("slices.0.target.context", None),
        _changed("slices.0.drafters", None),
        _changed("slices.0.drafters.any.seconds", [float("inf")]),
        _changed("slices.0.drafters.any.overhead", "much"),
        _changed("slices.0.drafters.any", {"tokens": [1], "seconds": [1.0]}),
    ],
)
def test_model_of_invalid_data_raises_a_value_error(data: Any, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="not a latency file"):
        LatencyModel.load(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 2), (1.0,)), "seconds for each"),
        (((2, 3), (1.0, 1.0)), "increase from 1"),
        (((1, 1), (1.0, 1.0)), "increasing numbers"),
        (((1, 2), (1.0, 0.0)), "positive"),
    ],
)
def test_cost_curve_of_bad_points_raises(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(*arguments, context=256, batch=1)


def test_pass_is_padded_to_a_larger_size_only_where_that_is_faster() -> None:
    curve = CostCurve((1, 2, 4, 8, 24), (1.0, 2.0, 1.8, 1.6, 2.2), context=64, batch=1)
    assert [curve.padded(q) for q in (1, 2, 3, 5, 8, 9, 24, 30)] == [1, 8, 8, 8, 8, 9, 24, 30]
    assert [curve(q) for q in (1, 2, 3, 7)] == [1.0, 1.6, 1.6, 1.6]
    increasing = CostCurve((1, 4, 16), (1.0, 1.2, 2.0), context=64, batch=1)
    assert [increasing.padded(q) for q in range(1, 20)] == list(range(1, 20))


def test_shared_latency_is_the_part_of_one_row() -> None:
    """Would catch: rows of `generate_many` that take their passes for free, or each for the whole."""
    curve = CostCurve((1, 8, 64), (1.0, 1.6, 7.0), context=256, batch=1)
    other = CostCurve((1, 64), (9.0, 9.0), context=256, batch=64)
    shared = LatencyModel.from_curves(curve, other, draft_token=0.1).shared(4).at(1, 100)
    assert [shared.target(q) for q in (1, 8)] == pytest.approx([curve(4) / 4, curve(32) / 4])
    assert shared.drafter.draft([1]) == 0.1, "rows draft one after the other"
