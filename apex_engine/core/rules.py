"""What a run does with a layer's choice: its mode and thresholds, put together from scorer and dispatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.dispatch import Served, dispatch
from apex_engine.core.residency import Residency
from apex_engine.core.scorer import wanted
from apex_engine.core.thresholds import Thresholds
from apex_engine.core.vocabulary import Precision


@dataclass(frozen=True)
class Rules:
    """`mode` as in `Config`; `top`: the highest precision; `degrade`: what is resident serves, and what is wanted comes later."""

    mode: str
    thresholds: Thresholds
    top: Precision
    degrade: bool = False

    def wished(self, layer: int, gates: NDArray[np.float32]) -> NDArray[np.int8]:
        """The precision that each pair of a layer is worth: gate weights `[T, K]` -> `[T, K]`."""
        if self.mode == "exact":
            return np.full(gates.shape, self.top, np.int8)
        return wanted(gates, self.thresholds.bounds[layer])

    def served(
        self, layer: int, chosen: NDArray[np.int64], wished: NDArray[np.int8], residency: Residency
    ) -> list[Served]:
        """What serves a layer's choice `[T, K]`. What is resident matters in adaptive mode only."""
        return dispatch(layer, chosen, wished, residency if self.mode == "adaptive" else None, self.degrade)
