"""How a part of a twin gets to its slot.

    disk -> slot                      on a CPU
    disk -> host tier -> slot         elsewhere, and wherever a host tier is asked for; a twin of the host tier skips the disk

Called without the tier's lock, by several threads at a time, each for a part of its own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.link import Link
from apex_engine.memory.requests import Load


class Source(Protocol):
    """Where twins are read from: `ExpertStore`."""

    def read(self, expert: ExpertId, precision: Precision, part: NDArray[np.uint8], start: int = 0) -> None:
        """Fill `part` with the blob's bytes from `start` on. Raises ApexError."""

    def verify(self, expert: ExpertId, precision: Precision, blob: NDArray[np.uint8]) -> None:
        """Raises ApexError where a whole blob is not the one that was written."""


class Carrier:
    """Copies parts from a source to the slots of a cache, by way of a host tier and a simulated link where there are some."""

    def __init__(
        self,
        source: Source,
        cache: ExpertCache,
        device: torch.device,
        link: Link | None = None,
        host: ExpertCache | None = None,
    ) -> None:
        self._source, self._cache, self._link, self._host = source, cache, link, host
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free_after: dict[tuple[Precision, int], torch.cuda.Event] = {}  # what still computes with a slot

    def carry(self, load: Load, start: int, stop: int) -> None:
        """Bytes `start`..`stop` of a load whose slots are reserved. Raises ApexError."""
        assert load.slot is not None
        pool, host = self._cache.pools[load.precision], self._host
        # By numpy, in this thread alone: torch would wake its other threads, which the engine computes with.
        here = pool.bytes[load.slot, start:stop] if pool.bytes is not None else None
        if host is None or load.host is None:
            assert here is not None
            self._source.read(load.expert, load.precision, here, start)
        else:
            staged = host.pools[load.precision]
            assert staged.bytes is not None
            part = staged.bytes[load.host, start:stop]
            if not load.from_host:
                self._source.read(load.expert, load.precision, part, start)
            if here is not None:
                np.copyto(here, part)
            else:
                self._send(load, staged.memory[load.host, start:stop], pool.memory[load.slot, start:stop])
        if self._link:
            self._link.transfer(stop - start)

    def check(self, load: Load) -> None:
        """Raises ApexError where a whole load is not what was written. What came from the host tier was checked there."""
        held, slot = (self._cache, load.slot) if self._host is None or load.host is None else (self._host, load.host)
        pool = held.pools[load.precision]
        if not load.from_host:
            assert slot is not None and pool.bytes is not None
            self._source.verify(load.expert, load.precision, pool.bytes[slot])

    def used(self, precision: Precision, slot: int) -> None:
        """What was launched so far may still compute with the slot: nothing is copied there before it is done."""
        if self._stream is not None:
            event = torch.cuda.current_stream(self._stream.device).record_event()
            self._free_after[precision, slot] = event

    def _send(self, load: Load, staged: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            assert self._stream is not None
            after = self._free_after.get((load.precision, load.slot or 0))
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(staged, non_blocking=True)
            self._stream.record_event().synchronize()  # a worker waits here, not the compute stream
