"""From what a layer's tokens want to which twin serves which token: the table of the scorer, as arithmetic.

    wanted  resident             what happens
    HIGH    HIGH                 HIGH
    HIGH    LOW or none          fetch HIGH: a resident LOW does not satisfy it
    LOW     HIGH, LOW            the better of them
    LOW     none                 fetch LOW
    SKIP    HIGH, LOW            the better of them: it is free
    SKIP    none                 dropped for this token

With `degrade`, HIGH wanted and only LOW resident: LOW serves, and the caller fetches HIGH for later.

An expert that several tokens chose is served to all of them at the highest precision any of them wants, and is dropped only
when all of them would. In `deterministic` mode every token gets exactly what its own score says, resident or not; in `exact`
mode everything is HIGH.

Letters: T tokens, K chosen experts a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.vocabulary import Precision

PRECISIONS = tuple(Precision)
TOKEN, CHOICE = np.zeros(1, np.int64), np.arange(1024)  # of one token's pairs
Resident = Callable[[int, Precision], bool]


class Use(NamedTuple):
    """One twin and the (token, choice) pairs it serves. Precision.SKIP: the pairs that are dropped."""

    expert: int
    precision: Precision
    tokens: NDArray[np.int64]
    choices: NDArray[np.int64]


def dispatch(
    chosen: NDArray[np.int64], wanted: NDArray[np.int8], mode: str, resident: Resident, degrade: bool = False
) -> list[Use]:
    """Router choices `[T, K]` and wanted precisions `[T, K]` -> uses, each pair in exactly one.

    `resident(expert, precision)` is asked in adaptive mode only.
    """
    if len(chosen) == 1:  # decoding: no two pairs have the same expert
        uses = []
        for i, (expert, wish) in enumerate(zip(chosen[0].tolist(), wanted[0].tolist(), strict=True)):
            precision = Precision.HIGH if mode == "exact" else PRECISIONS[wish]
            if mode == "adaptive":
                precision = _served(expert, precision, resident, degrade)
            uses.append(Use(expert, precision, TOKEN, CHOICE[i : i + 1]))
        return uses
    flat, wishes = chosen.ravel(), wanted.ravel()
    order = flat.argsort(kind="stable")
    ranked = flat[order]
    bounds = [0, *(np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist(), len(flat)]
    uses = []
    for start, stop in itertools.pairwise(bounds if len(flat) else []):
        expert, pairs = int(ranked[start]), order[start:stop]
        if mode == "deterministic":
            of_expert = wishes[pairs]
            split = [(p, pairs[of_expert == p]) for p in reversed(Precision)]
        elif mode == "exact":
            split = [(Precision.HIGH, pairs)]
        else:
            split = [(_served(expert, Precision(wishes[pairs].max()), resident, degrade), pairs)]
        uses += [Use(expert, p, *np.divmod(some, chosen.shape[1])) for p, some in split if some.size]
    return uses


def _served(expert: int, wish: Precision, resident: Resident, degrade: bool) -> Precision:
    if resident(expert, Precision.HIGH):
        return Precision.HIGH
    if wish is Precision.HIGH:
        return Precision.LOW if degrade and resident(expert, Precision.LOW) else Precision.HIGH
    if wish is Precision.LOW or resident(expert, Precision.LOW):
        return Precision.LOW
    return Precision.SKIP
