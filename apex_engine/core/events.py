"""What happens, as one stream of small frozen records. Whoever counts, learns or writes down is a sink of it.

Order within a step: StepBegins, Routed, a Use for each twin, an Asked for each that is not skipped, then Waited and Computed in
turns. Moved, Loaded, Evicted and PrefetchFailed come from whatever thread did it, while the tier's lock is held; so do Use and
Asked.

Letters: T tokens, K chosen experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apex_engine.core.vocabulary import ExpertId, Precision


class PassBegins(NamedTuple):
    """A forward pass over `tokens` tokens; `phase` is "prefill" or "decode"."""

    phase: str
    tokens: int
    new_sequence: bool


class PassEnds(NamedTuple):
    """It took `seconds`; `rate` is what the link brings, in bytes a second."""

    phase: str
    tokens: int
    seconds: float
    rate: float


class StepBegins(NamedTuple):
    """A layer step, at `at` seconds of a clock that never goes back."""

    layer: int
    at: float


class Routed(NamedTuple):
    """The router's choice and gate weights, and the precision each pair is worth by the score alone: all `[T, K]`."""

    layer: int
    chosen: NDArray[np.int64]
    gates: NDArray[np.float32]
    wished: NDArray[np.int8]


class Use(NamedTuple):
    """A layer step serves pairs of `tokens` tokens with one twin, or drops them (SKIP). `mass`: their gate weights, absolute.
    `degraded`: how many of them were worth more."""

    layer: int
    expert: int
    precision: Precision
    tokens: int
    mass: float
    degraded: int


class Asked(NamedTuple):
    """A twin was asked for. `resident`: it was there. `foreseen`: a prefetch had brought it or was under way, `early_bytes` of
    it.
    """

    expert: ExpertId
    precision: Precision
    resident: bool
    foreseen: bool
    early_bytes: int


class Moved(NamedTuple):
    """A part of a twin has come. `early`: nobody had asked for the twin when the part was begun; `asked`: by now somebody has.
    `seconds`: of the time since anything came last in which something was on its way."""

    expert: ExpertId
    precision: Precision
    nbytes: int
    early: bool
    asked: bool
    seconds: float


class Loaded(NamedTuple):
    """A twin is resident. `demand`: somebody asked for it."""

    expert: ExpertId
    precision: Precision
    demand: bool


class Evicted(NamedTuple):
    """A twin is resident no longer, or what had come of it was given up."""

    expert: ExpertId
    precision: Precision


class PrefetchFailed(NamedTuple):
    """A twin that nobody had asked for could not be read."""

    expert: ExpertId
    precision: Precision


class Predicted(NamedTuple):
    """What had been foreseen for one token's choice at a layer: the likeliest expert right or not, `right` of `chosen`
    experts.
    """

    layer: int
    first_right: bool
    right: int
    chosen: int


class Waited(NamedTuple):
    """The step had nothing to do but wait; of this, `busy` seconds with something on its way."""

    seconds: float
    busy: float


class Computed(NamedTuple):
    """Experts were computed in `seconds`."""

    seconds: float


Handlers = Mapping[type, Callable[[Any], None]]


class Sink(Protocol):
    """Contract: `handlers` says what is done with each type of event and never changes; of others a sink hears nothing. A handler
    returns at once and raises nothing."""

    @property
    def handlers(self) -> Handlers:
        """Event type -> what is done."""


class Stream:
    """Hands events to sinks, in the order they were added."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks: list[Sink] = []
        self._by_type: dict[type, tuple[Callable[[Any], None], ...]] = {}
        for sink in sinks:
            self.add(sink)

    def emit(self, event: Any) -> None:
        for handle in self._by_type.get(type(event), ()):
            handle(event)

    def wants(self, kind: type) -> bool:
        """Whether anybody hears events of this type: those that cost something are made only then."""
        return kind in self._by_type

    def add(self, sink: Sink) -> None:
        self._set([*self._sinks, sink])

    def remove(self, sink: Sink) -> None:
        self._set([other for other in self._sinks if other is not sink])

    def _set(self, sinks: list[Sink]) -> None:
        by_type: dict[type, tuple[Callable[[Any], None], ...]] = {}
        for sink in sinks:
            for kind, handle in sink.handlers.items():
                by_type[kind] = (*by_type.get(kind, ()), handle)
        self._sinks, self._by_type = sinks, by_type  # other threads see the old table or the new one
