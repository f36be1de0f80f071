"""What decoding was measured to cost, as Markdown and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apex_engine.errors import ApexError
from benchmarks.runs import gain
from benchmarks.steps import SIDE_BY_SIDE


def markdown(result: dict[str, Any]) -> str:
    if "link" in result:
        rate = result["link"]["bytes_per_second"]
        head = f"{result['texts']} texts of {result['prompt']} + {result['tokens']} tokens, link {rate / 1e6:.0f} MB/s, 20 us"
    else:
        rate = result["bytes_per_second"]
        fits = ", ".join(f"{found:.2f} ({published:.2f}) at {rho}" for rho, (found, published) in result["lru"].items())
        source = "the disk" if result["host_memory"] == "0" else "host memory"
        head = (
            f"shape of {result['shape']}, experts written in {result['write_seconds']:.0f} s, {rate / 1e9:.2f} GB/s from {source}"
        ) + (f"; LRU hit rate of the trace (published) by slots a layer / chosen: {fits}" if fits else "")
    lines = [f"Machine: {result['machine']}. {result['memory']} of all HIGH twins resident; {head}.", ""]
    if "runs" in result:
        lines += [
            "| | tokens/s | x on-demand | first token s | stalled | busy while stalled | MB a token | hits | link used "
            "| x bound | KL |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        times = {name: row["decode_seconds"] for name, row in result["runs"].items()}
        base = next(iter(times.values()))
        for name, row in result["runs"].items():
            lines.append(
                f"| {name} | {row['tokens_per_second']:.1f} | {gain(times[name], base):.2f} | {row['first_token_seconds']:.2f} "
                f"| {row['stall_share']:.0%} | {row['busy_while_stalled']:.0%} | {row['bytes_a_token'] / 1e6:.2f} "
                f"| {row['hit_rate']:.0%} | {row['link_busy']:.0%} | {row['of_the_bound']:.2f} "
                + (f"| {row['kl']:z.4f} |" if "link" in result else "| - |")
            )
        lines += [""] + [
            f"{name}, beside {other}: x {gain(times[name], times[other]):.3f}"
            for name, other in SIDE_BY_SIDE
            if {name, other} <= times.keys()
        ]
    for row in result.get("sweep", ()):
        lines.append(f"| {row['speed']:g} | {row['mode']} | {row['gain']:.3f} |")
    for row in result.get("prompts", ()):
        lines.append(f"| {row['admission']} | {row['mode']} | {row['prompt']} | {row['hit_rate']:.1%} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Milliseconds of a token, waiting apart from the rest."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ApexError("--plot needs matplotlib: pip install matplotlib") from None
    names = list(result["runs"])[::-1]
    whole = [1e3 / result["runs"][name]["tokens_per_second"] for name in names]
    stalled = [ms * result["runs"][name]["stall_share"] for name, ms in zip(names, whole, strict=True)]
    figure = Figure(figsize=(7, 0.4 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [a - b for a, b in zip(whole, stalled, strict=True)], color="#4477aa", label="computing")
    axes.barh(
        names, stalled, left=[a - b for a, b in zip(whole, stalled, strict=True)], color="#cc6677", label="waiting"
    )
    axes.set_xlabel("milliseconds a token")
    axes.legend()
    figure.savefig(path)
