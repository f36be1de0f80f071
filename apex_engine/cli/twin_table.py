"""What the twins of a checkpoint cost in bytes and in error, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from apex_engine.errors import human

if TYPE_CHECKING:
    from apex_engine.checkpoint.manifest import Manifest

COLUMNS = ("twin", "matrix", "format", "relative error", "worst one", "at layer, expert")


def twin_table(manifest: Manifest) -> Table:
    """A row for each twin and matrix, highest twin first."""
    experts = manifest.experts * len(manifest.layers)
    table = Table(title=f"{experts} experts in {len(manifest.layers)} layers, dense part {human(manifest.dense_bytes)}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("twin", "matrix", "format") else "right")
    for precision in reversed(manifest.precisions):
        twin = manifest.twins[precision - 1]
        for matrix in ("up", "down"):
            row = manifest.errors[f"{twin.name}.{matrix}"]
            worst = row["worst"]
            at = f"{worst['layer']}, {worst['expert']}" if worst["error"] else "exact"
            form = twin.layout.format(matrix).name
            word = manifest.words[precision].upper()
            table.add_row(word, matrix, form, f"{row['error']:.4f}", f"{worst['error']:.4f}", at)
    return table


def twin_lines(manifest: Manifest) -> Iterator[str]:
    """A line on the bytes of each twin, highest first; then what was not made as asked for."""
    experts = manifest.experts * len(manifest.layers)
    width = max(map(len, manifest.words))
    for precision in reversed(manifest.precisions):
        layout = manifest.layout(precision)
        yield (
            f"{manifest.words[precision].upper():{width}} {layout.stride:,} bytes an expert, {layout.bits_per_weight:.2f} bits a "
            f"weight with scales and padding, {human(layout.stride * experts)} in all"
        )
    lower = "LOW" if len(manifest.twins) == 2 else "grouped"
    grouped = sum(len(twin.grouped) for twin in manifest.twins)
    for what, count in manifest.fallbacks.items():
        yield (
            f"note: {count} {lower} matrices of {grouped * experts} are {what}: too few calibration tokens chose their experts "
            "(calibrate with more --tokens), or the calibration's --block is smaller than a group"
        )
