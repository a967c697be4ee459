"""The first page of a benchmark report and its table on the terminal: what to use, and how much faster it is."""

import io
import json
from typing import Any

import pytest
from markupsafe import escape
from rich.console import Console

from benchmarks.report import page
from benchmarks.report.decision import choices, code_of, overview, sentence
from tests.helpers.paths import ROOT

NGRAM, DRAFT = "n-grams k=auto", "draft model k=4"


def row(domain: str, variant: str, speedup: float, verdict: str = "faster") -> dict[str, Any]:
    known = {} if verdict == "too few requests" else {"low": speedup - 0.1, "high": speedup + 0.1}
    return {"domain": domain, "variant": variant, "speedup": speedup, "verdict": verdict, **known}


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ours": [NGRAM, DRAFT], "plan": {"strategies": ["ngram", "draft=org/small"]}, "tables": {"speed": rows}}


MIXED = result(
    [
        row("edit", NGRAM, 2.5),
        row("edit", "prompt lookup k=10 n=2", 3.0),
        row("prose", NGRAM, 0.8, "slower"),
        row("prose", DRAFT, 1.02, "no difference"),
        row("chat", DRAFT, 1.3, "too few requests"),
        row("all", NGRAM, 1.4),
        row("all", DRAFT, 1.7),
    ]
)


def test_choices_are_the_fastest_of_ours_for_each_kind_of_text_all_first() -> None:
    found = {choice.domain: (choice.variant, choice.code) for choice in choices(MIXED)}
    assert list(found) == ["all", "edit", "prose", "chat"]
    assert found["all"] == (DRAFT, "DraftModelCandidates('org/small', k=4)")
    assert found["edit"] == (NGRAM, "NgramCandidates()"), "a strategy of Transformers is no choice"
    assert found["prose"] == (None, ""), "an interval that includes 1 is no reason to use it"
    assert found["chat"][0] == DRAFT


def test_sentence_names_the_line_of_code_or_plain_generate() -> None:
    assert sentence(MIXED) == "Use DraftModelCandidates('org/small', k=4): 1.70x (95% interval 1.60 to 1.80)."
    assert sentence(result([row("all", NGRAM, 0.9, "slower")])) == (
        "Use plain generate: no strategy was faster over all domains (the best: 0.90x)."
    )
    assert sentence(result([])) is None


@pytest.mark.parametrize(
    ("variant", "strategies", "code"),
    [
        ("n-grams k=8 tree=32", ["ngram"], "NgramCandidates(k=8, tree=32)"),
        ("Medusa tree=auto", ["medusa=org/heads"], "MedusaCandidates('org/heads')"),
        ("layer skip k=2", ["layerskip=org/exit"], "LayerSkipCandidates(…, adapter='org/exit', k=2)"),
        ("layer skip without adapter k=2", ["layerskip=3"], "LayerSkipCandidates(3, k=2)"),
        (
            "n-grams + draft model k=auto",
            ["ngram+draft=org/small"],
            "CombinedCandidates([NgramCandidates(), DraftModelCandidates('org/small')])",
        ),
    ],
)
def test_code_of_a_variant_builds_it(variant: str, strategies: list[str], code: str) -> None:
    assert code_of(variant, {"plan": {"strategies": strategies}}) == code


def test_overview_fits_80_columns_with_many_domains_and_long_names() -> None:
    """Would catch: names cut to their first letters, and several tables."""
    many = [row(domain, NGRAM, 1.5) for domain in ("all", *(f"domain-{n}" for n in range(12)))]
    output = io.StringIO()
    Console(file=output, width=80).print(overview(result(many)))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and NGRAM in output.getvalue() and "6 more domains in the report" in lines[0]
    assert overview(result([])) is None


def test_first_page_of_the_recorded_report_decides() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "wide" / "report.json").read_text())
    text = page.html(found, {})
    first = text[text.index('class="decision"') : text.index("</section>")]
    best = max(
        (row for row in found["tables"]["by domain"] if row["variant"] in found["ours"]), key=lambda row: row["all"]
    )
    assert f"Use <b>{best['variant']}</b>: <b>{best['all']:.2f}\N{MULTIPLICATION SIGN}</b>" in first
    code = escape(code_of(best["variant"], found))
    packed = "with prepacked(model): " if found["plan"]["pack_weights"] else ""
    assert f"{packed}model.generate(**inputs, candidate_generator={code})</pre>" in first
    assert all(f"<td>{domain}</td>" in first for domain in ("math", "code", "edit", "json", "prose"))
