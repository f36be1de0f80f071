"""The resident experts: two pools of fixed-size slots, HIGH and LOW. The same class holds the host tier.

Nothing here takes a lock: whoever shares a cache between threads has one (loader.py).

A slot's life:  free -> filling -> resident (pinned n times) -> free.  One owner at a time: whoever reserved a slot fills it and
says so (`commit`) or gives it up (`abort`); a pinned or filling slot is never handed out.

Two things keep what decoding needs where it is:
  masked     a twin expected by a coming layer makes room only for a demand that finds no other victim
  streaming  a prompt goes through nearly all experts once: it fills free slots, each layer its share of them, takes the place of
             twins of the same layer that the policy values less, and sends the rest through a few slots that it uses over and
             over (`Pool.passing`)
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from apex_engine.core.policies import Policy
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.kernels.layout import ALIGN, Layout


class State(Enum):
    FREE = 0
    FILLING = 1
    RESIDENT = 2


class Pool:
    """Slots of one precision: one contiguous uint8 buffer `[slots, stride]` at an address O_DIRECT can read to."""

    def __init__(self, layout: Layout, slots: int, device: torch.device, pinned: bool = False) -> None:
        nbytes = slots * layout.stride + ALIGN
        raw = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        start = -raw.data_ptr() % ALIGN
        self.layout = layout
        self.memory = raw[start : start + slots * layout.stride].view(slots, layout.stride)
        # The same, for threads that should not ask torch.
        self.bytes = self.memory.numpy() if device.type == "cpu" else None
        self.state = [State.FREE] * slots
        self.pins = np.zeros(slots, np.int64)
        self.owner: list[ExpertId | None] = [None] * slots
        self.slot_of: dict[ExpertId, int] = {}  # filling or resident
        self.free = list(range(slots - 1, -1, -1))
        self.layers, self.experts = np.full(slots, -1), np.full(slots, -1)  # of the owner, for the policy
        self.evictable = np.zeros(slots, bool)  # resident and not pinned
        self.masked = np.zeros(slots, bool)
        self.passing = np.zeros(slots, bool)  # holds what a prompt streams through
        # Two at least, so that one is filled while the other computes.
        self.most_passing = max(slots // 8, 2 if slots > 4 else 1)

    def __len__(self) -> int:
        return len(self.state)


class ExpertCache:
    """Which twin is where. Holds no file and starts no load.

    `poison` fills slots that hold nothing valid with NaN bytes, so that a use of one cannot pass a test.
    """

    def __init__(
        self,
        layouts: dict[Precision, Layout],
        slots: dict[Precision, int],
        policy: Policy,
        device: torch.device,
        pinned: bool = False,
        poison: bool = False,
    ) -> None:
        self.pools = {precision: Pool(layouts[precision], n, device, pinned) for precision, n in slots.items() if n}
        self._policy = policy
        self._poison = poison
        # layer -> what is masked until it has passed
        self._masked: dict[int, list[tuple[Precision, int, ExpertId]]] = {}
        for pool in self.pools.values():
            self._spoil(pool, slice(None))

    def find(self, expert: ExpertId, precision: Precision) -> int | None:
        """The slot of a resident twin, or None. Changes nothing; holds until the next `reserve` unless the slot is pinned."""
        pool = self.pools.get(precision)
        slot = pool.slot_of.get(expert) if pool else None
        return slot if pool and slot is not None and pool.state[slot] is State.RESIDENT else None

    def reserve(
        self, expert: ExpertId, precision: Precision, now: int, demand: bool = True, share: int | None = None
    ) -> int | None:
        """A slot to fill with a twin that is neither resident nor filling, evicting while layer `now` is at work; None where no
        slot may be taken.

        The policy chooses among the slots that are not masked; a `demand` takes a masked one where there is no other. `share`:
        the twin is streamed, unless there is a free slot and its layer has not got so many slots yet.
        """
        pool = self.pools[precision]
        assert expert not in pool.slot_of, f"{expert} {precision.word} is resident or being filled already"
        allowed = pool.evictable
        passing = share is not None and (
            not pool.free or int(np.count_nonzero((pool.layers == expert.layer) & ~pool.passing)) >= share
        )
        if passing:
            lesser = self._lesser(pool, expert, precision, now)
            if lesser is not None:
                self._evict(pool, lesser)
                return self._take(pool, expert, lesser, passing=False)
            if (pool.evictable & pool.passing).any():
                allowed = pool.evictable & pool.passing
            elif np.count_nonzero(pool.passing) >= pool.most_passing:
                return None  # those that pass through are all at work
        if pool.free and allowed is pool.evictable:
            return self._take(pool, expert, pool.free.pop(), passing)
        unmasked = allowed & ~pool.masked
        if demand and not unmasked.any():
            unmasked = allowed
        slots = np.flatnonzero(unmasked)
        if not slots.size:
            return None
        layers, experts = pool.layers[slots], pool.experts[slots]
        priorities = self._policy.priority(layers, experts, precision, now)
        # Among equals not the first slot: who holds that depends on what came first.
        slot = int(slots[np.lexsort((experts, layers, priorities))[0]])
        self._evict(pool, slot)
        return self._take(pool, expert, slot, passing)

    def _lesser(self, pool: Pool, expert: ExpertId, precision: Precision, now: int) -> int | None:
        """The slot of a twin of the same layer that the policy values less. Of other layers it has not heard yet what the prompt
        uses there."""
        slots = np.flatnonzero(pool.evictable & ~pool.masked & ~pool.passing & (pool.layers == expert.layer))
        if not slots.size:
            return None
        experts = np.append(pool.experts[slots], expert.expert)
        *priorities, own = self._policy.priority(np.full(len(experts), expert.layer), experts, precision, now)
        least = int(np.lexsort((experts[:-1], priorities))[0])
        return int(slots[least]) if priorities[least] < own else None

    def _evict(self, pool: Pool, slot: int) -> None:
        victim = pool.owner[slot]
        assert victim is not None
        del pool.slot_of[victim]
        self._spoil(pool, slot)

    def evict_all(self, precisions: Iterable[Precision]) -> None:
        """Free every slot that is resident and not pinned."""
        for precision in self.pools.keys() & set(precisions):
            self._free(precision, self.pools[precision].evictable)

    def _free(self, precision: Precision, slots: NDArray[np.bool_]) -> None:
        pool = self.pools[precision]
        for slot in np.flatnonzero(slots).tolist():
            pool.state[slot] = State.FILLING
            self.abort(precision, slot)
            pool.evictable[slot] = pool.masked[slot] = False

    @staticmethod
    def _take(pool: Pool, expert: ExpertId, slot: int, passing: bool) -> int:
        pool.state[slot], pool.owner[slot], pool.slot_of[expert] = State.FILLING, expert, slot
        pool.layers[slot], pool.experts[slot] = expert
        pool.evictable[slot] = pool.masked[slot] = False
        pool.passing[slot] = passing
        return slot

    def commit(self, precision: Precision, slot: int, pins: int = 0) -> None:
        """The owner of a filling slot has filled it: it is resident, pinned so many times."""
        pool = self.pools[precision]
        assert pool.state[slot] is State.FILLING
        pool.state[slot] = State.RESIDENT
        pool.pins[slot] = pins
        pool.evictable[slot] = not pins

    def abort(self, precision: Precision, slot: int) -> None:
        """The owner of a filling slot gives it up: it is free."""
        pool = self.pools[precision]
        owner = pool.owner[slot]
        assert pool.state[slot] is State.FILLING and owner is not None
        del pool.slot_of[owner]
        pool.state[slot], pool.owner[slot] = State.FREE, None
        pool.layers[slot] = -1
        pool.passing[slot] = False
        self._spoil(pool, slot)
        pool.free.append(slot)

    def pin(self, precision: Precision, slot: int) -> None:
        """Keep a resident slot from eviction until as many `unpin`s."""
        pool = self.pools[precision]
        assert pool.state[slot] is State.RESIDENT
        pool.pins[slot] += 1
        pool.evictable[slot] = False

    def unpin(self, precision: Precision, slot: int) -> None:
        pool = self.pools[precision]
        assert pool.pins[slot] > 0
        pool.pins[slot] -= 1
        pool.evictable[slot] = not pool.pins[slot]

    def touch(self, expert: ExpertId, precision: Precision) -> None:
        """Tell the policy that the twin was used, where nobody else does."""
        self._policy.use(*expert, precision, 1)

    def mask(self, expert: ExpertId, precision: Precision) -> None:
        """Keep a twin, if it is resident, until its layer has passed (`unmask`), unless a demand finds no other victim."""
        slot = self.find(expert, precision)
        if slot is not None:
            self.pools[precision].masked[slot] = True
            self._masked.setdefault(expert.layer, []).append((precision, slot, expert))

    def unmask(self, layer: int) -> None:
        """The layer has passed."""
        for precision, slot, expert in self._masked.pop(layer, ()):
            if self.pools[precision].owner[slot] == expert:
                self.pools[precision].masked[slot] = False

    def end_streaming(self) -> None:
        """Free what passed through: what is left of it would depend on what came when."""
        for precision, pool in self.pools.items():
            self._free(precision, pool.evictable & pool.passing)
            pool.passing[:] = False

    def resident_bytes(self) -> int:
        """Bytes of the slots that hold an expert."""
        return sum(len(pool.slot_of) * pool.memory.shape[1] for pool in self.pools.values())

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not agree with each other. Changes nothing."""
        for precision, pool in self.pools.items():
            word = precision.word
            assert len(pool.free) == len(set(pool.free)), f"{word}: a slot is free twice"
            assert len(pool.free) + len(pool.slot_of) == len(pool), f"{word}: a slot is lost"
            for expert, slot in pool.slot_of.items():
                assert pool.owner[slot] == expert, f"{word}: slot {slot} has two owners"
                assert (pool.layers[slot], pool.experts[slot]) == expert
            for slot, state in enumerate(pool.state):
                assert (state is State.FREE) == (slot in pool.free) == (pool.owner[slot] is None), (
                    f"{word}: slot {slot}"
                )
                assert pool.pins[slot] >= 0 and (state is State.RESIDENT or not pool.pins[slot]), (
                    f"{word}: pins of {slot}"
                )
                assert (pool.layers[slot] < 0) == (state is State.FREE), f"{word}: layer of slot {slot}"
                assert pool.evictable[slot] == (state is State.RESIDENT and not pool.pins[slot]), f"{word}: slot {slot}"

    def _spoil(self, pool: Pool, slots: int | slice) -> None:
        if self._poison:
            pool.memory[slots] = 0xFF  # NaN in bfloat16, float16 and float32
