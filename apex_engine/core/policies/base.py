"""Which resident twin makes room: the contract of a policy."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import Handlers
from apex_engine.core.vocabulary import Precision

Index = NDArray[np.int64]


class Policy(Protocol):
    """Contract: a sink of events (`PassBegins`, `Use`), asked for values; the resident twin of the lowest value is evicted.

    Arithmetic over counts and distances: a policy sees neither the cache nor a clock. Records start afresh with every sequence;
    contents of the cache stay. A policy is made with the `Geometry` of the model.
    """

    handlers: Handlers
    ages: bool = False  # whether values of a layer may change order when a pass begins

    def values(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        """Value of each twin `(layers[i], experts[i])` at `precision` while layer `now` is at work; changes nothing."""

    def finalists(self, layers: Index, eligible: NDArray[np.bool_], precision: Precision) -> Index:
        """For each of `layers` `[D]` with its `eligible` experts `[D, E]`, a few of these `[D, F]`, -1 where there are fewer.

        The least valued of a layer's eligible experts must be one of them whatever layer is at work, until the layer is used
        again (or, if it `ages`, a pass begins). With few of them, finding a victim costs the same however many twins are
        resident; a policy that says nothing of it is asked about all.
        """
        return np.where(eligible, np.arange(eligible.shape[1]), -1)


def least(records: NDArray[np.float64], eligible: NDArray[np.bool_]) -> Index:
    """The eligible expert of the smallest record in each layer: `[D, E]`, `[D, E]` -> `[D, 1]`; -1 where none is eligible."""
    found = np.where(eligible, records, np.inf).argmin(1)
    return np.where(eligible.any(1), found, -1)[:, None]
