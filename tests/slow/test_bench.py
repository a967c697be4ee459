"""Benchmark runs: choice of settings, level comparisons, verdicts, tables."""

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch

import hf_specgen
from benchmarks.harness.loading import build
from benchmarks.harness.plan import Plan
from benchmarks.harness.runner import DEFAULT_PLAIN, choose
from benchmarks.harness.units import tuning_units
from benchmarks.harness.variants import PLAIN, Family, captured, check_level
from benchmarks.report import summary
from benchmarks.workloads.domains import Domain
from hf_specgen.evaluation import measure
from hf_specgen.evaluation.measure import ROUNDING, UNEXPLAINED, Sample, Variant
from hf_specgen.evaluation.workloads import domain_prompts
from tests.helpers import tiny_model
from tests.helpers.captures import graphs_on_cpu
from tests.helpers.paths import ROOT


def test_settings_are_chosen_by_sums_over_all_tuning_prompts() -> None:
    """Setting b is faster on the short prompt, a over both together."""
    family = Family("x", {"a": dict, "b": dict}, code="X({})")
    measured = [("a", 100, 10.0), ("a", 10, 2.0), ("b", 100, 20.0), ("b", 10, 0.1)]
    records = [{"section": "tuning", "variant": f"x {s}", "tokens": t, "seconds": d} for s, t, d in measured]
    assert choose([family], records) == {"x": "a"}


def test_settings_are_chosen_on_other_prompts_than_are_measured(tokenizer) -> None:
    """One after the other from each domain; a domain without further prompts gives those it has."""
    many, few = (Domain(name, [[f"{name} {i}"] for i in range(count)], {}) for name, count in (("m", 4), ("f", 1)))
    plan = Plan(prompts=2, tuning_prompts=3)
    prompts = [tokenizer.decode(unit.inputs["input_ids"][0]) for unit in tuning_units(plan, [many, few], tokenizer, [])]
    assert [text.split("\n")[1] for text in prompts] == ["m 2", "f 0", "m 3"]


def test_both_sides_get_the_same_effort(reference_model) -> None:
    """Would catch: a peer that gets fewer tries, or its setting where Transformers does not read it."""
    built = build(("ngram", "auto", "draft", "layerskip", "medusa", "ngram+draft"), ("transformers",), reference_model)
    families = {family.name: family for family in built}
    peers = {"n-grams": "prompt lookup", "draft model": "assistant_model", "layer skip": "assistant_early_exit"}
    for mine, theirs in peers.items():
        assert len(families[mine].settings) == len(families[theirs].settings)
        assert families[mine].code and not families[theirs].code
    for family in built:
        kept = family.with_defaults().settings
        assert [name.partition("=")[2] for name in kept] == ["auto"] if family.code else kept == family.settings
    codes = {name: family.code_of("k=4") for name, family in families.items() if family.code}
    assert codes["n-grams"] == "NgramCandidates(k=4)" and families["n-grams"].code_of("k=auto") == "NgramCandidates()"
    assert str(ROOT) not in "".join(codes.values()), "records name no folder of the machine"
    for name, code in codes.items():  # would catch: an expression that builds another strategy than the measured one
        measured = families[name].settings["k=auto"]()["candidate_generator"]
        assert type(eval(code, vars(hf_specgen).copy())) is type(measured)
    for setting, k, threshold in (("k=2", 2, 0.0), ("k=20 p>0.4", 20, 0.4)):
        config = families["assistant_model"].settings[setting]()["assistant_model"].generation_config
        assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (k, threshold)
        assert config.num_assistant_tokens_schedule == "constant"


def test_comparison_that_is_not_level_is_refused() -> None:
    """Would catch: a table in which one side runs captured passes and another one eagerly."""
    eager = [Variant(name, dict) for name in ("plain", "plain, prepacked", "a", "b")]
    check_level(eager)
    check_level([captured(variant) for variant in eager])
    with pytest.raises(ValueError, match=r"'a' \(eager\) and 'c' \(graphs\) are no level comparison"):
        check_level([*eager, Variant("c", lambda: {"compile": "graphs"})])
    assert captured(PLAIN).arguments()["compile"] == "graphs", "plain decoding is captured as well"
    for wrong in ({"peers": ("transformers",)}, {"device": "cpu"}):
        with pytest.raises(ValueError, match="graphs needs a GPU"):
            Plan(**{"graphs": True, "peers": (), "device": "cuda", **wrong})
    assert Plan(graphs=True, peers=(), device="cuda").execution == "with CUDA graphs"


@pytest.mark.parametrize("sampled", [False, True])
def test_difference_is_explained_by_what_decides_it(sampled: bool) -> None:
    """Would catch: errors explained as rounding; sampled tokens explained by logits, which do not decide them."""
    model = tiny_model("llama").bfloat16()
    prompt, seed, temperature = torch.arange(6)[None], 3, 0.7
    with torch.no_grad():
        logits = model(prompt).logits[0, -1].float()
    torch.manual_seed(seed)
    noise = torch.empty(1, len(logits)).exponential_()[0]
    order = (logits / temperature - noise.log() if sampled else logits).argsort(descending=True).tolist()
    generation = {"do_sample": True, "temperature": temperature, "top_k": 0} if sampled else {}
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}

    def judge(our_token: int, plain_token: int = order[0], seed: int = seed) -> Any:
        texts = (torch.cat([prompt, torch.tensor([[token]])], dim=1) for token in (plain_token, our_token))
        plain, ours = (Sample(1, 1.0, text, None) for text in texts)
        return measure.first_difference(model, plain, ours, generation, seed, inputs)

    far = judge(order[-1])
    assert far["decided by"] == ("p over noise" if sampled else "logits") and far["position"] == 6
    assert far["margin"] > 0.5 and far["explained"] == UNEXPLAINED
    assert all(judge(token)["margin"] >= 0 for token in order[1:]), "plain decoding preferred its own token"
    neighbours = [judge(ours, plain) for plain, ours in pairwise(order)]
    assert min(neighbours, key=lambda found: found["margin"])["explained"] == ROUNDING
    assert judge(order[0]) is None and judge(-1)["decided by"] == "length"


