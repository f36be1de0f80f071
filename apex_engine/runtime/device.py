"""One device: the slots it has, how twins get there, and the kernels that compute straight from them."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apex_engine.core.dispatch import Served
from apex_engine.core.events import Computed, Stream
from apex_engine.core.vocabulary import Precision
from apex_engine.kernels.base import Activation, Kernel, Routed, Views
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.host import HostCache
from apex_engine.memory.tier import Tier

COUNT, ZEROS = np.arange(1025), np.zeros(1024, np.int64)  # of the pairs of one token


class Job(NamedTuple):
    """What a layer step computes: `x` `[T, H]`, `gates` float32 `[T K]`, `out` float32 `[T, K, H]`; `sizes` of its requests in
    tokens."""

    layer: int
    x: Tensor
    gates: Tensor
    activation: Activation
    out: Tensor
    sizes: tuple[int, ...]


class Applied(NamedTuple):
    """Event: a job has computed the pairs of `served` with a twin whose fields are `views`, while they hold."""

    job: Job
    served: Served
    views: Views


class Device:
    """Runs the uses of a step on what it holds. Made whole, closed whole."""

    def __init__(
        self,
        device: torch.device,
        cache: ExpertCache,
        tier: Tier,
        kernels: dict[Precision, Kernel],
        stream: Stream,
        host: HostCache | None = None,
    ) -> None:
        self.device, self.cache, self.tier, self.kernels, self.host = device, cache, tier, kernels, host
        self._stream, self._watch = stream, Stopwatch(device)

    def compute(self, job: Job, precision: Precision, served: list[tuple[Served, int]]) -> None:
        """Write the weighted outputs of the pairs that twins of one precision serve, from their slots, into `job.out`."""
        begun = self._watch.begin()
        for one, some in _by_request(job, served) if len(job.sizes) > 1 else ((job, served),):
            self._compute_request(one, precision, some)
        self._watch.end(begun)
        self.report()

    def report(self) -> None:
        """Emit the seconds of what has been computed and not been reported; on CUDA of what is done by now."""
        seconds = self._watch.done()
        if seconds:
            self._stream.emit(Computed(seconds))

    def _compute_request(self, job: Job, precision: Precision, served: list[tuple[Served, int]]) -> None:
        choices = job.out.shape[1]
        slots = [slot for _, slot in served]
        if len(job.out) == 1:
            rows = np.concatenate([one.choices for one, _ in served])
            routed = Routed(COUNT[: len(rows) + 1], ZEROS[: len(rows)], rows)
        else:
            tokens = np.concatenate([one.tokens for one, _ in served])
            rows = tokens * choices + np.concatenate([one.choices for one, _ in served])
            first = np.array([0, *itertools.accumulate(len(one.tokens) for one, _ in served)])
            routed = Routed(first, tokens, rows)
        out = job.out.view(-1, job.out.shape[2])
        self.kernels[precision](job.x, slots, routed, job.gates, job.activation, out)
        if self._stream.wants(Applied):
            pool = self.cache.pools[precision]
            for one, slot in served:
                self._stream.emit(Applied(job, one, pool.layout.views(pool.memory[slot])))


class Stopwatch:
    """Seconds between `begin` and `end`. On CUDA, of the device and not of the launches: known later, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = (
            deque()
        )  # begun and ended, not known to be done
        self._seconds = 0.0

    def begin(self) -> Any:
        """For `end`."""
        return time.perf_counter() if self._device is None else self._event(self._device)

    def end(self, begun: Any) -> None:
        if self._device is None:
            self._seconds += time.perf_counter() - begun
        else:
            self._running.append((begun, self._event(self._device)))

    def done(self) -> float:
        """Of all that has ended and was not given before."""
        while self._running and self._running[0][1].query():
            begun, ended = self._running.popleft()
            self._seconds += begun.elapsed_time(ended) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @staticmethod
    def _event(device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.current_stream(device).record_event(event)
        return event


def _by_request(job: Job, served: list[tuple[Served, int]]) -> Iterator[tuple[Job, list[tuple[Served, int]]]]:
    """Each request of the step that some of `served` serve, as a step of its own, and what serves it."""
    choices, first = job.out.shape[1], 0
    for size in job.sizes:
        stop = first + size
        some = []
        for one, slot in served:
            inside = (one.tokens >= first) & (one.tokens < stop)
            if inside.any():
                own = one._replace(tokens=one.tokens[inside] - first, choices=one.choices[inside])
                some.append((own, slot))
        if some:
            gates = job.gates[first * choices : stop * choices]
            yield Job(job.layer, job.x[first:stop], gates, job.activation, job.out[first:stop], (size,)), some
        first = stop
