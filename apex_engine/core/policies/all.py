"""Which resident expert makes room: arithmetic over counts and distances, nothing else.

A policy is told what is used and is asked for priorities; the resident twin with the lowest one is evicted. Records start
afresh with every sequence, contents of the cache stay.

Letters: L MoE layers, E experts a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.vocabulary import Precision

Index = NDArray[np.int64]


class Policy(Protocol):
    """Contract of an eviction policy. None of its methods looks at the cache or the clock."""

    def start_sequence(self) -> None:
        """Forget all records."""

    def start_pass(self, tokens: int) -> None:
        """A forward pass over `tokens` tokens begins."""

    def use(self, layer: int, expert: int, precision: Precision, count: int) -> None:
        """`count` tokens of this pass used this twin. Called once for each twin a layer uses in a pass."""

    def priority(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        """Priority of each twin `(layers[i], experts[i])` while layer `now` is at work; changes nothing."""


class Lru:
    """Least recently used first."""

    def __init__(self, layers: int, experts: int, cost_ratio: float) -> None:
        self._last = np.zeros((3, layers, experts))
        self._clock = 0

    def start_sequence(self) -> None:
        self._last[:] = 0
        self._clock = 0

    def start_pass(self, tokens: int) -> None:
        pass

    def use(self, layer: int, expert: int, precision: Precision, count: int) -> None:
        self._clock += 1
        self._last[precision, layer, expert] = self._clock

    def priority(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        return self._last[precision, layers, experts]


class Lfu:
    """Least frequently used first: uses of the twin in this sequence, by the tokens that used it."""

    def __init__(self, layers: int, experts: int, cost_ratio: float) -> None:
        self._uses = np.zeros((3, layers, experts))

    def start_sequence(self) -> None:
        self._uses[:] = 0

    def start_pass(self, tokens: int) -> None:
        pass

    def use(self, layer: int, expert: int, precision: Precision, count: int) -> None:
        self._uses[precision, layer, expert] += count

    def priority(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        return self._uses[precision, layers, experts]


class Lfru:
    """Uses / (age + 1), age in passes since the last use: frequency that fades (best causal policy of a comparison of 2026)."""

    def __init__(self, layers: int, experts: int, cost_ratio: float) -> None:
        self._uses, self._last = np.zeros((3, layers, experts)), np.zeros((3, layers, experts))
        self._pass = 0

    def start_sequence(self) -> None:
        self._uses[:] = self._last[:] = self._pass = 0

    def start_pass(self, tokens: int) -> None:
        self._pass += 1

    def use(self, layer: int, expert: int, precision: Precision, count: int) -> None:
        self._uses[precision, layer, expert] += count
        self._last[precision, layer, expert] = self._pass

    def priority(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        age = self._pass - self._last[precision, layers, experts]
        return self._uses[precision, layers, experts] / (age + 1)


class Lcu:
    """Least costly used first (MoE-APEX, sequence level). An expert's priority is

        p = C / T + [used in the last pass] / D,   C = H + (B_low / B_high) * L,   D = ((l - l_now + L) mod L) + 0.1

    H, L: tokens that used its HIGH / LOW twin in this sequence; T: tokens so far; B: real bytes of the twins; D: layers until
    the expert's layer comes round again.
    """

    def __init__(self, layers: int, experts: int, cost_ratio: float) -> None:
        """`cost_ratio`: B_low / B_high."""
        self._cost = np.zeros((layers, experts))
        self._last_pass = np.full((layers, experts), -1)
        self._weight = {Precision.HIGH: 1.0, Precision.LOW: cost_ratio}
        self._layers = layers
        self._tokens = self._pass = 0

    def start_sequence(self) -> None:
        self._cost[:] = 0
        self._last_pass[:] = -1
        self._tokens = self._pass = 0

    def start_pass(self, tokens: int) -> None:
        self._tokens += tokens
        self._pass += 1

    def use(self, layer: int, expert: int, precision: Precision, count: int) -> None:
        self._cost[layer, expert] += count * self._weight[precision]
        self._last_pass[layer, expert] = self._pass

    def priority(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        # The last pass over a layer is this one for the layers up to `now` and the one before for those still to come.
        last = np.where(layers <= now, self._pass, self._pass - 1)
        recent = self._last_pass[layers, experts] >= last
        distance = (layers - now) % self._layers + 0.1
        return self._cost[layers, experts] / max(self._tokens, 1) + recent / distance


class NextUse:
    """The twin with the least chance of use for the time it is kept goes first. With layers coming round once a token,

        p = q / (D + L / 2),   D = ((l - l_now - 1) mod L) + 1,   q = RECENT r + (1 - RECENT) f

    r, f: share of the layer's tokens that used the twin, older ones counting less: by `FADES` for each token since. D: layers
    until its layer comes round; the L / 2 stands for what follows the first chance (without it, a likely twin that was just
    used would go before an unlikely one of the next layer).
    """

    FADES = 0.5, 0.98  # of r, of f
    RECENT = 0.3
    LEAST = 1e-3  # of q: what was not used for long is ranked by its layer

    def __init__(self, layers: int, experts: int, cost_ratio: float) -> None:
        self._recent, self._often = np.zeros((3, layers, experts)), np.zeros((3, layers, experts))
        self._weight = np.zeros(layers)  # of the tokens in `_often`
        self._layers, self._pass = layers, 0
        self._counted = np.zeros(layers, np.int64)  # the last pass whose tokens are in a layer's shares
        self._tokens = 1

    def start_sequence(self) -> None:
        self._recent[:] = self._often[:] = self._weight[:] = 0

    def start_pass(self, tokens: int) -> None:
        self._pass += 1
        self._tokens = tokens

    def use(self, layer: int, expert: int, precision: Precision, count: int) -> None:
        recent, often = (fades ** min(self._tokens, 999) for fades in self.FADES)  # what is left of earlier tokens
        if self._counted[layer] != self._pass:
            self._counted[layer] = self._pass
            self._recent[:, layer] *= recent
            self._often[:, layer] *= often
            self._weight[layer] = often * self._weight[layer] + 1 - often
        share = count / self._tokens
        self._recent[precision, layer, expert] += (1 - recent) * share
        self._often[precision, layer, expert] += (1 - often) * share

    def priority(self, layers: Index, experts: Index, precision: Precision, now: int) -> NDArray[np.float64]:
        often = self._often[precision, layers, experts] / np.maximum(self._weight[layers], self.LEAST)
        chance = self.RECENT * self._recent[precision, layers, experts] + (1 - self.RECENT) * often
        distance = (layers - now - 1) % self._layers + 1
        return np.maximum(chance, self.LEAST) / (distance + self._layers / 2)


POLICIES: dict[str, Callable[[int, int, float], Policy]] = {
    "next-use": NextUse,
    "lcu": Lcu,
    "lru": Lru,
    "lfu": Lfu,
    "lfru": Lfru,
}
