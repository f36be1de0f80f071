"""Least recently used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import PassBegins, Use
from apex_engine.core.policies.base import Index, Policy, least
from apex_engine.core.vocabulary import Geometry, Precision


class Lru(Policy):
    """Least recently used first."""

    def __init__(self, geometry: Geometry) -> None:
        self.handlers = {PassBegins: self._begin, Use: self._use}
        self._last = np.zeros(geometry.shape)
        self._clock = 0

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence:
            self._last[:] = 0
            self._clock = 0

    def _use(self, use: Use) -> None:
        self._clock += 1
        self._last[use.precision, use.layer, use.expert] = self._clock

    def values(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        return self._last[precision, layers, experts]

    def finalists(self, layers: Index, eligible: NDArray[np.bool_], precision: Precision) -> Index:
        return least(self._last[precision, layers], eligible)
