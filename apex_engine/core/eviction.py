"""Who makes room: the resident twin of one precision that a policy values least.

Asking the policy about every resident twin costs more the more there are. `Victims` keeps, for each layer, the few that can come
last there (`Policy.finalists`), and asks about those: at each layer's finalists only what was touched since is looked at again.
`least_valued` is the plain search, its truth.

Letters: L MoE layers, E experts a layer, F finalists a layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.events import Handlers, PassBegins, Use
from apex_engine.core.policies.base import Index, Policy
from apex_engine.core.vocabulary import ExpertId, Geometry, Precision


def least_valued(policy: Policy, layers: Index, experts: Index, precision: Precision, now: int) -> ExpertId | None:
    """Of the twins `(layers[i], experts[i])` the one of the lowest value; None where there are none.

    Among equals it is not the first given: who stands first depends on what came first.
    """
    if not len(layers):
        return None
    values = policy.values(layers, experts, precision, now)
    ties = np.flatnonzero(values == values.min())
    first = ties[0] if len(ties) == 1 else ties[np.lexsort((experts[ties], layers[ties]))[0]]
    return ExpertId(int(layers[first]), int(experts[first]))


class Victims:
    """The twins of one precision that may make room, and which of them does. A sink: to be heard after the policy."""

    def __init__(self, geometry: Geometry, policy: Policy, precision: Precision) -> None:
        self.handlers: Handlers = {PassBegins: self._begin, Use: self._use}
        self._policy, self._precision = policy, precision
        self._eligible = np.zeros((geometry.layers, geometry.experts), bool)
        self._finalists = np.full((geometry.layers, 0), -1)
        self._stale = np.ones(geometry.layers, bool)

    def set(self, expert: ExpertId, eligible: bool) -> None:
        """Whether a twin may make room from now on."""
        self._eligible[expert] = eligible
        self._stale[expert.layer] = True

    def clear(self) -> None:
        """No twin may make room."""
        self._eligible[:] = False
        self._stale[:] = True

    def choose(self, now: int) -> ExpertId | None:
        """The one that does while layer `now` is at work; None where none may."""
        stale = np.flatnonzero(self._stale)
        if stale.size:
            found = self._policy.finalists(stale, self._eligible[stale], self._precision)
            if found.shape[1] != self._finalists.shape[1]:
                stale = np.arange(len(self._stale))
                found = self._policy.finalists(stale, self._eligible, self._precision)
                self._finalists = found
            else:
                self._finalists[stale] = found
            self._stale[:] = False
        layers, column = np.nonzero(self._finalists >= 0)
        return least_valued(self._policy, layers, self._finalists[layers, column], self._precision, now)

    def eligible(self) -> NDArray[np.bool_]:
        """`[L, E]`: which may make room."""
        return self._eligible

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence or self._policy.ages:
            self._stale[:] = True

    def _use(self, use: Use) -> None:
        self._stale[use.layer] = True
