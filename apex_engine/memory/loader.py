"""Brings twins to their slots while the engine computes.

A load goes in blocks, and whoever is free takes the next block of the first load that has one: worker threads, and the engine
itself while it has nothing else to do. Demands come before prefetches at every block, so that a prefetch under way yields at the
next one. There is one load of a twin however many want it.

    disk -> slot                      on a CPU
    disk -> host tier -> slot         elsewhere, and wherever a host tier is asked for; a twin of the host tier skips the disk

One lock guards the cache, its policy and the queues. `acquire`, `expect` and `drop` want it held (`with loader.lock`), the
others take it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apex_engine.core.ledger import Ledger
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.errors import ApexError
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.link import Link
from apex_engine.memory.store import ExpertStore

WORKERS = 4
BLOCK = 1 << 20  # most bytes of a block; a multiple of the alignment of direct reads
BLOCKS = 4  # a demand is at least so many, as long as they are not tiny: taking one costs about 0.1 ms
LEAST_BLOCK = 256 << 10
# Bytes of a block of a prefetch; there is one on its way at a time, for which a demand may have to wait.
LEAST_EARLY = 32 << 10


class Load:
    """One twin on its way to a slot."""

    def __init__(self, expert: ExpertId, precision: Precision, now: int, stride: int, share: int | None) -> None:
        self.expert, self.precision, self.now, self.share = expert, precision, now, share
        self.taken, self.size = 0, stride  # bytes of it that are there or on their way; in all
        self.block = _block(stride)
        self.demand = False
        self.slot: int | None = None
        self.host: int | None = None  # its slot in the host tier
        self.from_host = False
        self.running = 0  # blocks on their way
        self.waiters = 0
        self.early_bytes = 0  # brought before anyone asked
        self.error: Exception | None = None
        self.dropped = False
        self.over = False


class Block(NamedTuple):
    """A part of a blob, in bytes, to be brought by whoever took it. `early`: nobody had asked for the twin then."""

    load: Load
    start: int
    stop: int
    early: bool


class Loader:
    """To be closed: its threads hold it, and the cache with it."""

    def __init__(
        self,
        store: ExpertStore,
        cache: ExpertCache,
        ledger: Ledger,
        device: torch.device,
        link: Link | None = None,
        host: ExpertCache | None = None,
        workers: int = WORKERS,
    ) -> None:
        self.lock = threading.Lock()
        self.ledger = ledger
        self.rate = 0.0  # bytes a second while something is on its way, of late
        self._store, self._cache, self._link, self._host = store, cache, link, host
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free_after: dict[tuple[Precision, int], torch.cuda.Event] = {}  # what still computes with a slot
        self._work, self._change = threading.Condition(self.lock), threading.Condition(self.lock)
        self._loads: dict[tuple[ExpertId, Precision], Load] = {}
        self._demands: list[Load] = []
        self._prefetches: list[Load] = []
        self._unused: dict[tuple[ExpertId, Precision], int] = {}  # prefetched and not used yet -> bytes
        self._moving = self._prefetching = 0  # blocks
        self._moving_since = 0.0
        self._recent_bytes = self._recent_seconds = 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"apex-loader-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def acquire(self, expert: ExpertId, precision: Precision, now: int, share: int | None = None) -> int | Load:
        """The slot of a resident twin, pinned once; else its load, which has a pin for the caller when `arrived` returns it.

        `share`: see `ExpertCache.reserve`. Lock held.
        """
        key = expert, precision
        slot = self._cache.find(*key)
        if slot is not None:
            self._cache.pin(precision, slot)
            if key in self._unused:
                self._foreseen(self._unused.pop(key))
            return slot
        load = self._loads.get(key)
        if load is None:
            load = self._new(expert, precision, now, share)
            self.ledger.missing += 1
        elif not load.demand:
            self._foreseen(load.early_bytes)
            if load in self._prefetches:
                self._prefetches.remove(load)
        if not load.demand:
            load.demand, load.dropped = True, False
            if load.taken < load.size and load.error is None:
                self._demands.append(load)
                load.block = _block(load.size)
                blocks = -(-(load.size - load.taken) // load.block)
                # one block is the caller's own, as soon as it waits
                self._work.notify(blocks - 1 if load is self._demands[0] else blocks)
        load.waiters += 1
        return load

    def settle(self, loads: Iterable[Load]) -> None:
        """Find slots for these demands now, while all that the step has got is pinned: what makes room would depend on what is
        computed by then. Lock held."""
        for load in loads:
            if load.slot is None and not load.over:
                self._reserve(load)

    def expect(self, expert: ExpertId, precision: Precision, now: int, block: int | None = None) -> int:
        """A later layer will probably use this twin: keep it, or fetch it when nobody waits. Returns the bytes still to come.

        `block`: bytes that it comes by, rounded to what can be read; at each block it yields to demands. Default: as they do.
        Lock held.
        """
        if self._cache.find(expert, precision) is not None:
            self._cache.mask(expert, precision)
            return 0
        load = self._loads.get((expert, precision))
        if load is None:
            load = self._new(expert, precision, now, None)
            if block is not None:
                load.block = min(BLOCK, max(LEAST_EARLY, block // 4096 * 4096))
            self._prefetches.append(load)
            self._work.notify()
        return load.size - load.taken

    def drop(self, layer: int) -> None:
        """Layer `layer` has got what it wants: give up what was fetched for it and nobody waits for. Lock held."""
        for load in [load for load in self._prefetches if load.expert.layer == layer]:
            self._drop(load)
        self._cache.unmask(layer)

    def drop_all(self) -> None:
        """Give up every prefetch. Lock held."""
        for load in list(self._prefetches):
            self._drop(load)

    def arrived(self, loads: list[Load]) -> list[Load]:
        """Waits for one of `loads` at least, and takes those that are there out of the list.

        Raises ApexError where one failed: its slot is free again, and the engine stays usable.
        """
        while True:
            with self.lock:
                there = [load for load in loads if load.over]
                for load in there:
                    loads.remove(load)
                if there:
                    failed = next((load.error for load in there if load.error), None)
                    if failed:
                        self._give_back(there)
                        raise failed
                    return there
                block = self._next(only_demands=True)
                if block is None:
                    self._change.wait()
                    continue
            self._bring(block)

    def forget(self, loads: Iterable[Load]) -> None:
        """The caller does not wait for them any more."""
        with self.lock:
            self._give_back(loads)

    def release(self, slots: list[tuple[Precision, int]]) -> None:
        """The caller's pins of these slots."""
        with self.lock:
            for precision, slot in slots:
                self._cache.unpin(precision, slot)
                if self._stream is not None:
                    self._free_after[precision, slot] = torch.cuda.current_stream(self._stream.device).record_event()
            if self._demands:  # one may have waited for a slot
                self._work.notify_all()

    def busy_seconds(self) -> float:
        """Seconds so far in which something was on its way."""
        with self.lock:
            return self._busy_seconds()

    def host_is_pinned(self) -> bool | None:
        """None without a host tier."""
        return all(pool.memory.is_pinned() for pool in self._host.pools.values()) if self._host else None

    def close(self) -> None:
        """Stops the threads. Whoever waits gets an ApexError."""
        with self.lock:
            self._closed = True
            for load in [*self._demands, *self._prefetches]:
                self._failed(load, ApexError("the engine was closed while it loaded"))
                if not load.running:
                    self._end(load)
            self._work.notify_all()
            self._change.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- with the lock held ----

    def _foreseen(self, nbytes: int) -> None:
        self.ledger.missing += 1
        self.ledger.foreseen += 1
        self.ledger.useful_bytes += nbytes

    def _new(self, expert: ExpertId, precision: Precision, now: int, share: int | None) -> Load:
        if self._closed:
            raise ApexError("the engine of this model was closed: load the checkpoint again")
        load = Load(expert, precision, now, self._cache.pools[precision].layout.stride, share)
        self._unused.pop((expert, precision), None)
        self._loads[expert, precision] = load
        return load

    def _next(self, only_demands: bool = False) -> Block | None:
        """The next block to bring: of the first load that has one, and a slot."""
        for load in self._demands:
            if load.slot is not None or self._reserve(load) or (self._make_way(load) and self._reserve(load)):
                return self._take(load, self._demands)
        if not only_demands and not self._prefetching:
            for load in list(self._prefetches):
                if load.slot is not None or self._reserve(load):
                    return self._take(load, self._prefetches)
                self._drop(load)  # its place is needed by others
        return None

    def _take(self, load: Load, queue: list[Load]) -> Block:
        start = load.taken
        load.taken = stop = min(start + load.block, load.size)
        if stop == load.size:
            queue.remove(load)
        load.running += 1
        self._prefetching += not load.demand
        if not self._moving:
            self._moving_since = time.perf_counter()
        self._moving += 1
        return Block(load, start, stop, not load.demand)

    def _reserve(self, load: Load) -> bool:
        key = load.expert, load.precision
        if self._host and load.host is None:
            load.host = self._host.find(*key)
            load.from_host = load.host is not None
            if load.host is not None:
                self._host.pin(load.precision, load.host)
            else:
                load.host = self._host.reserve(*key, load.now)
                if load.host is None:
                    return False
        load.slot = self._cache.reserve(*key, load.now, load.demand, load.share)
        return load.slot is not None

    def _make_way(self, demand: Load) -> bool:
        """Gives up a prefetch that holds a slot and is not moving. Whether there was one."""
        for load in self._prefetches:
            if load.precision is demand.precision and load.slot is not None and not load.running:
                self._drop(load)
                return True
        return False

    def _drop(self, load: Load) -> None:
        self._prefetches.remove(load)
        load.dropped = True  # unless someone asks for it before its running blocks are there
        if not load.running:
            self._end(load)

    def _end(self, load: Load) -> None:
        """All blocks are there, or none will come any more."""
        failed = load.error is not None or load.dropped
        if load.host is not None and self._host:
            if load.from_host:
                self._host.unpin(load.precision, load.host)
            elif failed:
                self._host.abort(load.precision, load.host)
            else:
                self._host.commit(load.precision, load.host)
            self._host.touch(load.expert, load.precision)
        if load.slot is not None:
            if failed:
                self._cache.abort(load.precision, load.slot)
            else:
                self._cache.commit(load.precision, load.slot, load.waiters)
                self.ledger.loads[load.precision] += load.demand
                if not load.demand:
                    self._cache.mask(load.expert, load.precision)
                    self._unused[load.expert, load.precision] = load.early_bytes
        if load.error is not None and not load.waiters:
            self.ledger.failed_prefetches += 1
        del self._loads[load.expert, load.precision]
        load.over = True
        self._change.notify_all()

    def _give_back(self, loads: Iterable[Load]) -> None:
        for load in loads:
            load.waiters -= 1
            if load.over and not load.error and load.slot is not None:
                self._cache.unpin(load.precision, load.slot)

    def _busy_seconds(self) -> float:
        return self.ledger.busy_seconds + (time.perf_counter() - self._moving_since if self._moving else 0.0)

    # ---- without the lock ----

    def _run(self) -> None:
        """A worker's life."""
        while True:
            with self._work:
                while (block := self._next()) is None:
                    if self._closed:
                        return
                    self._work.wait()
            self._bring(block)

    def _bring(self, block: Block) -> None:
        load, error = block.load, None
        try:
            self._copy(load, block.start, block.stop)
        except Exception as e:
            error = e
        with self.lock:
            self._account(block)
            load.running -= 1
            self._failed(load, error)
            complete = not (load.running or load.taken < load.size or load.error or load.dropped)
            if not complete:
                if not load.running and (load.error or load.dropped):
                    self._end(load)
                return
        try:  # nobody else touches the load now, but some may come to wait for it
            self._check(load)
        except Exception as e:
            error = e
        with self.lock:
            self._failed(load, error)
            self._end(load)

    def _failed(self, load: Load, error: Exception | None) -> None:
        if error is not None:
            load.error = load.error or error
            for queue in (self._demands, self._prefetches):
                if load in queue:
                    queue.remove(load)

    def _account(self, block: Block) -> None:
        load, nbytes, ledger, now = block.load, block.stop - block.start, self.ledger, time.perf_counter()
        ledger.bytes_read[load.precision] += nbytes
        if block.early:
            self._prefetching -= 1
            ledger.prefetched_bytes += nbytes
            load.early_bytes += nbytes
            if load.demand:  # someone asked for it meanwhile
                ledger.useful_bytes += nbytes
            if self._prefetches:
                self._work.notify()
        seconds = now - self._moving_since
        self._moving_since = now
        self._moving -= 1
        ledger.busy_seconds += seconds
        self._recent_bytes = 0.98 * self._recent_bytes + nbytes
        self._recent_seconds = 0.98 * self._recent_seconds + seconds
        self.rate = self._recent_bytes / max(self._recent_seconds, 1e-9)

    def _copy(self, load: Load, start: int, stop: int) -> None:
        assert load.slot is not None
        pool, host = self._cache.pools[load.precision], self._host
        # By numpy, in this thread alone: torch would wake its other threads, which the engine computes with.
        here = pool.bytes[load.slot, start:stop] if pool.bytes is not None else None
        if host is None or load.host is None:
            assert here is not None
            self._store.read(load.expert, load.precision, here, start)
        else:
            staged = host.pools[load.precision]
            assert staged.bytes is not None
            part = staged.bytes[load.host, start:stop]
            if not load.from_host:
                self._store.read(load.expert, load.precision, part, start)
            if here is not None:
                np.copyto(here, part)
            else:
                self._send(load, staged.memory[load.host, start:stop], pool.memory[load.slot, start:stop])
        if self._link:
            self._link.transfer(stop - start)

    def _send(self, load: Load, staged: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            assert self._stream is not None
            after = self._free_after.get((load.precision, load.slot or 0))
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(staged, non_blocking=True)
            self._stream.record_event().synchronize()  # a worker waits here, not the compute stream

    def _check(self, load: Load) -> None:
        held, slot = (self._cache, load.slot) if self._host is None or load.host is None else (self._host, load.host)
        pool = held.pools[load.precision]
        if not load.from_host:
            assert slot is not None and pool.bytes is not None
            self._store.verify(load.expert, load.precision, pool.bytes[slot])


def _block(size: int) -> int:
    """Bytes of a block of a demand of `size` bytes; the last one may be shorter."""
    return min(size, BLOCK, max(LEAST_BLOCK, -(-size // BLOCKS // 4096) * 4096))
