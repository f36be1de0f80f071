"""Cumulative-gate scorer: what each expert a token chose is worth to it, from the token's gate weights alone.

With a token's chosen experts in order of decreasing |gate weight|, weights normalised to sum 1 (MoE-APEX, section on
token-level loading; HOBBIT uses the same rule):

    s_0 = 0,  s_i = sum over j < i of |g_j|         s <= T1: HIGH    T1 < s <= T2: LOW    s > T2: SKIP

With n twins there are n thresholds, T1 <= .. <= Tn: each one that the score passes costs a precision, from n down to SKIP.

Letters: T tokens, K chosen experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def wanted(weights: NDArray[np.float32], thresholds: Sequence[float]) -> NDArray[np.int8]:
    """Precision that each chosen expert of each token is worth: gate weights `[T, K]` -> `[T, K]`. `thresholds`: T1 .. Tn.

    A gate weight that is not a number wants the highest: nothing is dropped on account of it, and it shows in the output.
    """
    if len(weights) == 1:  # decoding: the same without arrays
        return np.array([_wanted_by_one(weights[0].tolist(), thresholds)], np.int8)
    s = scores(weights)
    result = np.full(s.shape, len(thresholds), np.int8)
    for threshold in thresholds:
        result -= s > threshold
    return result


def _wanted_by_one(weights: list[float], thresholds: Sequence[float]) -> list[Precision]:
    magnitude = [abs(weight) for weight in weights]
    order = sorted(range(len(magnitude)), key=lambda i: -magnitude[i])
    total, sum_before = 0.0, 0.0
    for i in order:
        total += magnitude[i]
    total = max(total, TINY)
    result = [len(thresholds)] * len(magnitude)
    for i in order:
        score = sum_before / total
        for threshold in thresholds:
            if not score > threshold:
                break
            result[i] -= 1
        sum_before += magnitude[i]
    return result
