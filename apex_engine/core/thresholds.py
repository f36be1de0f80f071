"""T1 and T2 of each layer: given, by default, or from the calibration beside a checkpoint.

What a LOW twin does to a token's logits depends on the layer far more than on the gate score. For a limit on the KL divergence,
the thresholds are chosen so that it is spent where it saves most bytes:

    minimise  sum over layers l of  KL_l - price * saved_l        KL_l = sensitivity_l * damage_l(T1_l, T2_l)

damage_l is the squared error of the layer's output, from errors of the twins recorded by score (`Profile`); sensitivity_l is
measured, once a layer; saved_l are the bytes that need not come. The price is what the limit makes it.

Letters: L MoE layers, S bins of the score; the first bin holds each token's first expert, whose score is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 100  # of the score in (0, 1]; bin b >= 1 holds ((b - 1) / BINS, b / BINS]
QUANTILES = (0.67, 0.97)  # MoE-APEX's shares: HIGH, HIGH or LOW
# Without a calibration: t1, t2, first_t1. "quantile" stands for MoE-APEX's, which are Mixtral's.
DEFAULTS = {"calibrated": (0.5, 0.95, 0.75), "quantile": (0.6, 0.9, 0.6)}


@dataclass(frozen=True)
class Thresholds:
    """The score's thresholds of each MoE layer, one for each twin, and where they come from.

    `bounds[layer]` is T1 <= .. <= Tn: the highest precision up to T1, skipped above Tn.
    """

    bounds: tuple[tuple[float, ...], ...]
    origin: str = ""

    @classmethod
    def of(cls, t1: Sequence[float], t2: Sequence[float], origin: str = "") -> Thresholds:
        """Of two twins, by layer."""
        return cls(tuple(zip(t1, t2, strict=True)), origin)

    @property
    def t1(self) -> tuple[float, ...]:
        """By layer: up to this, an expert comes at the highest precision."""
        return tuple(bounds[0] for bounds in self.bounds)

    @property
    def t2(self) -> tuple[float, ...]:
        """By layer: above this, an expert is skipped."""
        return tuple(bounds[-1] for bounds in self.bounds)

    @property
    def calibrated(self) -> bool:
        return self.origin.startswith("calibrated")

    @classmethod
    def uniform(
        cls, layers: int, t1: float, t2: float, first_t1: float, origin: str = "", twins: int = 2
    ) -> Thresholds:
        """The same everywhere, but for a first layer that is spared (unless `t1` is negative, which asks for LOW throughout).
        Of more than two twins, the thresholds between t1 and t2 lie at equal distances; of one, there is t2 alone."""
        first = max(t1, first_t1) if t1 >= 0 else t1
        each, spared = _spread(t1, t2, twins), _spread(first, max(t2, first), twins)
        return cls((spared, *[each] * (layers - 1)), origin)

    def describe(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"t1": list(self.t1), "t2": list(self.t2), "origin": self.origin}


def _spread(t1: float, t2: float, twins: int) -> tuple[float, ...]:
    return tuple(t2 if i == twins - 1 else t1 + (t2 - t1) * i / (twins - 1) for i in range(twins))


@dataclass(frozen=True)
class Profile:
    """What was chosen in an exact pass, per token, by layer and bin of the score: float64 `[L, 1 + BINS]` each."""

    calls: NDArray[np.float64]  # selections
    mass: NDArray[np.float64]  # their share of the gate mass of the token
    low_error: NDArray[np.float64]  # g^2 |y_high - y_low|^2
    skip_error: NDArray[np.float64]  # g^2 |y_high|^2


def bin_of(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bin of each score."""
    return np.minimum(np.ceil(scores * BINS), BINS).astype(np.int64)


def bins_above(thresholds: tuple[float, ...]) -> NDArray[np.bool_]:
    """`[L, 1 + BINS]`: which bins lie above each layer's threshold, which is a multiple of 1 / BINS, or negative."""
    return np.arange(1 + BINS) > np.round(np.array(thresholds) * BINS)[:, None]


def quantiles(profile: Profile) -> tuple[float, float]:
    """T1 and T2 that leave the shares QUANTILES of all selections at or below them, rounded to the bins."""
    shares = profile.calls.sum(0).cumsum() / profile.calls.sum()
    t1, t2 = (int(np.argmin(np.abs(shares - quantile))) / BINS for quantile in QUANTILES)
    return t1, t2


def cheapest(
    profile: Profile, sensitivity: NDArray[np.float64], high_bytes: int, low_bytes: int, limit: float
) -> tuple[Thresholds, float]:
    """The thresholds that save most bytes at an estimated KL of at most `limit`, and that estimate.

    `sensitivity` `[L]`: KL by damage. T1 = -1 makes even a token's first expert LOW; it is never skipped.
    """
    low, skip, calls = (_tails(part) for part in (profile.low_error, profile.skip_error, profile.calls))
    # T1 is one of -1, 0, .01, .., 1 and T2 one of 0, .01, .., 1: KL and bytes saved of each pair, [L, S + 1, S].
    kl = sensitivity[:, None, None] * (low[:, :, None] - low[:, None, 1:] + skip[:, None, 1:])
    saved = (high_bytes - low_bytes) * calls[:, :, None] + low_bytes * calls[:, None, 1:]
    layers, pairs = len(kl), kl.shape[1:]
    usable = np.arange(pairs[0])[:, None] <= 1 + np.arange(pairs[1])  # T1 <= T2
    kl, saved = (np.where(usable, part, bad).reshape(layers, -1) for part, bad in ((kl, np.inf), (saved, -1.0)))
    every = np.arange(layers)

    # The KL rises with the price of a byte.
    least, most = -60.0, 20.0
    for _ in range(60):
        middle = (least + most) / 2
        fits = kl[every, (kl - math.exp(middle) * saved).argmin(1)].sum() <= limit
        least, most = (middle, most) if fits else (least, middle)
    chosen = (kl - math.exp(least) * saved).argmin(1)
    t1, t2 = np.unravel_index(chosen, pairs)
    found = Thresholds.of(np.where(t1 == 0, -1.0, (t1 - 1) / BINS).tolist(), (t2 / BINS).tolist())
    return found, float(kl[every, chosen].sum())


def _tails(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[L, S]` -> `[L, S + 1]`: sums of the bins from each one on."""
    return np.pad(values[:, ::-1].cumsum(1)[:, ::-1], ((0, 0), (0, 1)))
