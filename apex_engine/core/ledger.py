"""What the trade cost: every expert call, byte and second is counted here and nowhere else.

call   one (token, chosen expert) pair of the router
use    one twin used by one layer step, for one or more tokens: a hit when it was resident, else a load
"""

from __future__ import annotations

from typing import Any

import numpy as np

from apex_engine.core import events
from apex_engine.core.vocabulary import ExpertId, Precision, Words


class Ledger:
    """Counters since it was made: a sink. Lists are by precision, SKIP first."""

    def __init__(self, words: Words) -> None:
        self.words = words
        n = len(words)
        self.calls = [0] * n  # by what the token got
        self.mass = [0.0] * n  # |gate weight| of them
        self.asked = [0] * n  # calls by what the score wanted
        self.hits, self.loads, self.bytes_read = [0] * n, [0] * n, [0] * n
        self.sequences = 0
        self.tokens = {"prefill": 0, "decode": 0}
        self.seconds = {"prefill": 0.0, "decode": 0.0}  # of forward passes
        self.stall_seconds = 0.0  # a step had nothing to do but wait for twins
        self.stall_busy_seconds = 0.0  # of these, with something on its way
        self.busy_seconds = 0.0  # something was on its way
        self.compute_seconds = 0.0
        self.degraded = 0  # calls that wanted more and got what was resident (`upgrade="async"`)
        self.prefetched_bytes = 0  # brought before anyone asked
        self.useful_bytes = 0  # of these, of twins asked for while they were there or on their way
        self.failed_prefetches = 0
        self.predicted = 0  # (token, layer) pairs of decoding that were predicted
        self.predicted_top1 = 0  # with the likeliest expert right
        self.predicted_all = 0  # with all of them right
        self.missing = 0  # uses of twins that were not resident, or only thanks to a prefetch
        self.foreseen = 0  # of these, the ones that were prefetched or on their way
        # Counted above as prefetched, and not asked for yet. What was prefetched before this ledger began is not its own.
        self._early: dict[tuple[ExpertId, Precision], int] = {}
        self.handlers: events.Handlers = {
            events.PassBegins: self._pass_begins,
            events.PassEnds: self._pass_ends,
            events.Routed: self._routed,
            events.Use: self._use,
            events.Asked: self._asked,
            events.Moved: self._moved,
            events.Loaded: self._loaded,
            events.Evicted: self._evicted,
            events.PrefetchFailed: self._failed,
            events.Predicted: self._predicted,
            events.Waited: self._waited,
            events.Computed: self._computed,
        }

    def _pass_begins(self, event: events.PassBegins) -> None:
        self.sequences += event.new_sequence

    def _pass_ends(self, event: events.PassEnds) -> None:
        self.tokens[event.phase] += event.tokens
        self.seconds[event.phase] += event.seconds

    def _routed(self, event: events.Routed) -> None:
        if len(event.wished) == 1:
            for wish in event.wished[0].tolist():
                self.asked[wish] += 1
            return
        for precision, n in enumerate(np.bincount(event.wished.ravel(), minlength=len(self.words)).tolist()):
            self.asked[precision] += n

    def _use(self, use: events.Use) -> None:
        self.calls[use.precision] += use.tokens
        self.mass[use.precision] += use.mass
        self.degraded += use.degraded

    def _asked(self, event: events.Asked) -> None:
        self.hits[event.precision] += event.resident
        self.missing += event.foreseen or not event.resident
        self.foreseen += event.foreseen
        self.useful_bytes += self._early.pop((event.expert, event.precision), 0)

    def _moved(self, event: events.Moved) -> None:
        self.bytes_read[event.precision] += event.nbytes
        self.busy_seconds += event.seconds
        if event.early:
            self.prefetched_bytes += event.nbytes
            if event.asked:
                self.useful_bytes += event.nbytes
            else:
                key = event.expert, event.precision
                self._early[key] = self._early.get(key, 0) + event.nbytes

    def _loaded(self, event: events.Loaded) -> None:
        self.loads[event.precision] += event.demand

    def _evicted(self, event: events.Evicted) -> None:
        self._early.pop((event.expert, event.precision), None)

    def _failed(self, event: events.PrefetchFailed) -> None:
        self.failed_prefetches += 1

    def _predicted(self, event: events.Predicted) -> None:
        self.predicted += 1
        self.predicted_top1 += event.first_right
        self.predicted_all += event.right == event.chosen

    def _waited(self, event: events.Waited) -> None:
        self.stall_seconds += event.seconds
        self.stall_busy_seconds += event.busy

    def _computed(self, event: events.Computed) -> None:
        self.compute_seconds += event.seconds

    def summary(self) -> dict[str, Any]:
        """Plain JSON: counts, shares, rates, seconds. A rate without a denominator is None."""
        calls, mass = sum(self.calls), sum(self.mass)
        forward = sum(self.seconds.values())
        used = [hits + loads for hits, loads in zip(self.hits, self.loads, strict=True)]
        return {
            "sequences": self.sequences,
            "tokens": dict(self.tokens),
            "tokens_per_second": {phase: _rate(self.tokens[phase], self.seconds[phase]) for phase in self.tokens},
            "calls": {"total": calls, **self._all(self.calls), "degraded": self.degraded},
            "share_of_calls": self._all([_rate(n, calls) for n in self.calls]),
            "share_of_gate_mass": self._all([_rate(m, mass) for m in self.mass]),
            "asked": self._all(self.asked),
            "hits": self._twins(self.hits),
            "loads": self._twins(self.loads),
            "hit_rate": self._twins([_rate(hits, n) for hits, n in zip(self.hits, used, strict=True)]),
            "bytes_read": {"total": sum(self.bytes_read), **self._twins(self.bytes_read)},
            "prefetch": {
                "bytes": self.prefetched_bytes,
                "useful_bytes": self.useful_bytes,
                "wasted_bytes": self.prefetched_bytes - self.useful_bytes,
                "failed": self.failed_prefetches,
                "coverage": _rate(self.foreseen, self.missing),
                "predictions": self.predicted,
                "top1_right": _rate(self.predicted_top1, self.predicted),
                "all_right": _rate(self.predicted_all, self.predicted),
            },
            "seconds": {
                **self.seconds,
                "stall": self.stall_seconds,
                "stall_while_loading": self.stall_busy_seconds,
                "loading": self.busy_seconds,
                "compute": self.compute_seconds,
                "rest": max(0.0, forward - self.stall_seconds - self.compute_seconds),
            },
        }

    def _all(self, values: list[Any]) -> dict[str, Any]:
        """By word, highest precision first, SKIP last."""
        return {word: values[p] for p, word in reversed(list(enumerate(self.words)))}

    def _twins(self, values: list[Any]) -> dict[str, Any]:
        """The same without SKIP."""
        return {self.words[p]: values[p] for p in self.words.twins}


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None
