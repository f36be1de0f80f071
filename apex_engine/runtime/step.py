"""One layer step: which twins, from where, and their weighted sum.

    router's choice -> score (what is it worth?) -> dispatch (which twin serves it?) -> request (from where?) -> compute what is
    there, look ahead, compute the rest as it arrives -> sum

Letters: T tokens, K chosen experts a token, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apex_engine.core import events
from apex_engine.core.dispatch import Served
from apex_engine.core.events import Stream
from apex_engine.core.prefetch import Choice, Prefetcher
from apex_engine.core.rules import Rules
from apex_engine.core.vocabulary import SKIP, ExpertId, Precision
from apex_engine.kernels.base import Activation
from apex_engine.memory.plan import tokens_a_piece
from apex_engine.memory.tier import Ticket
from apex_engine.predict.base import Predictor
from apex_engine.runtime.device import Device, Job

Ready = dict[Precision, list[tuple[Served, int]]]  # what may be computed now: what it serves, and its slot
Coming = dict[Ticket, Served]


class Stepper:
    """Serves layer steps on one device, one at a time."""

    def __init__(
        self,
        device: Device,
        rules: Rules,
        prefetcher: Prefetcher,
        stream: Stream,
        shares: dict[Precision, int],
    ) -> None:
        """`shares`: slots of a layer while a prompt streams, by precision."""
        self.rules = rules
        self.predictor: Predictor | None = None
        self.streaming = False  # a prompt is on its way through slots that it should not keep
        self._device, self._tier, self._prefetcher, self._stream = device, device.tier, prefetcher, stream
        self._shares = shares
        pool = device.cache.pools.get(rules.top)
        self._all_fit = pool is not None and len(pool) == device.cache.experts

    def step(
        self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, activation: Activation, sizes: Sequence[int]
    ) -> Tensor:
        """`x` `[T, H]`, router's `chosen` and `weights` `[T, K]` -> `[T, H]` in the dtype of `x`; `sizes`: see `Engine.step`."""
        most = tokens_a_piece(max(chosen.shape[1], 1), x.shape[1])
        if len(x) <= most:
            return self._piece(layer, x, chosen, weights, activation, tuple(sizes))
        found, start = [], 0
        for part in pieces(sizes, most):
            stop = start + sum(part)
            found.append(self._piece(layer, x[start:stop], chosen[start:stop], weights[start:stop], activation, part))
            start = stop
        return torch.cat(found)

    def look_ahead(self, layer: int, x: Tensor) -> None:
        """Keep what the coming layers will probably use, and fetch what is missing. `x` `[T, H]`: router input of layer
        `layer`.
        """
        predictor, rules = self.predictor, self.rules
        if predictor is None or not predictor.ready or self.streaming:
            return
        if rules.mode == "exact" and self._all_fit:  # nothing is ever missing once it has come
            return

        def dispatch(later: int, choice: Choice) -> list[Served]:
            return rules.served(later, choice.experts, rules.wished(later, choice.gates), self._tier.residency)

        self._prefetcher.walk(layer, lambda later: predictor.predict(layer, later, x), dispatch, self._tier)

    def _piece(
        self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, activation: Activation, sizes: tuple[int, ...]
    ) -> Tensor:
        self._stream.emit(events.StepBegins(layer, time.perf_counter()))
        weights = weights.float()
        gates, ids = weights.cpu().numpy(), chosen.cpu().numpy()
        wished = self.rules.wished(layer, gates)
        self._stream.emit(events.Routed(layer, ids, gates, wished))
        out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)  # [T, K, H]
        job = Job(layer, x, weights.flatten(), activation, out, sizes)
        ready: Ready = {}
        coming: Coming = {}
        try:
            with self._tier.lock:
                self._request(layer, ids, gates, wished, ready, coming)
            if len(ids) == 1:
                self._judge(layer, x, ids, gates)
            self._serve(job, ready, coming)
        finally:
            if coming or ready:  # it failed
                self._tier.forget(coming)
                self._tier.release([(p, slot) for p, served in ready.items() for _, slot in served])
        if len(sizes) == 1:
            return out.sum(1).to(x.dtype)
        return torch.cat([part.sum(1) for part in out.split(sizes)]).to(x.dtype)

    def _request(
        self,
        layer: int,
        ids: NDArray[np.int64],
        gates: NDArray[np.float32],
        wished: NDArray[np.int8],
        ready: Ready,
        coming: Coming,
    ) -> None:
        """Decide which twins serve, and ask for them: what is there goes to `ready`, what is not to `coming`. Lock held."""
        tier = self._tier
        served = self.rules.served(layer, ids, wished, tier.residency)
        self._count(layer, served, wished, gates)
        for one in sorted(served, key=_most_tokens) if len(ids) > 1 else served:
            if one.precision != SKIP:
                share = self._shares[one.precision] if self.streaming else None
                ticket = tier.request(ExpertId(layer, one.expert), one.precision, layer, share)
                if ticket.over and ticket.slot is not None:
                    ready.setdefault(one.precision, []).append((one, ticket.slot))
                else:
                    coming[ticket] = one
        if coming:
            tier.settle(coming, busy=bool(ready) or self.predictor is not None)
        tier.drop(layer)
        if self.rules.degrade:
            for one in served:
                wish = int(wished[one.tokens, one.choices].max())
                if one.precision < wish:
                    tier.upgrade(ExpertId(layer, one.expert), wish, layer)

    def _count(self, layer: int, served: list[Served], wished: NDArray[np.int8], gates: NDArray[np.float32]) -> None:
        emit = self._stream.emit
        if len(gates) == 1:
            masses, wishes = np.abs(gates[0]).tolist(), wished[0].tolist()
            for one, mass, wish in zip(served, masses, wishes, strict=True):  # in the order of the choices
                emit(events.Use(layer, one.expert, one.precision, 1, mass, int(wish > one.precision)))
            return
        magnitude = np.abs(gates)
        for one in served:
            pairs = one.tokens, one.choices
            degraded = int((wished[pairs] > one.precision).sum())
            emit(events.Use(layer, one.expert, one.precision, len(one.tokens), float(magnitude[pairs].sum()), degraded))

    def _judge(self, layer: int, x: Tensor, ids: NDArray[np.int64], gates: NDArray[np.float32]) -> None:
        """What was predicted for this layer and token, if anything, by what it chose."""
        if self.predictor is not None:
            self.predictor.observe(layer, x)
            found = self._prefetcher.judge(layer, ids, gates)
            if found is not None:
                self._stream.emit(found)

    def _serve(self, job: Job, ready: Ready, coming: Coming) -> None:
        """Compute what is resident, then what arrives, as it arrives. Empties `ready` and `coming` on its way."""
        # Demands go first: where there are some, there is time to look ahead, and to learn, while they arrive.
        waits = bool(coming)
        if not waits:
            self.look_ahead(job.layer, job.x)
        while ready or coming:
            for precision in list(ready):
                self._device.compute(job, precision, ready[precision])
                # Given back at once: with few slots, the next load needs this one.
                self._tier.release([(precision, slot) for _, slot in ready.pop(precision)])
            if coming:
                if waits:
                    waits = False
                    self.look_ahead(job.layer, job.x)
                    if self.predictor is not None:
                        self.predictor.learn()
                self._wait(ready, coming)

    def _wait(self, ready: Ready, coming: Coming) -> None:
        """Move what arrives from `coming` to `ready`."""
        tier, waiting = self._tier, list(coming)
        before, start = tier.busy_seconds(), time.perf_counter()
        try:
            arrived = tier.arrived(waiting)
        finally:
            stall = time.perf_counter() - start
            self._stream.emit(events.Waited(stall, min(stall, tier.busy_seconds() - before)))
            taken = [(ticket, coming.pop(ticket)) for ticket in list(coming) if ticket not in waiting]
        for ticket, one in taken:
            assert ticket.slot is not None and ticket in arrived
            ready.setdefault(ticket.precision, []).append((one, ticket.slot))


def pieces(sizes: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Requests of `sizes` tokens cut into parts of at most `most`, and the parts in groups of as many tokens at most: [3, 9], 4
    -> [(3,), (4,), (4,), (1,)]. A request is cut in the same places whatever it is grouped with."""
    groups: list[tuple[int, ...]] = []
    for size in sizes:
        for part in [*[most] * (size // most), *([size % most] if size % most or not size else [])]:
            if groups and sum(groups[-1]) + part <= most:
                groups[-1] = (*groups[-1], part)
            else:
                groups.append((part,))
    return groups


def _most_tokens(served: Served) -> int:
    return -len(served.tokens)