def cell_of(**columns: Any) -> summary.Cell:
    count = len(columns["seconds"])
    made = [
        {"cell": "c", "number": n, "tokens": 10, "identical": True, "sampled": False, "seconds": columns["seconds"][n]}
        for n in range(count)
    ]
    plain = [{**record, "seconds": columns["plain"][record["number"]]} for record in made]
    return summary.Cell("c", "ours", made, plain)


def test_speedup_over_the_best_plain_setting() -> None:
    """Would catch: a speedup that plain decoding with another setting of the same machine has as well."""
    cell = cell_of(seconds=[1.0, 1.0], plain=[2.0, 2.0])
    others = [
        summary.Cell("c", name, [{**r, "seconds": seconds} for r in cell.plain], cell.plain)
        for name, seconds in (("plain", 2.0), (DEFAULT_PLAIN, 4.0), ("plain, prepacked", 1.6))
    ]
    row = summary.speed([*others, cell], "domain")[-1]
    assert row["speedup"] == pytest.approx(2.0) and row["over best plain"] == pytest.approx(1.6)
    assert row["over default plain"] == pytest.approx(4.0)
    assert "over best plain" not in summary.speed([others[0], cell], "domain")[-1]


def test_verdicts() -> None:
    """Would catch: a speedup called certain by its mean alone, or by too few requests."""
    (faster,) = summary.speed([cell_of(seconds=[1.0, 1.1, 0.9, 1.0], plain=[2.0, 2.1, 1.9, 2.0])], "domain")
    assert faster["verdict"] == "faster" and faster["speedup"] == pytest.approx(2.0) and faster["low"] > 1.9
    (unsure,) = summary.speed([cell_of(seconds=[1.0, 3.0, 1.0, 3.0], plain=[1.5, 2.0, 2.0, 2.0])], "domain")
    assert unsure["verdict"] == "no difference" and unsure["low"] < 1 < unsure["high"]
    (few,) = summary.speed([cell_of(seconds=[1.0, 1.0], plain=[2.0, 2.0])], "domain")
    assert few["verdict"] == "too few requests" and "low" not in few


@pytest.mark.parametrize(
    ("others", "found"), [([[5, 6, 7, 8], [5, 6, 7, 4]], (1, 3, 9, 4)), ([[5, 6], [5, 6]], (0, 2, 7, -1)), (None, None)]
)
def test_first_difference_is_the_earliest_position_of_any_row(others: Any, found: Any) -> None:
    """Would catch: an output without the last tokens, reported as identical."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    plain, ours = (Sample(4, 1.0, one, None) for one in (ids, ids if others is None else torch.tensor(others)))
    first = measure.first_difference(tiny_model("llama"), plain, ours, {}, 0, None)
    assert (first and tuple(first.values())) == found


# `micro large-target-graphs` on a CPU, with a stand-in for graphs: the rows of every variant, and a step in parts

large_target = importlib.import_module("benchmarks.micro.large_target")


def test_steps_are_split_into_passes_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: captured passes that are not recognised, and drafter passes counted as the target's."""
    captures: list[Any] = graphs_on_cpu(monkeypatch)
    load = large_target.load  # in float32, which a CPU multiplies faster
    monkeypatch.setattr(large_target, "load", lambda model="", *_, **__: load(model))
    names, variants = ("no drafts", "EAGLE-3"), large_target._variants
    few = lambda *given, **more: [one for one in variants(*given, **more) if one.name.startswith(names)]  # noqa: E731
    monkeypatch.setattr(large_target, "_variants", few)
    monkeypatch.setattr(large_target, "domain_prompts", lambda count: {"json": domain_prompts(count)["json"]})
    rows = {row["variant"]: row for row in large_target.large_target_graphs(repeats=1, quick=True)}
    for name in names:
        row = rows[f"{name}, graphs"]
        assert row["same tokens"] == 1.0 and row["limit, ms"] > 0
        assert row["target pass, ms"] > 0 and row["step, ms"] > 0
        assert (row["drafter passes, ms"] > 0) == (name != "no drafts")
    assert captures


def test_prompts_that_come_again_are_answered_from_the_history() -> None:
    """Would catch: a second epoch that repeats no noise or no answer, and a model that was not changed before it."""
    repeated = importlib.import_module("benchmarks.micro.repeated_prompts")
    rows = {(row["part"], row["variant"]): row for row in repeated.repeated_prompts(repeats=1, quick=True)}
    assert all(row["same tokens"] for row in rows.values())
    for part in ("greedy, again", "groups of 8, again"):
        steps = "tokens a step of a row"
        assert rows[part, "history"][steps] > 2 > rows[part, "plain"][steps] == 1
