"""The plots of the page, drawn with matplotlib, which is imported when the first one is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from apex_engine.eval.delta import SURE
from apex_engine.eval.report.blocks import Plot, kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TWINS = {"high": ("HIGH", "#4477aa"), "low": ("LOW", "#ddaa33"), "skip": ("skipped", "#cc6677")}
OTHERS = ("#66ccee", "#228833", "#aa3377", "#bbbbbb")  # of twins that go by the names of their forms
POINTS = {"good": ("#1a7f38", "o"), "open": ("#9a6701", "s"), "bad": ("#cf222f", "X")}  # by the class of a verdict
INK = "#010203"
STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "text.parse_math": False, "font.size": 9},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
# matplotlib draws in these colours; the page puts its own, for light and dark, in their place
CSS_COLOURS = {INK: "currentColor"} | {colour: f"var(--{kind})" for kind, (colour, _) in POINTS.items()}


def twins_of(words: Iterable[str]) -> dict[str, tuple[str, str]]:
    """What the ledger calls a precision -> how the report does, and its colour; the highest first."""
    colours = iter(OTHERS)
    return {word: TWINS.get(word) or (word, next(colours)) for word in dict.fromkeys(words) or TWINS}


def svg(plot: Plot) -> str:
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


def drops_of(report: dict[str, Any]) -> list[Drop]:
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
            kind=kind_of(found["verdict"]),
        )
        for task, metric, modes, key, negate in [*rows, ("mean", "accuracy", report["mean"], "drop", False)]
        for mode, found in modes.items()
        if found[key] is not None
    ]


def draw_drops(axes: Axes, drops: list[Drop], limit: float) -> None:
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


def draw_shares(axes: Axes, shares: dict[str, dict[str, float | None]], twins: dict[str, tuple[str, str]]) -> None:
    left = [0.0] * len(shares)
    for twin, (word, colour) in twins.items():
        widths = [100 * (share.get(twin) or 0) for share in shares.values()]
        axes.barh(list(shares), widths, 0.6, left, color=colour, label=word)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of expert calls")


def draw_curve(axes: Axes, points: list[tuple[float, float]]) -> None:
    axes.plot(*zip(*points, strict=True), marker="o", color=TWINS["low"][1], label="calibrated thresholds")
    axes.set_xlabel("% of expert calls LOW or skipped")
    axes.set_ylabel("KL, nats a token")
    axes.set_ylim(bottom=0)
