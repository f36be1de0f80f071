"""What to fetch before it is asked for: the walk over the coming layers, and the governor that holds it back.

    predictions of the coming layers -> scorer, dispatch -> wishes, likeliest first -> tier

The walk goes on while all that is predicted of a layer is resident, and stops at the first layer where something is missing.
Arithmetic only: time, rates and counts come as arguments and events. `Published` is the walk and nothing else, as in MoE-APEX;
`Governor` adds when it pays, how much of it, and for which layers.

What MoE-APEX leaves open, and what `Published` does: how much to fetch of a layer (all that is predicted, in order of gate mass);
how many twins at a time (as many as the loader has workers); when a fetch yields (at the blocks in which demands come too); what
becomes of one whose layer has passed (it is dropped).

Letters: T tokens, K chosen experts a token.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apex_engine.core import events
from apex_engine.core.dispatch import Served
from apex_engine.core.vocabulary import SKIP, ExpertId, Precision

# Bytes below which a prefetch is not worth its block: on a slow link it would be in the way of the next layer's demands.
LEAST_EARLY = 32 << 10
LEAST_TRUST = 0.5  # a layer whose experts are predicted worse than this of late is not prefetched


class Choice(NamedTuple):
    """What a layer will probably choose: experts `[T, K]`, and gate weights up to a factor `[T, K]`."""

    gates: NDArray[np.float32]
    experts: NDArray[np.int64]


class Wish(NamedTuple):
    """A twin that a later layer will probably use. `block`: bytes it should come by, None for those of a demand. `alone`: no
    other such block should be on its way with it."""

    expert: ExpertId
    precision: Precision
    block: int | None = None
    alone: bool = False


class Wished(Protocol):
    """Who takes wishes: keeps what is resident, fetches what is not."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while a layer's wishes are made and taken."""

    @property
    def rate(self) -> float:
        """Bytes a second while something is on its way, of late."""

    def prefetch(self, wish: Wish, now: int) -> int:
        """Bytes of it still to come. Lock held."""


Predict = Callable[[int], Choice | None]  # layer -> its choice; None where it is not known
Dispatch = Callable[[int, Choice], list[Served]]  # a layer's choice -> what would serve it as things are; lock held


class Prefetcher(events.Sink, Protocol):
    """Contract: a sink, which walks when asked to and issues wishes; keeps no twin and no clock."""

    def walk(self, now: int, predict: Predict, dispatch: Dispatch, tier: Wished) -> None:
        """While layer `now` is at work (-1: none yet), wish for what the coming layers will use."""

    def judge(self, layer: int, chosen: NDArray[np.int64], gates: NDArray[np.float32]) -> events.Predicted | None:
        """What had been foreseen for the one token that chose this `[1, K]`; None where nothing was."""


class Published:
    """MoE-APEX: `depth` layers ahead, everything predicted, and no second thoughts."""

    def __init__(self, layers: int, depth: int) -> None:
        self._layers, self._depth = layers, depth
        self._expected: dict[
            int, list[int]
        ] = {}  # layer -> predicted choice of the token being decoded, likeliest first
        self.handlers: events.Handlers = {events.PassBegins: self._pass_begins}

    def _pass_begins(self, event: events.PassBegins) -> None:
        self._expected.clear()

    def walk(self, now: int, predict: Predict, dispatch: Dispatch, tier: Wished) -> None:
        for later in range(now + 1, min(now + 1 + self._depth, self._layers)):
            choice = predict(later)
            if choice is None:
                return
            self._expect(now, later, choice)
            with tier.lock:
                wishes = by_mass(later, dispatch(later, choice), choice.gates)
                if sum(tier.prefetch(Wish(expert, precision), now) for expert, precision in wishes):
                    return

    def _expect(self, now: int, later: int, choice: Choice) -> None:
        if len(choice.experts) == 1 and later == now + 1:
            order = np.argsort(-np.abs(choice.gates[0]), kind="stable")
            self._expected[later] = choice.experts[0][order].tolist()

    def judge(self, layer: int, chosen: NDArray[np.int64], gates: NDArray[np.float32]) -> events.Predicted | None:
        expected = self._expected.pop(layer, None)
        if expected is None:
            return None
        actual = chosen[0].tolist()
        right = len(set(actual).intersection(expected))
        return events.Predicted(layer, expected[0] == actual[int(np.abs(gates[0]).argmax())], right, len(set(actual)))


