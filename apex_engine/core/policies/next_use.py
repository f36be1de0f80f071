"""The chance of use for the time a twin is kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import PassBegins, Use
from apex_engine.core.policies.base import Index, Policy, least
from apex_engine.core.vocabulary import Geometry, Precision


class NextUse(Policy):
    """The twin with the least chance of use for the time it is kept goes first. With layers coming round once a token,

        p = q / (D + L / 2),   D = ((l - l_now - 1) mod L) + 1,   q = RECENT r + (1 - RECENT) f

    r, f: share of the layer's tokens that used the twin, older ones counting less: by `FADES` for each token since. D: layers
    until its layer comes round; the L / 2 stands for what follows the first chance (without it, a likely twin that was just
    used would go before an unlikely one of the next layer).
    """

    FADES = 0.5, 0.98  # of r, of f
    RECENT = 0.3
    LEAST = 1e-3  # of q: what was not used for long is ranked by its layer

    def __init__(self, geometry: Geometry) -> None:
        self.handlers = {PassBegins: self._begin, Use: self._use}
        self._recent, self._often = np.zeros(geometry.shape), np.zeros(geometry.shape)
        self._weight = np.zeros(geometry.layers)  # of the tokens in `_often`
        self._layers, self._pass = geometry.layers, 0
        self._counted = np.zeros(geometry.layers, np.int64)  # the last pass whose tokens are in a layer's shares
        self._tokens = 1
        self._left = self.FADES  # of earlier tokens, once those of this pass are counted

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence:
            self._recent[:] = self._often[:] = self._weight[:] = 0
        self._pass += 1
        self._tokens = event.tokens
        recent, often = self.FADES
        self._left = recent ** min(event.tokens, 999), often ** min(event.tokens, 999)

    def _use(self, use: Use) -> None:
        layer, (recent, often) = use.layer, self._left
        if self._counted[layer] != self._pass:
            self._counted[layer] = self._pass
            self._recent[:, layer] *= recent
            self._often[:, layer] *= often
            self._weight[layer] = often * self._weight[layer] + 1 - often
        share = use.tokens / self._tokens
        self._recent[use.precision, layer, use.expert] += (1 - recent) * share
        self._often[use.precision, layer, use.expert] += (1 - often) * share

    def values(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        recent, often = self._recent[precision, layers, experts], self._often[precision, layers, experts]
        distance = (layers - now - 1) % self._layers + 1
        return self._chance(recent, often, self._weight[layers]) / (distance + self._layers / 2)

    def finalists(self, layers: Index, eligible: NDArray[np.bool_], precision: Precision) -> Index:
        recent, often = self._recent[precision, layers], self._often[precision, layers]
        return least(self._chance(recent, often, self._weight[layers][:, None]), eligible)

    def _chance(
        self, recent: NDArray[np.float64], often: NDArray[np.float64], weight: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """q of twins with these records."""
        chance = self.RECENT * recent + (1 - self.RECENT) * (often / np.maximum(weight, self.LEAST))
        return np.maximum(chance, self.LEAST)
