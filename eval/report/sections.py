"""The sections of the report, which Markdown and HTML render alike: numbers and verdicts as words, tables and plots."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from apex_engine.eval.delta import SURE
from apex_engine.eval.report.blocks import Block, Judged, Plot, Table, finite, number, with_error
from apex_engine.eval.report.plots import draw_curve, draw_drops, draw_shares, drops_of, twins_of


def sections(report: dict[str, Any]) -> dict[str, list[Block]]:
    """Title -> blocks, the empty ones left out. `report` is the dict of `contents.py`."""
    report = finite(report)
    seconds = {name: number(value, ".1f") for name, value in report["seconds"].items()}
    found: dict[str, list[Block]] = {
        "": [_headline(report, mode) for mode in report["modes"]],
        "Not measured": list(report["not_measured"]),
        "Tasks": _tasks(report),
        "Text": _text(report["text"]),
        "Expert calls": _ledger(report["ledger"]),
        "Thresholds": _thresholds(report["thresholds"]),
        "Calibration": _curve(report["curve"] or []),
        "Checkpoint": [f"Reference: {report['reference']}.", _pairs(report["checkpoint"])],
        "Settings": [_pairs(report["settings"])],
        "Run": [_pairs({"hardware": report["hardware"], **report["versions"], "seconds": seconds})],
    }
    return {title: blocks for title, blocks in found.items() if blocks}


def headline(report: dict[str, Any]) -> str:
    """The verdict on the first mode, in one sentence."""
    return _headline(report, report["modes"][0]).text


def _headline(report: dict[str, Any], mode: str) -> Judged:
    """The first mode has the overall verdict, the others that of their mean."""
    mean = report["mean"].get(mode, {})
    verdict = report["verdict"] if mode == report["modes"][0] else mean.get("verdict")
    if mean.get("drop") is None:
        return Judged(f"{mode}: {verdict or 'not measured'} (no mean accuracy).", verdict)
    change = "gain" if mean["drop"] < 0 else "drop"
    size = with_error(abs(mean["drop"]), mean["stderr"], 100, ".2f")
    tasks = f"{mean['tasks']} task{'s' * (mean['tasks'] != 1)}"
    worse = sum(task["modes"][mode]["verdict"] == "worse" for task in report["tasks"] if mode in task["modes"])
    more = f" Worse in {worse} of {len(report['tasks'])} single metrics." if worse else ""
    return Judged(f"{mode}: mean accuracy {change} {size} points over {tasks}: {verdict}.{more}", verdict)


def _tasks(report: dict[str, Any]) -> list[Block]:
    header = "task, metric, mode, items, reference, engine, difference ± stderr, verdict, right → wrong / wrong → right"
    rows: list[list[str | Judged]] = []
    for task in report["tasks"]:
        for mode, found in task["modes"].items():
            level, unit = (".2f", " %") if found["relative"] else (".1%", " points")
            scores = [number(task["items"], ""), number(task["reference"], level), number(found["value"], level)]
            difference = with_error(found["difference"], found["stderr"], 100, "+z.2f", unit)
            flips = [number(found.get(key), "") for key in ("right_to_wrong", "wrong_to_right")]
            verdict = Judged(found["verdict"] or "-", found["verdict"])
            flipped = "-" if flips == ["-", "-"] else " / ".join(flips)
            rows.append([task["task"], task["metric"], mode, *scores, difference, verdict, flipped])
    for mode, mean in report["mean"].items():
        difference = with_error(mean["drop"], mean["stderr"], -100, "+z.2f", " points")
        verdict = Judged(mean["verdict"] or "-", mean["verdict"])
        rows.append([f"mean of {mean['tasks']}", "accuracy", mode, "", "", "", difference, verdict, ""])
    if not rows:
        return ["not measured"]
    drops, limit = drops_of(report), 100 * report["limit"]
    title = f"Points of accuracy lost, or % of perplexity gained, with {SURE} standard errors"
    plot = Plot(title, len(drops), lambda axes: draw_drops(axes, drops, limit))
    return [Table(header.split(", "), rows, 3), _meaning(limit), *[plot] * bool(drops)]


def _meaning(limit: float) -> str:
    points = f"{limit:g} point{'s' * (limit != 1)}"
    return (
        "A difference is engine minus reference on the same items, ± the standard error of that paired difference; a drop is a "
        f'change for the worse. "within {limit:g} %": the drop plus {SURE} standard errors is at most {points}. "worse": it '
        f'minus {SURE} standard errors is above 0, and the drop itself above {points}. "not shown": neither; more items would '
        "tell. For perplexities the same is asked of the relative change, in %."
    )


def _text(text: dict[str, Any] | None) -> list[Block]:
    if text is None:
        return ["not measured"]
    header = "text, mode, reference perplexity, perplexity, change ± stderr, KL ± stderr, same likeliest token"
    rows: list[list[str | Judged]] = []
    for part in [{**text, "name": "all"}, *(text.get("by_text") or [])]:
        for mode, found in part["modes"].items():
            levels = [number(part["reference_perplexity"], ".2f"), number(found["perplexity"], ".2f")]
            change = with_error(found["change"], found.get("change_stderr"), 100, "+z.2f", " %")
            kl = with_error(found["kl"], found.get("kl_stderr"), 1, ".4f")
            rows.append([part["name"], mode, *levels, change, kl, number(found.get("agreement"), ".1%")])
    what = f"{text['what']}: {number(text['tokens'], ',')} tokens. KL(reference || engine) in nats a token."
    return [what, Table(header.split(", "), rows, 2)]


def _ledger(ledger: dict[str, Any]) -> list[Block]:
    formats = {
        "calls": ",",
        "share_of_calls": ".1%",
        "share_of_gate_mass": ".1%",
        "bytes_read": "bytes",
        "hit_rate": ".1%",
    }
    rows: list[list[str | Judged]] = []
    twins = twins_of(word for found in ledger.values() for word in found.get("share_of_calls") or {})
    for mode, found in ledger.items():
        for key, spec in formats.items():
            values = found.get(key) or {}
            rows.append([mode, key.replace("_", " "), *(number(values.get(twin), spec) for twin in twins)])
    shares = {"reference": {next(iter(twins)): 1.0}} | {
        mode: found.get("share_of_calls") or {} for mode, found in ledger.items()
    }
    plot = Plot("Share of expert calls", len(shares), lambda axes: draw_shares(axes, shares, twins))
    return [Table(["mode", "", *(word for word, _ in twins.values())], rows, 2), plot] if rows else ["not measured"]


def _thresholds(thresholds: dict[str, Any]) -> list[Block]:
    """Runs of equal values as "7 × 0.5"."""
    lines: list[Block] = [f"By MoE layer, from the first on; {thresholds['from']}."]
    for name in ("t1", "t2"):
        runs = [(value, len(list(run))) for value, run in groupby(number(value, ".4g") for value in thresholds[name])]
        lines.append(f"{name.upper()}: " + ", ".join(f"{n} × {value}" if n > 1 else value for value, n in runs))
    return lines


def _curve(curve: list[dict[str, Any]]) -> list[Block]:
    shares = {"share_low": "calls LOW", "share_skip": "calls skipped", "gate_mass_low": "gate mass LOW"}
    rows: list[list[str | Judged]] = [
        [number(point["kl"], ".4f"), *(number(point.get(key), ".1%") for key in shares)] for point in curve
    ]
    points = [
        (100 * (p["share_low"] + p["share_skip"]), p["kl"])
        for p in curve
        if None not in (p["share_low"], p["share_skip"], p["kl"])
    ]
    plot = Plot("KL against the share of calls LOW or skipped", 5, lambda axes: draw_curve(axes, points))
    return [Table(["KL, nats a token", *shares.values()], rows, 0), *[plot] * bool(points)] if rows else []


def _pairs(values: dict[str, Any]) -> Table:
    def words(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {words(item)}" for key, item in value.items()) or "-"
        if isinstance(value, list):
            return ", ".join(map(words, value)) or "-"
        return "-" if value is None else str(value)

    return Table(["", ""], [[key, words(value)] for key, value in values.items()], 2)
