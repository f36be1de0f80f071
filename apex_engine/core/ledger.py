"""What the trade cost: every expert call, byte and second is counted here and nowhere else.

call   one (token, chosen expert) pair of the router
use    one twin used by one layer step, for one or more tokens: a hit when it was resident, else a load
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from apex_engine.core.vocabulary import Precision

TWINS = (Precision.HIGH, Precision.LOW)


def _zeros() -> dict[Precision, int]:
    return dict.fromkeys(Precision, 0)


@dataclass
class Ledger:
    """Counters since the last `clear`, i.e. since loading or the user's reset."""

    calls: dict[Precision, int] = field(default_factory=_zeros)  # by what the token got
    mass: dict[Precision, float] = field(default_factory=lambda: dict.fromkeys(Precision, 0.0))  # |gate weight| of them
    asked: dict[Precision, int] = field(default_factory=_zeros)  # calls by what the score wanted
    hits: dict[Precision, int] = field(default_factory=_zeros)
    loads: dict[Precision, int] = field(default_factory=_zeros)
    bytes_read: dict[Precision, int] = field(default_factory=_zeros)
    sequences: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})  # of forward passes
    stall_seconds: float = 0.0  # a step had nothing to do but wait for twins
    stall_busy_seconds: float = 0.0  # of these, with something on its way
    busy_seconds: float = 0.0  # something was on its way
    compute_seconds: float = 0.0
    degraded: int = 0  # calls that wanted HIGH and got the resident LOW (`upgrade="async"`)
    prefetched_bytes: int = 0  # brought before anyone asked
    useful_bytes: int = 0  # of these, of twins asked for while they were there or on their way
    failed_prefetches: int = 0
    predicted: int = 0  # (token, layer) pairs of decoding that were predicted
    predicted_top1: int = 0  # with the likeliest expert right
    predicted_all: int = 0  # with all of them right
    missing: int = 0  # uses of twins that were not resident, or only thanks to a prefetch
    foreseen: int = 0  # of these, the ones that were prefetched or on their way

    @property
    def demanded_bytes(self) -> int:
        """Of the twins that were asked for and not resident, whether a prefetch brought them or not."""
        return sum(self.bytes_read.values()) - self.prefetched_bytes + self.useful_bytes

    def summary(self) -> dict[str, Any]:
        """Plain JSON: counts, shares, rates, seconds. A rate without a denominator is None."""
        calls, mass = sum(self.calls.values()), sum(self.mass.values())
        forward = sum(self.seconds.values())
        return {
            "sequences": self.sequences,
            "tokens": dict(self.tokens),
            "tokens_per_second": {phase: _rate(self.tokens[phase], self.seconds[phase]) for phase in self.tokens},
            "calls": {"total": calls, **_by_word(self.calls), "degraded": self.degraded},
            "share_of_calls": {p.word: _rate(self.calls[p], calls) for p in reversed(Precision)},
            "share_of_gate_mass": {p.word: _rate(self.mass[p], mass) for p in reversed(Precision)},
            "asked": _by_word(self.asked),
            "hits": {p.word: self.hits[p] for p in TWINS},
            "loads": {p.word: self.loads[p] for p in TWINS},
            "hit_rate": {p.word: _rate(self.hits[p], self.hits[p] + self.loads[p]) for p in TWINS},
            "bytes_read": {"total": sum(self.bytes_read.values()), **{p.word: self.bytes_read[p] for p in TWINS}},
            "prefetch": {
                "bytes": self.prefetched_bytes,
                "useful_bytes": self.useful_bytes,
                "wasted_bytes": self.prefetched_bytes - self.useful_bytes,
                "failed": self.failed_prefetches,
                "coverage": _rate(self.foreseen, self.missing),
                "predictions": self.predicted,
                "top1_right": _rate(self.predicted_top1, self.predicted),
                "all_right": _rate(self.predicted_all, self.predicted),
            },
            "seconds": {
                **self.seconds,
                "stall": self.stall_seconds,
                "stall_while_loading": self.stall_busy_seconds,
                "loading": self.busy_seconds,
                "compute": self.compute_seconds,
                "rest": max(0.0, forward - self.stall_seconds - self.compute_seconds),
            },
        }


def _by_word(counts: dict[Precision, int]) -> dict[str, int]:
    return {p.word: counts[p] for p in reversed(Precision)}


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None
