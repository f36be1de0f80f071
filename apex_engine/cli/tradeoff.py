"""What a calibration found: thresholds and the trade-off, as tables on stderr and as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import LEAST_TOKENS
from apex_engine.cli.console import console, say


def show(content: dict[str, Any], manifest: Manifest) -> None:
    """The thresholds and the trade-off on stderr."""
    table = Table(title=f"thresholds for {content['limit']}, by layer", title_justify="left")
    for column in ("MoE layer", "T1", "T2", "KL if all its experts are LOW", "worst expert's LOW output error"):
        table.add_column(column, justify="right")
    for i, (t1, t2) in enumerate(zip(*content["thresholds"].values(), strict=True)):
        worst = max(content["experts"]["low_error"][i])
        shown = "all LOW" if t1 < 0 else f"{t1:.2f}"
        table.add_row(
            str(manifest.layers[i].number),
            shown,
            f"{t2:.2f}",
            f"{content['layers']['kl_all_low'][i]:.4f}",
            f"{worst:.2f}",
        )
    console.print(table)
    table = Table(title="trade-off, measured", title_justify="left")
    for column in ("KL", "perplexity", "calls LOW", "skipped", "gate mass LOW"):
        table.add_column(column, justify="right")
    for point in content["curve"]:
        chosen = point == content["measured"]
        table.add_row(
            f"{point['kl']:.4f}",
            f"{point['change']:+.2%}",
            f"{point['share_low']:.1%}",
            f"{point['share_skip']:.1%}",
            f"{point['gate_mass_low']:.1%}",
            style="bold" if chosen else None,
        )
    console.print(table)
    short = sum(tokens < LEAST_TOKENS for row in content["experts"]["tokens"] for tokens in row)
    if short:
        say(f"note: {short} experts were chosen by fewer than {LEAST_TOKENS} tokens: more --tokens tell more of them")


def plot(content: dict[str, Any], path: Path) -> None:
    """The trade-off curve."""
    from matplotlib.figure import Figure  # a heavy import that nothing else needs

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    kl = [point["kl"] for point in content["curve"]]
    for name, label in (
        ("share_low", "calls LOW"),
        ("gate_mass_low", "gate mass LOW"),
        ("share_skip", "calls skipped"),
    ):
        axes.plot(kl, [100 * point[name] for point in content["curve"]], marker="o", label=label)
    axes.axvline(content["measured"]["kl"], color="grey", linestyle=":", label=f"chosen for {content['limit']}")
    axes.set(xlabel="KL(all HIGH || engine), nats a token", ylabel="share, %", xscale="log", ylim=(0, 100))
    axes.legend()
    figure.savefig(path)
