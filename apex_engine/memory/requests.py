"""What is on its way: one load a twin however many want it, demands before prefetches before upgrades. Books only.

A load goes in blocks, and whoever is free takes the next block of the first load that has one. A demand is waited for. A
prefetch is dropped once its layer has passed. An upgrade, the better twin of one that serves meanwhile, waits for all others;
begun, it goes on over tokens until a demand needs its slot.

Everything here wants the tier's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from apex_engine.core.prefetch import LEAST_EARLY
from apex_engine.core.vocabulary import ExpertId, Precision

BLOCK = 1 << 20  # most bytes of a block; a multiple of the alignment of direct reads
BLOCKS = 4  # a demand is at least so many, as long as they are not tiny: taking one costs about 0.1 ms
LEAST_BLOCK = 256 << 10


class Kind(IntEnum):
    """In the order in which they are served."""

    DEMAND = 0
    PREFETCH = 1
    UPGRADE = 2


@dataclass(eq=False, slots=True)
class Load:
    """The ticket of a request: one twin on its way to a slot, or there. `over`: there, or failed with `error`."""

    expert: ExpertId
    precision: Precision
    now: int  # layer at work when it was asked for
    size: int  # bytes
    share: int | None = None  # see `ExpertCache.reserve`
    kind: Kind = Kind.PREFETCH
    block: int = 0  # bytes that it comes by
    alone: bool = False  # no other such block should be on its way with one of it
    taken: int = 0  # bytes of it that are there or on their way
    again: list[tuple[int, int]] = field(default_factory=list)  # parts that were taken and put down: from, to
    slot: int | None = None
    host: int | None = None  # its slot in the host tier
    from_host: bool = False
    waiters: int = 0
    early_bytes: int = 0  # brought before anyone asked
    checked: bool | None = (
        None  # all of it is there and being checked: by a worker, or by a caller, who may be interrupted
    )
    error: BaseException | None = None
    dropped: bool = False
    over: bool = False

    @classmethod
    def there(cls, expert: ExpertId, precision: Precision, slot: int) -> Load:
        """The ticket of a twin that is resident, pinned once: it says no more than a ticket does, since every hit makes one."""
        load = cls.__new__(cls)
        load.expert, load.precision, load.slot = expert, precision, slot
        load.over, load.error, load.waiters = True, None, 1
        return load

    @property
    def demand(self) -> bool:
        return self.kind is Kind.DEMAND

    @property
    def begun(self) -> bool:
        """All of it is there or on its way."""
        return self.taken == self.size and not self.again


@dataclass(eq=False, slots=True)
class Block:
    """A part of a blob, in bytes, in the hands of whoever took it. `early`: nobody had asked for the twin then."""

    load: Load
    start: int
    stop: int
    early: bool
    worker: bool  # in the hands of a worker thread, which nothing interrupts


def block_size(size: int) -> int:
    """Bytes of a block of a demand of `size` bytes; the last one may be shorter."""
    return min(size, BLOCK, max(LEAST_BLOCK, -(-size // BLOCKS // 4096) * 4096))


def early_block_size(most: int) -> int:
    """Bytes of a block of a prefetch that should take no more than `most`, rounded to what can be read."""
    return min(BLOCK, max(LEAST_EARLY, most // 4096 * 4096))


class Requests:
    """All loads that are not over, their queues, and the blocks that are being carried."""

    def __init__(self) -> None:
        self.loads: dict[tuple[ExpertId, Precision], Load] = {}
        self.queues: dict[Kind, list[Load]] = {kind: [] for kind in Kind}
        self.carried: set[Block] = set()

    def add(self, load: Load) -> None:
        self.loads[load.expert, load.precision] = load
        self.enqueue(load)

    def enqueue(self, load: Load) -> None:
        """Into the queue of its kind, if there is something to take and it is in none."""
        if not load.begun and load.error is None and load not in self.queues[load.kind]:
            self.queues[load.kind].append(load)

    def unqueue(self, load: Load) -> None:
        for queue in self.queues.values():
            if load in queue:
                queue.remove(load)

    def become(self, load: Load, kind: Kind, block: int) -> None:
        """A load of another kind from now on, in blocks of that size; wanted again if it had been dropped."""
        self.unqueue(load)
        load.kind, load.block, load.dropped = kind, block, False
        self.enqueue(load)

    def dropped_by(self, layer: int | None) -> Iterator[Load]:
        """The loads that nobody waits for and that go when `layer` has got what it wants; None: when a pass begins."""
        for kind in (Kind.PREFETCH, Kind.UPGRADE):
            for load in list(self.queues[kind]):
                if layer in (None, load.expert.layer) and not (kind is Kind.UPGRADE and load.taken):
                    yield load

    def running(self, load: Load) -> bool:
        """Whether a part of it is on its way."""
        return any(block.load is load for block in self.carried)

    def next(
        self, reserve: Callable[[Load], bool], give_up: Callable[[Load], object], only_demands: bool
    ) -> Load | None:
        """The first load that has a block to take, and a slot, or gets one by `reserve`. What gets none although nobody is
        waiting for it is given up: its place is needed by others."""
        for load in self.queues[Kind.DEMAND]:
            if load.slot is not None or reserve(load):
                return load
        if only_demands:
            return None
        alone = any(block.early and block.load.alone for block in self.carried)
        for kind in (Kind.PREFETCH, Kind.UPGRADE):
            for load in list(self.queues[kind]):
                if alone and load.alone:
                    continue
                if load.slot is not None or reserve(load):
                    return load
                give_up(load)
        return None

    def take(self, load: Load, worker: bool) -> Block:
        """Its next block."""
        start, stop = load.again[-1] if load.again else (load.taken, min(load.taken + load.block, load.size))
        block = Block(load, start, stop, not load.demand, worker)
        self.carried.add(block)  # first: what is lost between here and there is found again
        if load.again:
            load.again.pop()
        load.taken = max(load.taken, stop)
        if load.begun:
            self.unqueue(load)
        return block

    def put_down(self, block: Block) -> None:
        """It was not brought: somebody else will."""
        block.load.checked = None
        block.load.again.append((block.start, block.stop))
        self.carried.discard(block)  # after it: a part may be brought twice, and never not at all
        self.enqueue(block.load)

    def finished(self, load: Load) -> bool:
        """Whether nothing of it is on its way and nothing will be."""
        return not self.running(load) and (load.begun or load.error is not None or load.dropped)

    def recover(self) -> None:
        """Nobody waits, and nothing is in the hands of a caller any more: what it had taken is to be brought again."""
        for block in [block for block in self.carried if not block.worker]:
            self.put_down(block)
        for queue in self.queues.values():
            queue.clear()
        for load in self.loads.values():
            load.waiters = 0
            if load.begun and not self.running(load) and not load.checked:
                load.again.append((0, load.size))
            self.enqueue(load)
