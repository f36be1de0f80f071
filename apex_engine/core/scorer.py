"""Cumulative-gate scorer: what each expert a token chose is worth to it, from the token's gate weights alone.

With a token's chosen experts in order of decreasing |gate weight|, weights normalised to sum 1 (MoE-APEX, section on
token-level loading; HOBBIT uses the same rule):

    s_0 = 0,  s_i = sum over j < i of |g_j|         s <= T1: HIGH    T1 < s <= T2: LOW    s > T2: SKIP

Letters: T tokens, K chosen experts a token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.vocabulary import Precision

TINY = float(np.finfo(np.float64).tiny)


def scores(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cumulative score of each chosen expert, in the order given: gate weights `[T, K]` -> `[T, K]`, in [0, 1]."""
    magnitude = np.abs(weights.astype(np.float64))
    order = np.argsort(-magnitude, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(magnitude, order, axis=1), axis=1)
    before = np.zeros_like(sums)
    # The total is the last of the same sums, so that no score passes 1 by rounding.
    before[:, 1:] = sums[:, :-1] / np.maximum(sums[:, -1:], TINY)
    result = np.empty_like(before)
    np.put_along_axis(result, order, before, axis=1)
    return result


def wanted(weights: NDArray[np.float32], t1: float, t2: float) -> NDArray[np.int8]:
    """Precision (as its integer) that each chosen expert of each token is worth: gate weights `[T, K]` -> `[T, K]`.

    A gate weight that is not a number wants HIGH: nothing is dropped on account of it, and it shows in the output.
    """
    if len(weights) == 1:  # decoding: the same without arrays
        return np.array([_wanted_by_one(weights[0].tolist(), t1, t2)], np.int8)
    s = scores(weights)
    result = np.full(s.shape, Precision.HIGH, np.int8)
    result[s > t1] = Precision.LOW
    result[s > t2] = Precision.SKIP
    return result


def _wanted_by_one(weights: list[float], t1: float, t2: float) -> list[Precision]:
    magnitude = [abs(weight) for weight in weights]
    order = sorted(range(len(magnitude)), key=lambda i: -magnitude[i])
    total, sum_before = 0.0, 0.0
    for i in order:
        total += magnitude[i]
    result = [Precision.HIGH] * len(magnitude)
    for i in order:
        score = sum_before / max(total, TINY)
        if score > t1:
            result[i] = Precision.SKIP if score > t2 else Precision.LOW
        sum_before += magnitude[i]
    return result
