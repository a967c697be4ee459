"""One page for a run: pictures, every number behind them, and how to read it. No network, no scripts."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.common import Rows
from benchmarks.figures import figures, inline, save
from benchmarks.summary import ALL
from benchmarks.tables import cell, short
from benchmarks.wording import ABOUT_SPEED, SECTIONS

STYLE = Path(__file__).with_name("report.css")
TEXT_COLUMNS = ("setting", "verdict", "by position", "variant", "round", "trace", "identical")


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write `report.json`, `report.html` and `plots/`.

    Args:
        result: of `results.result`.
        folder: where to.

    Returns:
        the page.
    """
    drawn = figures(result["tables"])
    save(drawn, folder / "plots")
    (folder / "report.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(html(result, {name: inline(figure) for name, figure in drawn.items()}), encoding="utf-8")
    return page


def html(result: dict[str, Any], pictures: dict[str, str]) -> str:
    """The page."""
    tables: dict[str, Rows] = result["tables"]
    parts = [_head(result), _speed(result, pictures.get("speed", ""))]
    parts.append(_section("acceptance", tables, pictures, _texts(result["texts"])))
    parts += [_section(name, tables, pictures) for name in ("cost", "limits", "latency")]
    sweeps = "".join(_card(name, tables, pictures) for name in ("tuning", "batch", "temperature", "context"))
    if sweeps:
        parts.append(f'<h2>Sweeps</h2><div class="grid">{sweeps}</div>')
    parts += [_section(name, tables, pictures) for name in ("traces", "synthetic", "differences")]
    parts.append(_foot(result))
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>hf_specgen benchmark</title><style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _head(result: dict[str, Any]) -> str:
    plan, origin = result["plan"], result["provenance"]
    machine, versions = origin["machine"], origin["versions"]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in result["notes"])
    target = Path(plan["model"]).name or "the embedded model"
    if plan["widen"]:
        target += f" widened to {plan['widen'] / 1e6:.0f}M parameters (the same function, a cost model)"
    hardware = machine["gpu"] or f"{machine['processor']}, {machine['threads']} thread" + "s" * (machine["threads"] > 1)
    return (
        "<h1>Speculative decoding, measured</h1>"
        f'<p class="soft">{escape(target)} in {plan["dtype"]} on '
        f"{escape(hardware)} &middot; torch {versions['torch']}, transformers {versions['transformers']} &middot; "
        f"commit {escape(short(origin['commit']))}</p>{_headline(result)}{notes}"
    )


def _headline(result: dict[str, Any]) -> str:
    rows = [r for r in result["tables"].get("speed", []) if r["domain"] == ALL and "speedup" in r]
    mine = [row for row in rows if row["variant"] in result["ours"]]
    if not mine:
        return ""
    best = max(mine, key=lambda row: row["speedup"])
    sure = f"95% interval {best['low']:.2f}&ndash;{best['high']:.2f}" if "low" in best else "too few requests"
    if best["verdict"] == "no difference":
        sure += ", which shows no difference"
    same = "every token as in plain decoding" if best["identical"] is True else "not every token as in plain decoding"
    return (
        f'<p class="headline">Over all domains <b>{escape(best["variant"])}</b> did best of ours: '
        f"<b>{best['speedup']:.2f}&times;</b> plain generate ({sure}), {same}.</p>"
    )


def _speed(result: dict[str, Any], picture: str) -> str:
    rows = [row for row in result["tables"].get("speed", []) if "speedup" in row]
    if not rows:
        return ""
    domains = sorted(dict.fromkeys(row["domain"] for row in rows), key=lambda domain: domain != ALL)
    body = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = {row["domain"]: row for row in rows if row["variant"] == variant}
        owner = ' class="ours"' if variant in result["ours"] else ""
        values = "".join(_speed_cell(mine.get(domain)) for domain in domains)
        body.append(f"<tr><td{owner}>{escape(variant)}</td>{values}</tr>")
    heads = "".join(f"<th>{escape(domain)}</th>" for domain in domains)
    about = "".join(f"<li><b>{escape(n)}</b>: {escape(text)}</li>" for n, text in result["domains"].items())
    return (
        f"<h2>Speedup over plain generate, by domain</h2><p>{ABOUT_SPEED}</p>"
        f'<div class="card"><div class="scroll"><table class="speeds"><tr><th></th>{heads}</tr>'
        f"{''.join(body)}</table></div>"
        f"<details><summary>all numbers</summary>{_table(result['tables']['speed'])}</details></div>"
        f'<div class="grid below"><figure class="card">{picture}</figure>'
        f'<div class="card"><h3>The domains</h3><ul>{about}</ul>{_settings(result)}</div></div>'
    )


