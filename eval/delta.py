"""Paired differences between two lm-eval runs over the same items: what changed, how surely, and a verdict.

    d_i = value of item i on the engine - its value on the reference         difference = mean d_i, error = sd(d_i) / sqrt(n)
    right or wrong: b items lost, c won                                      error = sqrt(b + c + 1 - (c - b)^2 / n) / n

Pairs share what makes an item hard, so this error is far smaller than that of either score. Perplexities are compared by the
log-likelihood of each document; their difference is relative. Pure arithmetic on lm-eval's samples.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

SURE = 1.645  # standard errors: one side, 95 %
LIMIT = 0.01  # the drop that is judged against: one point of accuracy, one percent of perplexity
WITHIN, WORSE, OPEN = "within 1 %", "worse", "not shown"
# lm-eval gives each document's log-likelihood for these; (log-likelihood, words) for the second.
LOSS, WEIGHTED_LOSS = "perplexity", "word_perplexity"
REDUNDANT = ("byte_perplexity", "bits_per_byte", "bypass")  # the same sums in other units; nothing


@dataclass(frozen=True)
class Difference:
    """`difference` and `stderr` are shares of the reference where `relative`. Flips are counted where values are 0 or 1."""

    reference: float
    value: float
    difference: float
    stderr: float | None
    relative: bool
    items: int
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None

    def verdict(self, higher_is_better: bool) -> str:
        return verdict(-self.difference if higher_is_better else self.difference, self.stderr)


def verdict(drop: float, stderr: float | None) -> str:
    """`drop`: how much worse, as a share. Without an error (a single item) nothing is shown."""
    if stderr is None:
        return OPEN
    if drop + SURE * stderr <= LIMIT:
        return WITHIN
    return WORSE if drop > LIMIT and drop - SURE * stderr > 0 else OPEN


def compare_values(reference: list[Any], engine: list[Any], metric: str) -> Difference:
    """Values of `metric`, as lm-eval's samples have them, of the same items in the same order."""
    n = len(reference)
    if metric in (LOSS, WEIGHTED_LOSS):
        pairs = [(_loss(r), _loss(e)) for r, e in zip(reference, engine, strict=True)]
        weights = [weight for (_, weight), _ in pairs]
        total = sum(weights)
        before, after = (sum(pair[side][0] for pair in pairs) / total for side in (0, 1))
        rise = after - before
        # The error of a ratio of sums.
        rest = [e[0] - r[0] - rise * weight for (r, e), weight in zip(pairs, weights, strict=True)]
        error = math.sqrt(sum(x * x for x in rest) * n / (n - 1)) / total if n > 1 else None
        return Difference(math.exp(before), math.exp(after), math.expm1(rise), error, True, n)
    changes = [float(e) - float(r) for r, e in zip(reference, engine, strict=True)]
    error = statistics.stdev(changes) / math.sqrt(n) if n > 1 else None
    flips: dict[str, int] = {}
    if {float(value) for value in [*reference, *engine]} <= {0.0, 1.0}:
        lost, won = changes.count(-1.0), changes.count(1.0)
        flips = {"right_to_wrong": lost, "wrong_to_right": won}
        # Half a flip each way is added: that a few items had none is no certainty that more would have none.
        error = math.sqrt(lost + won + 1 - (won - lost) ** 2 / n) / n
    return Difference(
        statistics.fmean(reference), statistics.fmean(engine), statistics.fmean(changes), error, False, n, **flips
    )


def _loss(value: Any) -> tuple[float, float]:
    """(negative log-likelihood, weight) of one document."""
    likelihood, weight = value if isinstance(value, (tuple, list)) else (value, 1.0)
    return -float(likelihood), float(weight)


def task_rows(reference: dict[str, Any], engines: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each task, filter and metric, and the metrics that cannot be compared item by item.

    `reference` and each of `engines` (by mode): a result of lm-eval with samples. Raises ValueError where the items are not
    the same.
    """
    rows, skipped = [], []
    for task, samples in sorted(reference["samples"].items()):
        better = reference["higher_is_better"].get(task, {})
        for metric, by_filter in _values(samples).items():
            if not all(_comparable(metric, v) for values in by_filter.values() for v in values.values()):
                skipped.append(f"{task}: {metric} has no value of a single item")
                continue
            for name, values in by_filter.items():
                label = metric if name == "none" else f"{metric} ({name})"
                row: dict[str, Any] = {"task": task, "metric": label, "items": len(values)}
                row |= {"higher_is_better": better.get(metric, metric not in (LOSS, WEIGHTED_LOSS))}
                row["modes"] = {}
                for mode, result in engines.items():
                    others = _values(result["samples"][task])[metric][name]
                    if list(values) != list(others):
                        raise ValueError(f"{task}: the items of {mode} are not those of the reference")
                    found = compare_values(list(values.values()), list(others.values()), metric)
                    row["reference"] = found.reference
                    row["modes"][mode] = {
                        "value": found.value,
                        "difference": found.difference,
                        "stderr": found.stderr,
                        "relative": found.relative,
                        "verdict": found.verdict(row["higher_is_better"]),
                        "right_to_wrong": found.right_to_wrong,
                        "wrong_to_right": found.wrong_to_right,
                    }
                rows.append(row)
    return rows, skipped


def _comparable(metric: str, value: Any) -> bool:
    return metric in (LOSS, WEIGHTED_LOSS) or isinstance(value, (bool, int, float, np.number, np.bool_))


def _values(samples: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """metric -> filter -> item -> value."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if metric not in REDUNDANT:
                by_item = found.setdefault(metric, {}).setdefault(sample["filter"], {})
                by_item[f"{sample['doc_id']} {sample['doc_hash']}"] = sample[metric]
    return found


def mean_drop(rows: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Mean drop of the tasks that have an accuracy, one metric of each (the first); {} where there is none."""
    firsts: dict[str, dict[str, Any]] = {}
    for row in rows:
        if not row["modes"][mode]["relative"] and row["higher_is_better"]:
            firsts.setdefault(row["task"], row["modes"][mode])
    if not firsts:
        return {}
    drop = statistics.fmean(-found["difference"] for found in firsts.values())
    errors = [found["stderr"] for found in firsts.values()]
    error = math.hypot(*errors) / len(errors) if None not in errors else None
    return {"tasks": len(firsts), "drop": drop, "stderr": error, "verdict": verdict(drop, error)}


def overall(rows: list[dict[str, Any]], mean: dict[str, Any], mode: str) -> str:
    """The mean's verdict; of tasks without an accuracy, the worst one's."""
    if mean:
        return str(mean["verdict"])
    verdicts = {row["modes"][mode]["verdict"] for row in rows}
    return next((v for v in (WORSE, OPEN, WITHIN) if v in verdicts), OPEN)
