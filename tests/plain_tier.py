"""The plain tier: reads a twin when it is asked for, in the caller's own thread. What faster ones must amount to."""

import threading

from apex_engine.core import events
from apex_engine.memory.requests import Kind, Load


class PlainTier:
    """A `Tier` without workers, blocks or priorities."""

    rate = 1e9

    def __init__(self, cache, source, stream):
        self.lock, self.residency = threading.Lock(), cache
        self._cache, self._source, self._stream, self._loads = cache, source, stream, {}

    def request(self, expert, precision, now, share=None):
        slot = self._cache.find(expert, precision)
        if slot is not None:
            self._cache.pin(precision, slot)
            self._stream.emit(events.Asked(expert, precision, True, False, 0))
            return Load(expert, precision, now, 0, slot=slot, over=True, waiters=1)
        load = self._loads.get((expert, precision))
        if load is None:
            self._stream.emit(events.Asked(expert, precision, False, False, 0))
            size = self._cache.pools[precision].layout.stride
            load = self._loads[expert, precision] = Load(expert, precision, now, size, share, Kind.DEMAND)
        load.waiters += 1
        return load

    def settle(self, tickets, busy):
        for load in tickets:
            if not load.over and load.slot is None:
                load.slot = self._cache.reserve(load.expert, load.precision, load.now, True, load.share)

    def prefetch(self, wish, now):
        self._cache.mask(wish.expert, wish.precision)
        return 0 if self._cache.find(wish.expert, wish.precision) is not None else 1

    def upgrade(self, expert, precision, now):
        pass

    def drop(self, layer):
        self._cache.unmask(layer)

    def drop_all(self):
        pass

    def end_streaming(self):
        self._cache.end_streaming()

    def evict_all(self, precisions):
        for precision in precisions:
            self._cache.evict(precision)

    def arrived(self, tickets):
        with self.lock:
            for load in tickets:
                self.settle([load], busy=False)
                if not load.over and load.slot is not None:
                    self._read(load)
            there = [load for load in tickets if load.over]
            assert there, "all slots are held by the caller"
            for load in there:
                tickets.remove(load)
            failed = next((load.error for load in there if load.error), None)
            if failed:
                self._give_back(there)
                raise failed
            return there

    def forget(self, tickets):
        with self.lock:
            self._give_back(tickets)

    def release(self, slots):
        with self.lock:
            for precision, slot in slots:
                self._cache.unpin(precision, slot)

    def busy_seconds(self):
        return 0.0

    def recover(self):
        pass

    def close(self):
        pass

    def _read(self, load):
        blob = self._cache.pools[load.precision].bytes[load.slot]
        try:
            self._source.read(load.expert, load.precision, blob)
            self._source.verify(load.expert, load.precision, blob)
        except Exception as error:
            load.error = error
            self._cache.abort(load.precision, load.slot)
        else:
            self._cache.commit(load.precision, load.slot, load.waiters)
            self._stream.emit(events.Moved(load.expert, load.precision, load.size, False, True, 0.0))
            self._stream.emit(events.Loaded(load.expert, load.precision, True))
        load.over = True
        del self._loads[load.expert, load.precision]

    def _give_back(self, tickets):
        for load in tickets:
            load.waiters -= 1
            if load.over and not load.error:
                self._cache.unpin(load.precision, load.slot)
