"""The life of a load: it gets slots, its parts come, it ends, and the books say so. No threads.

Everything here wants the tier's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from apex_engine.core import events
from apex_engine.core.events import Stream
from apex_engine.core.prefetch import Wish
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.errors import ApexError
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.host import HostCache
from apex_engine.memory.meter import Meter
from apex_engine.memory.pool import State
from apex_engine.memory.requests import Block, Kind, Load, Requests, block_size, early_block_size


class Filling:
    """Loads on their way into the slots of `cache`, by way of `host` where there is one."""

    def __init__(self, cache: ExpertCache, stream: Stream, host: HostCache | None) -> None:
        self.requests, self.meter = Requests(), Meter()
        self.closed = False
        self._unused: dict[tuple[ExpertId, Precision], int] = {}  # prefetched and not used yet -> bytes
        self._cache, self._stream, self._host = cache, stream, host

    def held(self, expert: ExpertId, precision: Precision) -> Load | None:
        """The ticket of a resident twin, pinned; None where it is not resident."""
        slot = self._cache.find(expert, precision)
        if slot is None:
            return None
        self._cache.pin(precision, slot)
        early = self._unused.pop((expert, precision), None)
        self._stream.emit(events.Asked(expert, precision, True, early is not None, early or 0))
        return Load.there(expert, precision, slot)

    def request(self, expert: ExpertId, precision: Precision, now: int, share: int | None) -> Load:
        """The ticket of a twin that is not resident."""
        load = self.requests.loads.get((expert, precision))
        if load is None:
            load = self._new(expert, precision, now, Kind.DEMAND)
            load.share, load.block = share, block_size(load.size)
            self.requests.add(load)
            self._stream.emit(events.Asked(expert, precision, False, False, 0))
        elif not load.demand:
            self._stream.emit(events.Asked(expert, precision, False, True, load.early_bytes))
            self.requests.become(load, Kind.DEMAND, block_size(load.size))
        load.waiters += 1
        return load

    def early(self, wish: Wish, now: int, kind: Kind) -> int:
        """Bytes still to come of a twin that nobody waits for, from now on if not before."""
        if self._cache.find(wish.expert, wish.precision) is not None:
            return 0
        load = self.requests.loads.get((wish.expert, wish.precision))
        if load is None:
            load = self._new(wish.expert, wish.precision, now, kind)
            load.block = block_size(load.size) if wish.block is None else early_block_size(wish.block)
            load.alone = wish.alone
            self.requests.add(load)
        elif load.kind > kind or load.dropped:
            self.requests.become(load, min(kind, load.kind), load.block)
        return load.size - load.taken

    def _new(self, expert: ExpertId, precision: Precision, now: int, kind: Kind) -> Load:
        if self.closed:
            raise ApexError("the engine of this model was closed: load the checkpoint again")
        self._unused.pop((expert, precision), None)
        return Load(expert, precision, now, self._cache.pools[precision].layout.stride, kind=kind)

    def next(self, worker: bool, now: float) -> Block | None:
        """The next block to bring at `now` seconds; a caller (no `worker`) brings demands only."""
        load = self.requests.next(self._has_place, self.drop, only_demands=not worker)
        if load is None:
            return None
        if not self.requests.carried:
            self.meter.begin(now)
        return self.requests.take(load, worker)

    def came(self, block: Block, error: Exception | None, now: float) -> bool:
        """Count a block, or the error that it ended with. Whether all of its load is there, to be checked and ended."""
        load, requests, nbytes = block.load, self.requests, block.stop - block.start
        requests.carried.discard(block)
        seconds = self.meter.end(nbytes, now, bool(requests.carried))
        if block.early:
            load.early_bytes += nbytes
        self._stream.emit(events.Moved(load.expert, load.precision, nbytes, block.early, load.demand, seconds))
        self.failed(load, error)
        if not requests.finished(load):
            return False
        if load.error is not None or load.dropped:
            self.end(load)
            return False
        load.checked = block.worker
        return True

    def put_down(self, block: Block, now: float) -> None:
        """Whoever carried a block does not bring it: somebody else will."""
        if not block.load.over:
            self.requests.put_down(block)
        self._rest(now)

    def failed(self, load: Load, error: Exception | None) -> None:
        if error is not None:
            load.error = load.error or error
            self.requests.unqueue(load)

    def drop(self, load: Load) -> None:
        """Nobody waits for it, and nobody will."""
        self.requests.unqueue(load)
        load.dropped = True  # unless someone asks for it before its running blocks are there
        if self.requests.finished(load):
            self.end(load)

    def drop_for(self, layer: int | None) -> None:
        """See `Requests.dropped_by`."""
        for load in self.requests.dropped_by(layer):
            self.drop(load)

    def close(self) -> None:
        """Nothing is taken on any more, and what is not begun fails."""
        self.closed = True
        for load in list(self.requests.loads.values()):
            if not load.begun:
                self.failed(load, ApexError("the engine was closed while it loaded"))
                if self.requests.finished(load):
                    self.end(load)

    def end(self, load: Load) -> None:
        """All blocks are there, or none will come any more."""
        failed = load.error is not None or load.dropped
        if load.host is not None and self._host:
            self._host.end(load.expert, load.precision, load.host, load.from_host, failed)
        if load.slot is not None and failed:
            self._cache.abort(load.precision, load.slot)
        elif load.slot is not None:
            self._cache.commit(load.precision, load.slot, load.waiters)
            self._stream.emit(events.Loaded(load.expert, load.precision, load.demand))
            if not load.demand:
                self._cache.mask(load.expert, load.precision)
                self._unused[load.expert, load.precision] = load.early_bytes
        if load.error is not None and not load.waiters:
            self._stream.emit(events.PrefetchFailed(load.expert, load.precision))
        self._over(load)

    def give_back(self, tickets: Iterable[Load]) -> None:
        """Whoever waited for them does not any more."""
        for load in tickets:
            load.waiters -= 1
            if load.over and not load.error and load.slot is not None:
                self._cache.unpin(load.precision, load.slot)

    def reserve(self, load: Load) -> bool:
        """A slot for it, and one of the host tier. Whether there is one."""
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

    def recover(self, now: float) -> None:
        """A caller ended anywhere, and no other is under way: books that agree with each other, and nobody's pins."""
        self.requests.recover()
        self._rest(now)
        for load in list(self.requests.loads.values()):
            pool = self._cache.pools[load.precision]
            if load.slot is not None and pool.owner[load.slot] != load.expert:
                load.slot = None  # it had not got it, or had given it up
            elif load.slot is not None and pool.state[load.slot] is State.RESIDENT:
                self._over(load)  # it had ended
        filling = list(self.requests.loads.values())
        self._cache.rebuild({(load.precision, load.slot) for load in filling if load.slot is not None})
        if self._host:
            self._recover_host(self._host, filling)

    def _recover_host(self, host: HostCache, filling: list[Load]) -> None:
        for load in filling:
            if load.host is not None and host.pools[load.precision].owner[load.host] != load.expert:
                load.host, load.from_host = None, False
            elif load.host is not None:
                load.from_host = host.find(load.expert, load.precision) is not None
        host.rebuild({(load.precision, load.host) for load in filling if load.host is not None and not load.from_host})
        for load in filling:
            if load.host is not None and load.from_host:
                host.pin(load.precision, load.host)

    def _has_place(self, load: Load) -> bool:
        return self.reserve(load) or (load.demand and self._make_way(load) and self.reserve(load))

    def _make_way(self, demand: Load) -> bool:
        """Gives up an upgrade or a prefetch that holds a slot and is not moving. Whether there was one."""
        for kind in (Kind.UPGRADE, Kind.PREFETCH):
            for load in self.requests.queues[kind]:
                if load.precision == demand.precision and load.slot is not None and not self.requests.running(load):
                    self.drop(load)
                    return True
        return False

    def _rest(self, now: float) -> None:
        """Nothing may be on its way any more."""
        if not self.requests.carried:
            self.meter.end(0, now, others=False)

    def _over(self, load: Load) -> None:
        self.requests.loads.pop((load.expert, load.precision), None)
        self.requests.unqueue(load)
        load.over = True
