"""From what a layer's tokens want to which twin serves which token: the table of the scorer, as arithmetic.

With two twins:

    wanted  resident             what happens
    HIGH    HIGH                 HIGH
    HIGH    LOW or none          fetch HIGH: a resident LOW does not satisfy it
    LOW     HIGH, LOW            the better of them
    LOW     none                 fetch LOW
    SKIP    HIGH, LOW            the better of them: it is free
    SKIP    none                 dropped for this token

With any number of them: the best that is resident if that is enough, else what is wanted. With `degrade`, the best that is
resident serves where there is one, and the caller fetches what is wanted for later.

An expert that several tokens chose is served to all of them at the highest precision any of them wants, and is dropped only
when all of them would. Without a residency every token gets exactly what its own score says, resident or not.

Letters: T tokens, K chosen experts a token.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.residency import Residency
from apex_engine.core.vocabulary import ExpertId, Precision

TOKEN, CHOICE = np.zeros(1, np.int64), np.arange(1024)  # of one token's pairs


class Served(NamedTuple):
    """One twin and the (token, choice) pairs it serves. Precision SKIP: the pairs that are dropped."""

    expert: int
    precision: Precision
    tokens: NDArray[np.int64]
    choices: NDArray[np.int64]


def dispatch(
    layer: int,
    chosen: NDArray[np.int64],
    wanted: NDArray[np.int8],
    residency: Residency | None,
    degrade: bool = False,
) -> list[Served]:
    """Router choices `[T, K]` and wanted precisions `[T, K]` of a layer -> what serves them, each pair in exactly one.

    `residency`: None where what is resident must make no difference.
    """
    if len(chosen) == 1:  # decoding: no two pairs have the same expert
        served = []
        for i, (expert, wish) in enumerate(zip(chosen[0].tolist(), wanted[0].tolist(), strict=True)):
            precision = serve(ExpertId(layer, expert), wish, residency, degrade) if residency is not None else wish
            served.append(Served(expert, precision, TOKEN, CHOICE[i : i + 1]))
        return served
    flat, wishes = chosen.ravel(), wanted.ravel()
    order = flat.argsort(kind="stable")
    ranked = flat[order]
    bounds = [0, *(np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist(), len(flat)]
    served = []
    for start, stop in itertools.pairwise(bounds if len(flat) else []):
        expert, pairs = int(ranked[start]), order[start:stop]
        of_expert = wishes[pairs]
        if residency is not None:
            split = [(serve(ExpertId(layer, expert), int(of_expert.max()), residency, degrade), pairs)]
        else:
            split = [(p, pairs[of_expert == p]) for p in sorted(set(of_expert.tolist()), reverse=True)]
        served += [Served(expert, p, *np.divmod(some, chosen.shape[1])) for p, some in split]
    return served


def serve(expert: ExpertId, wish: Precision, residency: Residency, degrade: bool = False) -> Precision:
    """The precision at which an expert that is worth `wish` is used."""
    best = residency.best(expert)
    return best if best >= wish or (degrade and best) else wish