def _settings(result: dict[str, Any]) -> str:
    rows = [{"strategy": family, "setting": setting} for family, setting in result["chosen"].items()]
    return f"<h3>The best settings, from the sweep below</h3>{_table(rows)}" if rows else ""


def _speed_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "<td></td>"
    ratio = f"{row['speedup']:.2f}&times;"
    differs = "" if row["identical"] in (True, "own draws") else " &ne;"
    interval = f"{row['low']:.2f}&ndash;{row['high']:.2f}" if "low" in row else ratio
    if row["verdict"] not in ("faster", "slower"):
        return f'<td class="same">{row["verdict"]}{differs}<small>{interval}</small></td>'
    return f'<td class="{row["verdict"]}">{ratio}{differs}<small>{interval}</small></td>'


def _section(name: str, tables: dict[str, Rows], pictures: dict[str, str], extra: str = "") -> str:
    if name not in tables:
        return ""
    title, about = SECTIONS[name]
    over_all = [_without(row, "domain", "by position") for row in tables[name] if row.get("domain") == ALL]
    table = _table(over_all or tables[name])
    if name == "acceptance":
        table += _table(_positions(tables[name]))
    if over_all:
        table += f"<details><summary>by domain</summary>{_table(tables[name])}</details>"
    if name in pictures:
        inside = (
            f'<div class="grid"><figure class="card">{pictures[name]}</figure><div class="card">{table}</div></div>'
        )
    else:
        inside = f'<div class="card">{table}</div>'
    return f"<h2>{title}</h2><p>{about}</p>{inside}{extra}"


def _positions(acceptance: Rows) -> Rows:
    """What is drawn: over all domains, a row for each position, a column for each variant."""
    lines = {row["variant"]: row["by position"].split() for row in acceptance if row["domain"] == ALL}
    longest = max(map(len, lines.values()))
    return [
        {"position": at + 1} | {c: line[at] for c, line in lines.items() if at < len(line)} for at in range(longest)
    ]


def _without(row: dict[str, Any], *columns: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in columns}


def _card(name: str, tables: dict[str, Rows], pictures: dict[str, str]) -> str:
    if name not in tables:
        return ""
    title, about = SECTIONS[name]
    return (
        f'<figure class="card"><h3>{title}</h3>{pictures.get(name, "")}<figcaption>{about}</figcaption>'
        f"<details><summary>numbers</summary>{_table(tables[name])}</details></figure>"
    )


def _texts(texts: list[dict[str, Any]]) -> str:
    """One answer of each domain, guessed and accepted tokens marked; the first strategy's are open."""
    shown: list[str] = []
    folded: list[str] = []
    for text in texts:
        tokens = "".join(f"<b>{escape(t)}</b>" if guessed else escape(t) for t, guessed in text["tokens"])
        share = sum(guessed for _, guessed in text["tokens"]) / max(1, len(text["tokens"]))
        title = f"<h3>{escape(text['domain'])}, {escape(text['variant'])}: {share:.0%} guessed</h3>"
        place = shown if text["variant"] == texts[0]["variant"] else folded
        place.append(f'<div class="card">{title}<div class="answer">{tokens}</div></div>')
    if not shown:
        return ""
    note = "Marked tokens were guessed and accepted; the others are the target's own."
    more = f'<details><summary>the other strategies</summary><div class="grid below">{"".join(folded)}</div></details>'
    return f'<h2>Along a text</h2><p>{note}</p><div class="grid">{"".join(shown)}</div>{more if folded else ""}'


def _table(rows: Rows) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def kind(column: str) -> str:
        return ' class="text"' if column in TEXT_COLUMNS else ""

    head = "".join(f"<th{kind(column)}>{escape(column)}</th>" for column in columns)
    lines = [
        "".join(f"<td{kind(column)}>{escape(cell(row.get(column, '')))}</td>" for column in columns) for row in rows
    ]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _foot(result: dict[str, Any]) -> str:
    origin = {"seed": result["seed"], "chosen": result["chosen"], **result["provenance"], "plan": result["plan"]}
    return (
        "<h2>Protocol and provenance</h2><p>All variants ran in one process on the same prompts from the same seeds, "
        "taking turns in an order that rotates, after a warm-up. Tokens are counted alike, up to and including the end "
        "token. Every answer of ours is compared with plain decoding token by token. Transformers' assistants sample "
        "with random numbers of their own (<i>own draws</i>), so their sampled texts are others of the same "
        f"distribution.</p><pre>{escape(json.dumps(origin, indent=2))}</pre>"
    )
