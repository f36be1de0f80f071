"""Least costly used, of MoE-APEX."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import PassBegins, Use
from apex_engine.core.policies.base import Index, Policy, least
from apex_engine.core.vocabulary import Geometry, Precision


class Lcu(Policy):
    """Least costly used first (MoE-APEX, sequence level). An expert's value is

        p = C / T + [used in the last pass] / D,   C = H + (B_low / B_high) * L,   D = ((l - l_now + L) mod L) + 0.1

    H, L: tokens that used its HIGH / LOW twin in this sequence; T: tokens so far; B: real bytes of the twins; D: layers until
    the expert's layer comes round again. It is the same for all twins of an expert.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.handlers = {PassBegins: self._begin, Use: self._use}
        self._layers = geometry.layers
        self._weight = [nbytes / geometry.nbytes[-1] for nbytes in geometry.nbytes]
        self._cost = np.zeros(geometry.shape[1:])
        self._last_pass = np.full(geometry.shape[1:], -1)
        self._tokens = self._pass = 0

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence:
            self._cost[:] = 0
            self._last_pass[:] = -1
            self._tokens = self._pass = 0
        self._tokens += event.tokens
        self._pass += 1

    def _use(self, use: Use) -> None:
        self._cost[use.layer, use.expert] += use.tokens * self._weight[use.precision]
        self._last_pass[use.layer, use.expert] = self._pass

    def values(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        # The last pass over a layer is this one for the layers up to `now` and the one before for those still to come.
        last = np.where(layers <= now, self._pass, self._pass - 1)
        recent = self._last_pass[layers, experts] >= last
        distance = (layers - now) % self._layers + 0.1
        return self._cost[layers, experts] / max(self._tokens, 1) + recent / distance

    def finalists(self, layers: Index, eligible: NDArray[np.bool_], precision: Precision) -> Index:
        # Twins of one layer with the same last pass differ by C only. Which of them were used in the last pass depends on the
        # layer at work, but it is those of the latest pass, those of the two latest, or none.
        cost, last = self._cost[layers], self._last_pass[layers]
        latest = np.where(eligible, last, -9).max(1, keepdims=True)
        groups = (last == latest, last == latest - 1, last < latest - 1)
        return np.concatenate([least(cost, eligible & group) for group in groups], 1)
