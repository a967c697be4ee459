"""Timing: both sides the same work, chats from the cache, first tokens, memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GenerationConfig

from benchmarks.harness.loading import StrategyError, build
from benchmarks.harness.projection import Projection, latency_for, project
from benchmarks.harness.rounds import measure_round
from benchmarks.harness.variants import PLAIN
from benchmarks.workloads.domains import CATALOGUE, DomainError, load_domain, names_of
from benchmarks.workloads.prompts import first_turns, followups
from hf_specgen import NgramCandidates
from hf_specgen.call import memory
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.depth.latency import Bucket, DraftLatency
from hf_specgen.evaluation.cost import measure_cost_curve
from hf_specgen.evaluation.measure import Variant, first_difference, others_share
from hf_specgen.evaluation.workloads import domain_prompts, encode
from tests.helpers import fresh_model, prompts, tiny_model
from tests.helpers.encoder_decoder import encoder_decoder
from tests.helpers.models import recorded_inputs, width

OURS = Variant("ours", lambda: {"candidate_generator": NgramCandidates(k=4)})
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def test_chat_goes_on_from_its_cache(reference_model, tokenizer) -> None:
    """Both sides write the same two answers, and neither reads the first turn again for the second."""
    turns = ["Write a short story about a fox." * 4, "Now make the fox a crow."]
    first, later = first_turns(tokenizer, turns[:1]), followups(tokenizer, turns)
    with recorded_inputs(reference_model, width) as shapes:
        generation = {"max_new_tokens": 12, **SAMPLED}
        samples = measure_round(reference_model, first, [PLAIN, OURS], generation, 3, followups=later)
    assert torch.equal(samples["plain"].ids, samples["ours"].ids)
    assert samples["plain"].tokens == samples["ours"].tokens > 12
    prompt = first["input_ids"].shape[1]
    read = [length for length in shapes if length >= prompt]
    assert read[0] == prompt and len(read) == 2 and prompt <= read[1] <= prompt + 4  # with draft tokens behind it
    assert len([length for length in shapes if length >= later[0].shape[1]]) == 4  # each turn of each side: one prompt
    ours = samples["ours"].speculation
    assert ours is not None and len(ours.rows) == 2 and ours.emitted == samples["ours"].tokens
    assert "crow" in tokenizer.decode(samples["ours"].ids[0])


def test_answers_of_an_encoder_decoder_are_counted_and_judged() -> None:
    """Would catch: the length of the prompt taken for that of the decoder's start token."""
    model, source = encoder_decoder("t5"), torch.randint(4, 99, (2, 12))
    inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    generation = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    samples = measure_round(model, inputs, [PLAIN, OURS], generation, 0)
    assert all(sample.tokens == 12 for sample in samples.values())
    samples["ours"].ids[1, 3] += 1
    found = first_difference(model, samples["plain"], samples["ours"], generation, 0, inputs)
    assert found is not None and (found["row"], found["position"]) == (1, 3)
    assert found["decided by"] == "logits" and found["margin"] > 0


@pytest.mark.parametrize("given", ["argument", "config", "model", "none"])
def test_tokens_are_counted_up_to_the_eos_tokens_of_the_call(given: str) -> None:
    """Would catch: padding of ended rows, or tokens after an EOS of the model that the call replaces, miscounted."""
    model, batch = fresh_model("llama"), prompts(2)
    plain = {"max_new_tokens": 12, "do_sample": False}
    texts = model.generate(**batch, **plain, eos_token_id=None)[:, batch["input_ids"].shape[1] :].tolist()
    ends = [texts[0][3], texts[1][5]]
    model.generation_config.eos_token_id = ends if given == "model" else texts[0][0]
    generations: dict[str, dict[str, Any]] = {
        "argument": {**plain, "eos_token_id": ends},
        "config": {"generation_config": GenerationConfig(eos_token_id=ends, **plain)},
        "model": plain,
        "none": {**plain, "eos_token_id": None},
    }
    expected = 24
    if given != "none":
        expected = sum(1 + min(row.index(end) for end in ends if end in row) for row in texts)
    samples = measure_round(model, batch, [PLAIN, OURS], generations[given], 0)
    assert [sample.tokens for sample in samples.values()] == [expected, expected]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("draft", "draft needs a file or id for this model: draft="),
        ("draft=benchmarks/assets/draft-lm", "benchmarks/assets/draft-lm: "),
        ("layerskip=./no-such-folder", "no-such-folder"),
    ],
)
def test_strategy_that_does_not_fit_the_model_is_refused(strategy: str, message: str) -> None:
    """The embedded draft (8,192 tokens) cannot draft for a target of 99."""
    with pytest.raises(StrategyError, match=message):
        build([strategy], [], tiny_model("llama"))


