"""The report as one plain dict, which goes to report.json and which the other files show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.core.ledger import Ledger
from apex_engine.eval.bench import Bench
from apex_engine.eval.delta import LIMIT, mean_drop, overall
from apex_engine.eval.identity import versions
from apex_engine.eval.machine import machine
from apex_engine.eval.perplexity import Comparison

SETTINGS = ("tasks", "limit", "num_fewshot", "max_length", "apply_chat_template", "text_tokens", "length")
DIGITS = 6  # significant ones that are reported


@dataclass(frozen=True)
class Measured:
    """What the modes were found to do, beside the reference."""

    rows: list[dict[str, Any]]  # of the tasks, as `task_rows` makes them
    texts: dict[str, dict[str, Comparison]]  # text -> mode -> comparison
    ledgers: dict[str, Ledger]  # by mode
    missing: list[str]  # what was not measured, and why
    seconds: dict[str, float]


def make_report(bench: Bench, measured: Measured) -> dict[str, Any]:
    args, engine = bench.args, bench.pair.engine
    means = {mode: mean for mode in args.modes if (mean := mean_drop(measured.rows, mode))}
    best = bench.manifest.twins[-1].layout.up.name
    missing = measured.missing
    if not args.reference and best == "int8":
        missing = [*missing, "the reference has INT8 HIGH twins, not the source's 16 bits: --reference SOURCE has"]
    report = {
        "verdict": overall(measured.rows, means.get(args.modes[0], {}), args.modes[0]),
        "limit": LIMIT,
        "checkpoint": {"folder": bench.folder.resolve().name, **twins(bench.manifest)},
        "reference": f"{args.reference} through transformers"
        if args.reference
        else f"all HIGH twins ({best}) of the same checkpoint, mode exact",
        "thresholds": {
            "t1": engine.thresholds.t1,
            "t2": engine.thresholds.t2,
            "from": engine.thresholds.origin,
        },
        "modes": args.modes,
        "settings": {
            **{name: getattr(args, name) for name in SETTINGS},
            "dtype": str(bench.pair.dtype).removeprefix("torch."),
            "memory": engine.config.memory,
            "policy": engine.config.policy,
        },
        "tasks": measured.rows,
        "mean": means,
        "text": _text(measured.texts),
        "ledger": {mode: _ledger(ledger) for mode, ledger in measured.ledgers.items()} if measured.texts else {},
        "not_measured": missing,
        "curve": _curve(bench.calibration),
        "versions": versions(),
        "hardware": machine(bench.pair.device),
        "seconds": measured.seconds,
    }
    rounded: dict[str, Any] = _rounded(report)
    return rounded


def twins(manifest: Manifest) -> dict[str, Any]:
    """Where they come from; the highest one's format, those of the others' matrices, and how the others were made."""
    layouts = {manifest.words[p]: manifest.layout(p) for p in reversed(manifest.precisions)}
    best, *others = layouts
    return {
        "source": manifest.source,
        "fingerprint": manifest.fingerprint,
        best: layouts[best].up.name,
        **{word: {"up": layouts[word].up.name, "down": layouts[word].down.name} for word in others},
        "low_method": manifest.options["low_method"],
        **{f"{word}_bits": layouts[word].bits_per_weight for word in others},
    }


def _text(texts: dict[str, dict[str, Comparison]]) -> dict[str, Any] | None:
    if not texts:
        return None
    modes = list(next(iter(texts.values())))
    joined = {mode: Comparison.joined([found[mode] for found in texts.values()]) for mode in modes}

    def row(found: dict[str, Comparison]) -> dict[str, Any]:
        any_mode = next(iter(found.values()))
        return {
            "tokens": any_mode.tokens,
            "reference_perplexity": any_mode.reference_perplexity,
            "modes": {mode: comparison.summary() for mode, comparison in found.items()},
        }

    return {
        "what": ", ".join(texts),
        **row(joined),
        "by_text": [{"name": name, **row(found)} for name, found in texts.items()],
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    summary = ledger.summary()
    return {name: summary[name] for name in ("calls", "share_of_calls", "share_of_gate_mass", "bytes_read", "hit_rate")}


def _curve(calibration: dict[str, Any] | None) -> list[dict[str, float]] | None:
    if calibration is None:
        return None
    names = ("kl", "share_low", "share_skip", "gate_mass_low")
    return [{name: point[name] for name in names} for point in calibration["curve"]]


def _rounded(value: Any) -> Any:
    """Floats to DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
