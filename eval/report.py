"""The delta report: what the engine's modes cost against the reference, as JSON, Markdown and one HTML page.

Nothing is measured or judged here: numbers and verdicts come from one plain dict, and a missing number is shown as "-". In it
"difference" is engine minus reference, "drop" the opposite, and shares and relative changes are fractions of 1. Markdown and
HTML render the same sections; the page has plots besides, and asks nothing of the network.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html import escape
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from apex_engine.checkpoint.atomic import atomic_path
from apex_engine.errors import human
from apex_engine.eval.delta import SURE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TWINS = {"high": ("HIGH", "#4477aa"), "low": ("LOW", "#ddaa33"), "skip": ("skipped", "#cc6677")}
POINTS = {"good": ("#1a7f38", "o"), "open": ("#9a6701", "s"), "bad": ("#cf222f", "X")}  # by the class of a verdict
INK = "#010203"
STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "text.parse_math": False, "font.size": 9},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
# matplotlib draws in these colours; the page puts its own, for light and dark, in their place
CSS_COLOURS = {INK: "currentColor"} | {colour: f"var(--{kind})" for kind, (colour, _) in POINTS.items()}


class Judged(NamedTuple):
    """Text that says a verdict and has its colour."""

    text: str
    verdict: str | None


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str | Judged]]
    left: int  # columns of words; those after them are numbers, on the right


class Plot(NamedTuple):
    title: str
    rows: float  # height, in rows of text
    draw: Callable[[Axes], None]


Block: TypeAlias = str | Judged | Table | Plot


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """report.json, report.md and report.html in `folder`, each whole or absent; the numbers first, then what shows them."""
    renderers: dict[str, Callable[[dict[str, Any]], str]] = {
        "report.json": lambda report: json.dumps(_finite(report), allow_nan=False, indent=1) + "\n",
        "report.md": markdown,
        "report.html": html,
    }
    for name, render in renderers.items():
        with atomic_path(folder / name) as part:
            part.write_text(render(report), encoding="utf-8")
    return [folder / name for name in renderers]


def headline(report: dict[str, Any]) -> str:
    """The verdict on the first mode, in one sentence."""
    return _headline(report, report["modes"][0]).text


def markdown(report: dict[str, Any]) -> str:
    lines = ["# Delta report"]
    for title, blocks in _sections(_finite(report)).items():
        lines += [f"## {title}"] if title else []
        lines += [_markdown_block(block) for block in blocks if not isinstance(block, Plot)]
    return "\n\n".join(lines) + "\n"


def html(report: dict[str, Any]) -> str:
    """One page, without scripts. Without matplotlib it says so where the plots would be."""
    lines = []
    for title, blocks in _sections(_finite(report)).items():
        lines.append('<section class="warning">' if title == "Not measured" else "<section>")
        lines += [f"<h2>{escape(title)}</h2>"] if title else []
        lines += [*map(_html_block, blocks), "</section>"]
    return PAGE.replace("BODY", "\n".join(lines))


def _sections(report: dict[str, Any]) -> dict[str, list[Block]]:
    """Title -> blocks, the empty ones left out."""
    seconds = {name: _show(value, ".1f") for name, value in report["seconds"].items()}
    sections: dict[str, list[Block]] = {
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
    return {title: blocks for title, blocks in sections.items() if blocks}


def _headline(report: dict[str, Any], mode: str) -> Judged:
    """The first mode has the overall verdict, the others that of their mean."""
    mean = report["mean"].get(mode, {})
    verdict = report["verdict"] if mode == report["modes"][0] else mean.get("verdict")
    if mean.get("drop") is None:
        return Judged(f"{mode}: {verdict or 'not measured'} (no mean accuracy).", verdict)
    change = "gain" if mean["drop"] < 0 else "drop"
    size = _change(abs(mean["drop"]), mean["stderr"], 100, ".2f")
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
            scores = [_show(task["items"], ""), _show(task["reference"], level), _show(found["value"], level)]
            difference = _change(found["difference"], found["stderr"], 100, "+z.2f", unit)
            flips = [_show(found.get(key), "") for key in ("right_to_wrong", "wrong_to_right")]
            verdict = Judged(found["verdict"] or "-", found["verdict"])
            flipped = "-" if flips == ["-", "-"] else " / ".join(flips)
            rows.append([task["task"], task["metric"], mode, *scores, difference, verdict, flipped])
    for mode, mean in report["mean"].items():
        difference = _change(mean["drop"], mean["stderr"], -100, "+z.2f", " points")
        verdict = Judged(mean["verdict"] or "-", mean["verdict"])
        rows.append([f"mean of {mean['tasks']}", "accuracy", mode, "", "", "", difference, verdict, ""])
    if not rows:
        return ["not measured"]
    drops, limit = _drops(report), 100 * report["limit"]
    title = f"Points of accuracy lost, or % of perplexity gained, with {SURE} standard errors"
    plot = Plot(title, len(drops), lambda axes: _draw_drops(axes, drops, limit))
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
            levels = [_show(part["reference_perplexity"], ".2f"), _show(found["perplexity"], ".2f")]
            change = _change(found["change"], found.get("change_stderr"), 100, "+z.2f", " %")
            kl = _change(found["kl"], found.get("kl_stderr"), 1, ".4f")
            rows.append([part["name"], mode, *levels, change, kl, _show(found.get("agreement"), ".1%")])
    what = f"{text['what']}: {_show(text['tokens'], ',')} tokens. KL(reference || engine) in nats a token."
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
    for mode, found in ledger.items():
        for key, spec in formats.items():
            values = found.get(key) or {}
            rows.append([mode, key.replace("_", " "), *(_show(values.get(twin), spec) for twin in TWINS)])
    shares = {"reference": {"high": 1.0}} | {mode: found.get("share_of_calls") or {} for mode, found in ledger.items()}
    plot = Plot("Share of expert calls", len(shares), lambda axes: _draw_shares(axes, shares))
    return [Table(["mode", "", *(word for word, _ in TWINS.values())], rows, 2), plot] if rows else ["not measured"]


def _thresholds(thresholds: dict[str, Any]) -> list[Block]:
    """Runs of equal values as "7 × 0.5"."""
    lines: list[Block] = [f"By MoE layer, from the first on; {thresholds['from']}."]
    for name in ("t1", "t2"):
        runs = [(value, len(list(run))) for value, run in groupby(_show(value, ".4g") for value in thresholds[name])]
        lines.append(f"{name.upper()}: " + ", ".join(f"{n} × {value}" if n > 1 else value for value, n in runs))
    return lines


def _curve(curve: list[dict[str, Any]]) -> list[Block]:
    shares = {"share_low": "calls LOW", "share_skip": "calls skipped", "gate_mass_low": "gate mass LOW"}
    rows: list[list[str | Judged]] = [
        [_show(point["kl"], ".4f"), *(_show(point.get(key), ".1%") for key in shares)] for point in curve
    ]
    points = [
        (100 * (p["share_low"] + p["share_skip"]), p["kl"])
        for p in curve
        if None not in (p["share_low"], p["share_skip"], p["kl"])
    ]
    plot = Plot("KL against the share of calls LOW or skipped", 5, lambda axes: _draw_curve(axes, points))
    return [Table(["KL, nats a token", *shares.values()], rows, 0), *[plot] * bool(points)] if rows else []


def _pairs(values: dict[str, Any]) -> Table:
    def words(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {words(item)}" for key, item in value.items()) or "-"
        if isinstance(value, list):
            return ", ".join(map(words, value)) or "-"
        return "-" if value is None else str(value)

    return Table(["", ""], [[key, words(value)] for key, value in values.items()], 2)


def _finite(value: Any) -> Any:
    """The same with None where a number is not finite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kind(verdict: str | None) -> str:
    """A key of `POINTS`."""
    return "bad" if verdict == "worse" else "good" if verdict and verdict.startswith("within") else "open"


