"""The tier that brings twins while the engine computes: worker threads, and the caller itself while it has nothing else to do.

One lock guards the cache, its policy and the queues. Events are emitted while it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from apex_engine.core.events import Stream
from apex_engine.core.prefetch import Wish
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.copies import Carrier
from apex_engine.memory.filling import Filling
from apex_engine.memory.host import HostCache
from apex_engine.memory.requests import Block, Kind, Load

WORKERS = 4


class _Whole:
    """Whether the books are whole: a caller that is interrupted while it changes them leaves them `torn` until `recover`, and no
    worker touches them meanwhile."""

    def __init__(self) -> None:
        self.torn = self._before = False

    def __enter__(self) -> None:
        self._before = self.torn
        self.torn = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.torn = self._before


class Loader:
    """A `Tier`. To be closed: its threads hold it, and the cache with it."""

    def __init__(
        self,
        cache: ExpertCache,
        carrier: Carrier,
        stream: Stream,
        host: HostCache | None = None,
        workers: int = WORKERS,
    ) -> None:
        """`carrier`: fills the slots of `cache`, by way of `host` where there is one."""
        self.lock = threading.Lock()
        self.residency = cache
        self._cache, self._carrier = cache, carrier
        self._work = threading.Condition(self.lock)
        # One for each caller that waits for a load to be over: a condition's `wait` may lose the lock when it is interrupted.
        self._waiting: list[threading.Lock] = []
        self._filling = Filling(cache, stream, host)
        self._requests = self._filling.requests
        self._whole = _Whole()
        self._threads = [
            threading.Thread(target=self._run, name=f"apex-loader-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    # ---- with the lock held, by the caller ----

    def request(self, expert: ExpertId, precision: Precision, now: int, share: int | None = None) -> Load:
        # A hit changes nothing that a worker could trip over.
        held = self._filling.held(expert, precision)
        if held is not None:
            return held
        with self._whole:
            return self._filling.request(expert, precision, now, share)

    def settle(self, tickets: Iterable[Load], busy: bool) -> None:
        blocks = 0
        with self._whole:
            for load in tickets:
                if not load.over:
                    if load.slot is None:  # what makes room would depend on what is computed by the time a worker looks
                        self._filling.reserve(load)
                    blocks += -(-(load.size - load.taken) // max(load.block, 1)) + len(load.again)
        if blocks:
            self._work.notify(max(blocks - 1, int(busy)))  # one is the caller's own, as soon as it waits

    def prefetch(self, wish: Wish, now: int) -> int:
        with self._whole:
            self._cache.mask(wish.expert, wish.precision)
            missing = self._filling.early(wish, now, Kind.PREFETCH)
        if missing:
            self._work.notify()
        return missing

    def upgrade(self, expert: ExpertId, precision: Precision, now: int) -> None:
        with self._whole:
            missing = self._filling.early(Wish(expert, precision, alone=True), now, Kind.UPGRADE)
        if missing:
            self._work.notify()

    def drop(self, layer: int) -> None:
        with self._whole:
            self._filling.drop_for(layer)
            self._cache.unmask(layer)

    def drop_all(self) -> None:
        with self._whole:
            self._filling.drop_for(None)

    def end_streaming(self) -> None:
        with self._whole:
            self._cache.end_streaming()

    def evict_all(self, precisions: Iterable[Precision]) -> None:
        with self._whole:
            for precision in self._cache.pools.keys() & set(precisions):
                self._cache.evict(precision)

    def outstanding(self) -> int:
        """Loads that are not over."""
        return len(self._requests.loads)

    # ---- by the caller, without it ----

    @property
    def rate(self) -> float:
        return self._filling.meter.rate

    def arrived(self, tickets: list[Load]) -> list[Load]:
        while True:
            with self.lock:
                there = [load for load in tickets if load.over]
                for load in there:
                    tickets.remove(load)
                with self._whole:
                    if failed := next((load.error for load in there if load.error), None):
                        self._filling.give_back(there)
                        raise failed
                    block = None if there else self._filling.next(worker=False, now=time.perf_counter())
                if there:
                    return there
                change = self._promise_change() if block is None else None
            if block is not None:
                self._bring(block)
            elif change is not None:
                change.acquire()

    def forget(self, tickets: Iterable[Load]) -> None:
        with self.lock:
            self._filling.give_back(tickets)

    def release(self, slots: list[tuple[Precision, int]]) -> None:
        with self.lock:
            for precision, slot in slots:
                self._cache.unpin(precision, slot)
                self._carrier.used(precision, slot)
            if self._requests.queues[Kind.DEMAND]:  # one may have waited for a slot
                self._work.notify_all()

    def busy_seconds(self) -> float:
        with self.lock:
            return self._filling.meter.busy(time.perf_counter())

    def recover(self) -> None:
        with self.lock:
            self._filling.recover(time.perf_counter())
            self._whole.torn = False
            self._work.notify_all()
            self._keep_promises()

    def close(self) -> None:
        if self._whole.torn:
            self.recover()
        with self.lock:
            self._filling.close()
            self._work.notify_all()
            self._keep_promises()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _promise_change(self) -> threading.Lock:
        """What can be acquired once a load is over. Lock held."""
        promise = threading.Lock()
        promise.acquire()
        self._waiting.append(promise)
        return promise

    def _keep_promises(self) -> None:
        while self._waiting:
            self._waiting.pop().release()

    # ---- without the lock ----

    def _run(self) -> None:
        """A worker's life."""
        while True:
            with self._work:
                while self._whole.torn or (block := self._filling.next(True, time.perf_counter())) is None:
                    if self._filling.closed:
                        return
                    self._work.wait()
            self._bring(block)

    def _bring(self, block: Block) -> None:
        load, error = block.load, None
        try:
            try:
                self._carrier.carry(load, block.start, block.stop)
            except Exception as e:
                error = e
            with self._books(block):
                complete = self._filling.came(block, error, time.perf_counter())
            if complete:
                try:  # nobody else touches the load now, but some may come to wait for it
                    self._carrier.check(load)
                except Exception as e:
                    error = e
                with self._books(block):
                    self._filling.failed(load, error)
                    self._filling.end(load)
        except BaseException:  # Ctrl-C in the caller's own block: a worker brings it
            with self._books(block):
                self._filling.put_down(block, time.perf_counter())
            raise

    @contextmanager
    def _books(self, block: Block) -> Iterator[None]:
        """The lock, to change what the books say of a block; a worker waits until they are whole."""
        with self.lock:
            while block.worker and self._whole.torn:
                self._work.wait()
            with nullcontext() if block.worker else self._whole:
                yield
            if block.early or block.load.again:
                self._work.notify()  # the next early block may go, or what was put down
            if block.load.over:
                self._keep_promises()
