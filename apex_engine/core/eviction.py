"""Who makes room: the resident twin of one precision that a policy values least.

Asking the policy about every resident twin costs more the more there are. `Victims` keeps, for each layer, the few that can come
last there (`Policy.finalists`), and asks about those: at each layer's finalists only what was touched since is looked at again.
`least_valued` is the plain search, its truth.

Letters: L MoE layers, E experts a layer, F finalists a layer.
"""

from __future__ import annotations

from collections.abc import Collection

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
    ties = np.flatnonzero(values == values.min()).tolist()
    return min(ExpertId(int(layers[i]), int(experts[i])) for i in ties)


class Victims:
    """The twins of one precision that may make room, and which of them does. A sink: to be heard after the policy."""

    def __init__(self, geometry: Geometry, policy: Policy, precision: Precision) -> None:
        self.handlers: Handlers = {PassBegins: self._begin, Use: self._use}
        self._policy, self._precision = policy, precision
        self._eligible = np.zeros((geometry.layers, geometry.experts), bool)
        self._finalists = np.full((geometry.layers, 0), -1)
        self._stale = set(range(geometry.layers))  # layers whose finalists are to be asked for again
        self._all = range(geometry.layers)

    def set(self, expert: ExpertId, eligible: bool) -> None:
        """Whether a twin may make room from now on."""
        self._eligible[expert] = eligible
        self._stale.add(expert.layer)

    def clear(self) -> None:
        """No twin may make room."""
        self._eligible[:] = False
        self._stale.update(self._all)

    def choose(self, now: int, but: Collection[ExpertId] = ()) -> ExpertId | None:
        """The one that does while layer `now` is at work, none of `but`; None where none may."""
        kept = [expert for expert in but if self._eligible[expert]]
        for expert in kept:
            self.set(expert, False)
        self._refresh()
        for expert in kept:
            self.set(expert, True)
        if self._finalists.shape[1] == 1:
            experts = self._finalists[:, 0]
            layers = np.flatnonzero(experts >= 0)
            return least_valued(self._policy, layers, experts[layers], self._precision, now)
        layers, column = np.nonzero(self._finalists >= 0)
        return least_valued(self._policy, layers, self._finalists[layers, column], self._precision, now)

    def _refresh(self) -> None:
        """Ask for the finalists of what has changed."""
        if not self._stale:
            return
        stale = np.array(sorted(self._stale))
        found = self._policy.finalists(stale, self._eligible[stale], self._precision)
        if found.shape[1] == self._finalists.shape[1]:
            self._finalists[stale] = found
        else:  # the first time
            self._finalists = self._policy.finalists(np.array(self._all), self._eligible, self._precision)
        self._stale.clear()

    def eligible(self) -> NDArray[np.bool_]:
        """`[L, E]`: which may make room."""
        return self._eligible

    def _begin(self, event: PassBegins) -> None:
        if event.new_sequence or self._policy.ages:
            self._stale.update(self._all)

    def _use(self, use: Use) -> None:
        self._stale.add(use.layer)
