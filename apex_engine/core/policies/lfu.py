"""Least frequently used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import PassBegins, Use
from apex_engine.core.policies.base import Index, Policy, least
from apex_engine.core.vocabulary import Geometry, Precision


class Lfu(Policy):
    """Least frequently used first: uses of the twin in this sequence, by the tokens that used it."""

    def __init__(self, geometry: Geometry) -> None:
        self.handlers = {PassBegins: self._begin, Use: self._use}
        self._uses = np.zeros(geometry.shape)

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence:
            self._uses[:] = 0

    def _use(self, use: Use) -> None:
        self._uses[use.precision, use.layer, use.expert] += use.tokens

    def values(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        return self._uses[precision, layers, experts]

    def finalists(self, layers: Index, eligible: NDArray[np.bool_], precision: Precision) -> Index:
        return least(self._uses[precision, layers], eligible)
