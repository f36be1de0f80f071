"""The quantizer with a progress bar, and what its twins cost as a table."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import Moments
from apex_engine.cli.console import console, progress_bar, say
from apex_engine.errors import human
from apex_engine.kernels.layout import MATRICES
from apex_engine.quantize.convert import JOURNAL, Options, convert
from apex_engine.quantize.source import Source, resolve


def quantize(
    name: str, folder: Path, options: Options, moments: Moments | None = None, device: str = "cpu"
) -> Manifest:
    """`convert` with a progress bar and the table at the end, on stderr."""
    source = Source(resolve(name))
    resumes = (folder / JOURNAL).is_file()
    total = sum(layer.experts for layer in source.layers)
    bar = progress_bar("quantizing experts")
    task = bar.add_task("", total=total)

    def advance(experts: int) -> None:
        if not bar.live.is_started:  # only now: what is refused before the first expert is refused in one line
            if resumes:
                say(f"going on with the unfinished conversion in {folder}")
            bar.start()
        bar.advance(task, experts)

    try:
        manifest, done = convert(name, source, folder, options, advance, moments, device)
    except KeyboardInterrupt:
        say("what is finished is kept: run the same command again, it goes on where it stopped")
        raise
    finally:
        if bar.live.is_started:
            bar.stop()
    if done:
        for note in source.notes:
            say(f"note: {note}")
        report(manifest)
        say(f"written to {folder}")
    else:
        say(f"{folder} is complete already: nothing to do")
    return manifest


def report(manifest: Manifest) -> None:
    """Print what the twins cost in bytes and in error."""
    experts = manifest.experts * len(manifest.layers)
    table = Table(title=f"{experts} experts in {len(manifest.layers)} layers, dense part {human(manifest.dense_bytes)}")
    for column in ("twin", "matrix", "format", "relative error", "worst one", "at layer, expert"):
        table.add_column(column, justify="left" if column in ("twin", "matrix", "format") else "right")
    for twin, layout in (("high", manifest.high), ("low", manifest.low)):
        for matrix in MATRICES:
            row = manifest.errors[f"{twin}.{matrix}"]
            worst = row["worst"]
            at = f"{worst['layer']}, {worst['expert']}" if worst["error"] else "exact"
            form = layout.format(matrix).name
            table.add_row(twin.upper(), matrix, form, f"{row['error']:.4f}", f"{worst['error']:.4f}", at)
    console.print(table)
    for twin, layout in (("HIGH", manifest.high), ("LOW", manifest.low)):
        say(
            f"{twin:4} {layout.stride:,} bytes an expert, {layout.bits_per_weight:.2f} bits a weight with scales and "
            f"padding, {human(layout.stride * experts)} in all"
        )
    for what, count in manifest.fallbacks.items():
        say(
            f"note: {count} LOW matrices of {2 * experts} are {what}: too few calibration tokens chose their experts (calibrate "
            "with more --tokens), or the calibration's --block is smaller than a group"
        )
