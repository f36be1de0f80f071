"""Frequency that fades with age."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import PassBegins, Use
from apex_engine.core.policies.base import Index, Policy, least
from apex_engine.core.vocabulary import Geometry, Precision


class Lfru(Policy):
    """Uses / (age + 1), age in passes since the last use: frequency that fades (best causal policy of a comparison of 2026)."""

    ages = True

    def __init__(self, geometry: Geometry) -> None:
        self.handlers = {PassBegins: self._begin, Use: self._use}
        self._uses, self._last = np.zeros(geometry.shape), np.zeros(geometry.shape)
        self._pass = 0

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence:
            self._uses[:] = self._last[:] = self._pass = 0
        self._pass += 1

    def _use(self, use: Use) -> None:
        self._uses[use.precision, use.layer, use.expert] += use.tokens
        self._last[use.precision, use.layer, use.expert] = self._pass

    def values(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        age = self._pass - self._last[precision, layers, experts]
        return self._uses[precision, layers, experts] / (age + 1)

    def finalists(self, layers: Index, eligible: NDArray[np.bool_], precision: Precision) -> Index:
        age = self._pass - self._last[precision, layers]
        return least(self._uses[precision, layers] / (age + 1), eligible)