def _show(value: float | None, spec: str) -> str:
    return "-" if value is None else human(value) if spec == "bytes" else format(value, spec)


def _change(value: float | None, stderr: float | None, scale: float, spec: str, unit: str = "") -> str:
    """Both times `scale`: -0.01 and 0.005 as "-1.00 ± 0.50 points"."""
    if value is None:
        return "-"
    error = "" if stderr is None else f" ± {abs(scale) * stderr:{spec.lstrip('+')}}"
    return f"{scale * value:{spec}}{error}{unit}"


def _markdown_block(block: str | Judged | Table) -> str:
    if isinstance(block, str):
        return _markdown_text(block)
    if isinstance(block, Judged):
        return f"**{_markdown_text(block.text)}**"
    rows = [[_markdown_text(cell.text if isinstance(cell, Judged) else cell) for cell in row] for row in block.rows]
    rule = ["---" if i < block.left else "---:" for i in range(len(block.header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [block.header, rule, *rows])


def _markdown_text(text: str) -> str:
    """On one line, with nothing that ends a cell or starts markup."""
    return re.sub(r"([\\|*`\[\]]|<(?=[A-Za-z/!?]))", r"\\\1", " ".join(text.split()))


def _html_block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Judged):
        return f'<p class="headline {_kind(block.verdict)}">{escape(block.text)}</p>'
    if isinstance(block, Plot):
        return f"<figure><figcaption>{escape(block.title)}</figcaption>\n{_svg(block)}\n</figure>"
    rows = [[f"<th>{escape(word)}</th>" for word in block.header]] if any(block.header) else []
    for row in block.rows:
        kinds = [f' class="{_kind(cell.verdict)}"' if isinstance(cell, Judged) else "" for cell in row]
        texts = [cell.text if isinstance(cell, Judged) else cell for cell in row]
        rows.append([f"<td{kind}>{escape(text)}</td>" for kind, text in zip(kinds, texts, strict=True)])
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="left{block.left}">\n{body}\n</table></div>'


def _svg(plot: Plot) -> str:
    """An <svg> element with its text as text, the same for the same numbers."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>Not drawn: this needs matplotlib.</p>"
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": plot.title}):
        figure = Figure(figsize=(7, 1.2 + 0.35 * plot.rows), layout="constrained")
        axes = figure.subplots()
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        plot.draw(axes)
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
        file = StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    for drawn, shown in CSS_COLOURS.items():
        svg = svg.replace(drawn, shown)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg[svg.index("<svg") :])  # named alike in every plot, and never referred to
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)


class Drop(NamedTuple):
    """A change for the worse: points of accuracy lost, or % of perplexity gained."""

    label: str
    size: float
    stderr: float
    kind: str


def _drops(report: dict[str, Any]) -> list[Drop]:
    """Those of the tasks, then those of the means, where there is a difference."""
    several = len(report["modes"]) > 1
    rows = [
        (task["task"], task["metric"], task["modes"], "difference", task["higher_is_better"])
        for task in report["tasks"]
    ]
    return [
        Drop(
            label=(task if len(task) <= 40 else f"{task[:39]}…") + f" {metric}" + f", {mode}" * several,
            size=(-100 if negate else 100) * found[key],
            stderr=100 * (found["stderr"] or 0),
            kind=_kind(found["verdict"]),
        )
        for task, metric, modes, key, negate in [*rows, ("mean", "accuracy", report["mean"], "drop", False)]
        for mode, found in modes.items()
        if found[key] is not None
    ]


def _draw_drops(axes: Axes, drops: list[Drop], limit: float) -> None:
    words = {"good": f"within {limit:g} %", "open": "not shown", "bad": "worse"}
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.axvline(limit, color=INK, linewidth=0.8, linestyle="--", label=f"limit: {limit:g}")
    for kind, (colour, marker) in POINTS.items():
        at = [i for i, drop in enumerate(drops) if drop.kind == kind]
        sizes, bars = [drops[i].size for i in at], [SURE * drops[i].stderr for i in at]
        if at:
            axes.errorbar(sizes, at, xerr=bars, fmt=marker, markersize=6, capsize=3, color=colour, label=words[kind])
    axes.set_yticks(range(len(drops)), [drop.label for drop in drops])
    axes.set_ylim(len(drops) - 0.5, -0.5)
    axes.set_xlabel("change for the worse")


def _draw_shares(axes: Axes, shares: dict[str, dict[str, float | None]]) -> None:
    left = [0.0] * len(shares)
    for twin, (word, colour) in TWINS.items():
        widths = [100 * (share.get(twin) or 0) for share in shares.values()]
        axes.barh(list(shares), widths, 0.6, left, color=colour, label=word)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of expert calls")


def _draw_curve(axes: Axes, points: list[tuple[float, float]]) -> None:
    axes.plot(*zip(*points, strict=True), marker="o", color=TWINS["low"][1], label="calibrated thresholds")
    axes.set_xlabel("% of expert calls LOW or skipped")
    axes.set_ylabel("KL, nats a token")
    axes.set_ylim(bottom=0)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Delta report</title>
<style>
:root { color-scheme: light dark; --good: #1a7f37; --open: #9a6700; --bad: #cf222e; --line: #8886; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --open: #d4a72c; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.headline { font-size: 1.15rem; border-left: 4px solid; padding-left: .8rem; }
.good { color: var(--good); } .open { color: var(--open); } .bad { color: var(--bad); }
.warning { border: 1px solid var(--open); padding: 0 1rem; } .warning h2 { margin-top: .6rem; color: var(--open); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
.left1 :nth-child(-n+1):is(th, td), .left2 :nth-child(-n+2):is(th, td), .left3 :nth-child(-n+3):is(th, td) { text-align: left; }
figure { margin: 1.2rem 0; } figcaption { font-weight: 600; } svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>Delta report</h1>
BODY
</body>
</html>
"""