class Governor(Published):
    """No more than the link brings while nobody waits, for layers that are predicted well, and only while it pays."""

    def __init__(self, layers: int, depth: int) -> None:
        super().__init__(layers, depth)
        self.pace, self.trial = Pace(), Trial()
        self.trust = np.ones(layers)  # share of a layer's choice that was predicted, of late
        self._demanded = (
            0  # bytes of twins that were asked for and not resident, whether a prefetch brought them or not
        )
        self.handlers = {
            events.PassBegins: self._pass_begins,
            events.PassEnds: self._pass_ends,
            events.StepBegins: lambda event: self.pace.step(event.at),
            events.Waited: self._waited,
            events.Asked: self._asked,
            events.Moved: self._moved,
        }

    def walk(self, now: int, predict: Predict, dispatch: Dispatch, tier: Wished) -> None:
        budget = tier.rate * self.pace.free
        if not self.trial.on or budget < LEAST_EARLY:
            return
        for later in range(now + 1, min(now + 1 + self._depth, self._layers)):
            choice = predict(later)
            if choice is None:
                return
            self._expect(now, later, choice)
            if self.trust[later] < LEAST_TRUST:
                return
            missing = 0
            with tier.lock:
                for expert, precision in by_mass(later, dispatch(later, choice), choice.gates):
                    if missing < budget:
                        missing += tier.prefetch(Wish(expert, precision, int(budget), alone=True), now)
            if missing:
                return

    def judge(self, layer: int, chosen: NDArray[np.int64], gates: NDArray[np.float32]) -> events.Predicted | None:
        found = super().judge(layer, chosen, gates)
        if found:
            self.trust[layer] += 0.1 * (found.right / found.chosen - self.trust[layer])
        return found

    def _pass_begins(self, event: events.PassBegins) -> None:
        super()._pass_begins(event)
        self.pace.begin()
        self.trial.on = True
        if event.phase == "decode":
            self.trial.begin(self._demanded)

    def _pass_ends(self, event: events.PassEnds) -> None:
        if event.phase == "decode":
            self.trial.end(event.seconds, self._demanded, event.rate)

    def _waited(self, event: events.Waited) -> None:
        self.pace.stall += event.seconds

    def _asked(self, event: events.Asked) -> None:
        self._demanded += event.early_bytes

    def _moved(self, event: events.Moved) -> None:
        if event.asked or not event.early:
            self._demanded += event.nbytes


PREFETCHERS: dict[str, Callable[[int, int], Prefetcher]] = {"on": Governor, "off": Published}  # by `Config.governor`


def by_mass(layer: int, served: list[Served], gates: NDArray[np.float32]) -> list[tuple[ExpertId, Precision]]:
    """The twins that would serve a layer, those of the most gate mass first."""
    mass = np.abs(gates)
    order = sorted(served, key=lambda one: -mass[one.tokens, one.choices].sum())
    return [(ExpertId(layer, one.expert), one.precision) for one in order if one.precision != SKIP]


class Pace:
    """How much time of a layer, of late, nobody waits: what the link could bring meanwhile is the budget of prefetches."""

    def __init__(self) -> None:
        self.free = 0.0  # seconds
        self.stall = 0.0  # since the last step began
        self._last: float | None = None

    def begin(self) -> None:
        """A pass begins: what happens between two passes is no layer's time."""
        self._last = None

    def step(self, now: float) -> None:
        """A layer step begins at `now` seconds."""
        if self._last is not None:
            self.free += 0.1 * (now - self._last - self.stall - self.free)
        self._last, self.stall = now, 0.0


class Trial:
    """Whether looking ahead pays on this machine and link: every so often a token is decoded the other way than those before it.

    Tokens differ by the bytes they were missing more than by anything else, so the link's time for those is taken off first,
    whether a prefetch had brought them or not: for the bundled model behind a link this leaves a deviation of 2 ms of 9.
    """

    FIRST, EVERY, MOST = 16, 16, 16  # tokens that take turns; then tokens from trial to trial; trials to decide by
    LEAST = 0.02  # of a token's time: what must be gained, for twins that were put out in vain cost something later

    def __init__(self) -> None:
        self.on = True
        self._gains: deque[float] = deque(maxlen=self.MOST)  # what looking ahead saved, as a share of a token's time
        self._others: list[float] = []  # seconds of the tokens since the last trial
        self._tokens = self._bytes = 0

    def begin(self, demanded: int) -> None:
        """A token is going to be decoded; `demanded` bytes so far."""
        self._tokens += 1
        self._bytes = demanded
        some = len(self._gains) // 8
        gains = sorted(self._gains)[some : len(self._gains) - some]  # without the lowest and the highest eighth
        self.on = (not gains or statistics.fmean(gains) >= self.LEAST) != self._is_trial()

    def end(self, seconds: float, demanded: int, rate: float) -> None:
        """It took `seconds`, and the link brings `rate` bytes a second."""
        whole = seconds
        seconds -= (demanded - self._bytes) / max(rate, 1.0)
        if self._is_trial() and self._others:
            gain = (seconds - statistics.fmean(self._others)) / whole
            self._gains.append(-gain if self.on else gain)
            self._others.clear()
        else:
            self._others.append(seconds)

    def _is_trial(self) -> bool:
        return self._tokens % (2 if self._tokens <= self.FIRST else self.EVERY) == 0