# The metric of evaluate, on cases that the field agrees on

evaluate: Any = pytest.importorskip("evaluate", reason="the metric needs evaluate")
THREE_DRAFTS = {"drafted": [3, 3, 2], "accepted": [3, 1, 0]}


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As a user loads it; `evaluate` keeps its files below the user's home otherwise."""
    from tests.helpers.paths import ROOT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path_factory.mktemp("metrics")))
        yield evaluate.load(str(ROOT / "benchmarks" / "acceptance.py"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (THREE_DRAFTS, {"drafts": 3, "drafted": 8, "accepted": 4, "acceptance_rate": 0.5}),
        (THREE_DRAFTS, {"acceptance_rate_per_position": [2 / 3, 1 / 3, 1 / 2]}),
        # 7 nodes that are 3 deep reach position 3, not 7.
        ({"drafted": [7], "accepted": [2], "depths": [3]}, {"acceptance_rate_per_position": [1, 1, 0]}),
        # The two definitions differ where steps draft nothing or are cut.
        (
            {"drafted": [3, 3, 0, 0], "accepted": [3, 0, 0, 0], "emitted": [3, 1, 1, 1]},
            {"mean_acceptance_length": 2.5, "tokens_per_step": 1.5},
        ),
    ],
)
def test_acceptance_of_steps(metric: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Would catch: nodes of a tree taken for its depth, or one of two definitions of the mean length for the other."""
    found = metric.compute(**given)
    assert {key: found[key] for key in expected} == expected


def test_impossible_steps_are_refused(metric: Any) -> None:
    """Would catch: an acceptance rate above one from arguments in another order."""
    with pytest.raises(ValueError, match="accepted <= depth <= drafted"):
        metric.compute(drafted=[2], accepted=[3])
    with pytest.raises(ValueError, match="argument 4 is longer"):
        metric.compute(drafted=[2], accepted=[1], emitted=[1, 2], depths=[2])


# Domains: those that ship can be read, invalid descriptions raise an error that names the problem; measured T(q)


def test_measured_curve_runs_the_passes_it_says() -> None:
    """One prefill, then a warm-up and `repeats` turns, each a pass over 1, 2 and 8 tokens behind 12 cached ones."""
    with recorded_inputs(tiny_model("llama"), lambda ids: ids.shape) as shapes:
        curve = measure_cost_curve(tiny_model("llama"), queries=(1, 2, 8), context=12, batch=3, repeats=2)
    assert shapes == [(3, 12)] + 3 * [(3, 1), (3, 2), (3, 8)]
    assert (curve.queries, curve.context, curve.batch) == ((1, 2, 8), 12, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [(lambda: encoder_decoder("t5"), "is an encoder-decoder"), (lambda: tiny_model("bloom"), "takes no position_ids")],
)
def test_measured_curve_of_a_model_without_one_raises(model: Callable[[], Any], words: str) -> None:
    """Would catch: an error about an argument that the measured pass lacks."""
    with pytest.raises(ValueError, match=words):
        measure_cost_curve(model())


LOCAL = [name for name, spec in yaml.safe_load(CATALOGUE.read_text())["domains"].items() if "data" in spec]


@pytest.mark.parametrize("name", LOCAL)
def test_local_domains(name: str) -> None:
    """Would catch: a domain with empty turns, or with templates in place of prompts."""
    domain = load_domain(name)
    assert len(domain.conversations) >= (2 if name in names_of(["everyday"]) else 40)
    assert {len(turns) for turns in domain.conversations} == {2 if name == "chat" else 1}
    assert all(turn.strip() and "{" + "prompt}" not in turn for turns in domain.conversations for turn in turns)
    assert domain.about


def test_hub_domains_cannot_move() -> None:
    """Pinned to a commit, with their like among the local ones."""
    specs = yaml.safe_load(CATALOGUE.read_text())["domains"]
    assert set(names_of(["hub"])) == {name for name, spec in specs.items() if "hub" in spec}
    for name in names_of(["hub"]):
        is_local = name.removesuffix("-hub") in LOCAL or name == "summarization-hub"  # news must not be bundled
        assert len(specs[name]["revision"]) == 40 and is_local


def write_domain(folder: Path, spec: dict, rows: list[dict] | None = None) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"generation": {"greedy": {"do_sample": False}}, "domains": {"own": spec}}))
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_own_domain_in_a_few_lines(tmp_path: Path) -> None:
    """Would catch: a condition, a template or a setting of a domain that is ignored."""
    rows = [{"a": "one", "b": 1}, {"a": "two", "b": 2}]
    spec = {"data": "rows.jsonl", "where": {"b": 2}, "prompt": "Say {a}.", "generation": {"do_sample": False}}
    domain = load_domain("own", write_domain(tmp_path, spec, rows))
    assert domain.conversations == [["Say two."]] and domain.generation == {"do_sample": False}


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        ({"data": "rows.jsonl", "prompt": "{a}"}, [], "has no prompts"),
        ({"data": "rows.jsonl", "prompt": "{a}", "where": {"a": "z"}}, [{"a": "b"}], "no row matches `where`"),
        ({"data": "rows.jsonl", "prompt": "{c}"}, [{"a": "b"}], "no column 'c'; there are a"),
        ({"data": "gone.jsonl", "prompt": "{a}"}, None, "there is no file"),
        ({"data": "rows.jsonl", "promt": "{a}"}, None, r"has unknown fields \['promt'\]"),
        ({"prompt": "{a}"}, None, "needs data or hub"),
        ({"hub": "org/set", "prompt": "{a}"}, None, "must name its split and revision"),
        ({"hub": "org/set", "split": "s", "revision": "r", "prompt": "{a}"}, None, "no network"),
    ],
)
def test_bad_domains(spec: dict, rows: list | None, message: str, tmp_path: Path) -> None:
    """Would catch: an error that does not say which field of a domain is wrong."""
    with pytest.raises(DomainError, match=message):
        load_domain("own", write_domain(tmp_path, spec, rows))


# Default settings are not slower than plain decoding, by counted passes and given latencies

DRAFTERS = ("draft_model", "medusa", "eagle", "layer_skip")
MACHINES = {"free verification": (1.02, 0.05), "compute-bound": (4.0, 0.4)}
"""T(33) / T(1), and the time of a drafter pass in plain steps."""
STRATEGIES = ("auto", "draft")
CALLS, NEW_TOKENS = 1, 64


def machine(name: str) -> LatencyModel:
    widest, draft = MACHINES[name]
    curve = CostCurve((1, 33), (1.0, widest), context=256, batch=1)
    return LatencyModel((Bucket(curve, {kind: DraftLatency(seconds=(draft,)) for kind in DRAFTERS}),))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_default_settings_are_not_slower_than_plain(reference_model, tokenizer, strategy: str, name: str) -> None:
    """Would catch: a default that drafts where plain decoding is faster; a call may lose 1.5 plain steps."""
    memory.clear()
    (family,) = build([strategy], [], reference_model, machine(name))
    (arguments,) = family.with_defaults().settings.values()
    speedups = {}
    for domain in ("edit", "prose"):
        texts = domain_prompts(CALLS)[domain]
        total = Projection()
        for seed, inputs in enumerate(encode(tokenizer, texts, 1)):
            candidates = arguments()["candidate_generator"]
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": 0.8} if domain == "prose" else {"do_sample": False}
            reference_model.generate(**inputs, **sampling, max_new_tokens=NEW_TOKENS, candidate_generator=candidates)
            total += project(candidates.speculation, latency_for(candidates, machine(name)))
        speedups[domain] = total.speedup
    print(strategy, name, speedups)
    assert min(speedups.values()) > 0.95


@pytest.mark.parametrize(
    ("idle", "own", "share"), [(0.0, 1.5, 0.25), (0.05, 1.9, 0.025), (0.2, 1.0, 0.0), (0.0, 2.1, 0.0)]
)
def test_others_share_counts_where_no_core_was_idle(idle: float, own: float, share: float) -> None:
    """Would catch: spinning threads that hide another program, or a warning for one that had a core of its own."""
    assert others_share(1.0, idle, own, cores=2) == pytest.approx(share)
    assert others_share(0.0, 0.0, 0.0, cores=2) == 0.0
