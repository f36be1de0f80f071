"""What the twins cost in error: sums over the experts of a model, as the journal has them, in the words of the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from apex_engine.checkpoint.twin import Twin
from apex_engine.kernels.layout import MATRICES

# How a grouped matrix is made where second moments are given: as asked for, or in a simpler way for want of tokens or of blocks
FALLBACKS = ("as asked for", "clip instead of gptq", "unweighted")
# Of one layer: by "int2.down" `[squared error, squared weight]` of each expert, by "as.int2.down" `[index in FALLBACKS]`
LayerErrors = dict[str, list[list[float]]]


def summarize(errors: Mapping[int, LayerErrors], twins: tuple[Twin, ...]) -> dict[str, Any]:
    """Relative error `|w - twin| / |w|` of each twin and matrix over the whole model, and the worst single matrix of each.
    `errors`: by the layers' numbers."""
    summary = {}
    for kind in (f"{twin.name}.{matrix}" for twin in twins for matrix in MATRICES):
        rows = [(*pair, number, e) for number in sorted(errors) for e, pair in enumerate(errors[number][kind])]
        ratio, number, expert = max((_ratio(error, weight), number, e) for error, weight, number, e in rows)
        summary[kind] = {
            "error": _ratio(sum(row[0] for row in rows), sum(row[1] for row in rows)),
            "worst": {"error": ratio, "layer": number, "expert": expert},
        }
    return summary


def count_fallbacks(errors: Mapping[int, LayerErrors], twins: tuple[Twin, ...]) -> dict[str, int]:
    """How many grouped matrices were not made as asked for, by how they were made instead; the twin is named where several have
    such matrices."""
    grouped = [twin for twin in twins if twin.grouped]
    counts: dict[str, int] = {}
    for twin in grouped:
        keys = [f"as.{twin.name}.{matrix}" for matrix in twin.grouped]
        made = [int(row[0]) for layer in errors.values() for key in keys for row in layer.get(key, ())]
        of = f" ({twin.name})" if len(grouped) > 1 else ""
        counts |= {f"{what}{of}": made.count(i) for i, what in enumerate(FALLBACKS) if i and i in made}
    return counts


def _ratio(error: float, weight: float) -> float:
    return math.sqrt(error / weight) if weight else 0.0
