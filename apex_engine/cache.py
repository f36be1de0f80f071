"""The resident experts: two pools of fixed-size slots, HIGH and LOW.

A slot's life:  free -> filling -> resident (pinned n times) -> free.  One owner at a time: whoever reserved a slot fills it and
says so (`commit`) or gives it up (`abort`); a pinned or filling slot is never handed out.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from torch import Tensor

from apex_engine.kernels.layout import ALIGN, Layout
from apex_engine.policies import Policy
from apex_engine.vocabulary import ExpertId, Precision


class State(Enum):
    FREE = 0
    FILLING = 1
    RESIDENT = 2


class Pool:
    """Slots of one precision: one contiguous uint8 buffer `[slots, stride]` at an address O_DIRECT can read to."""

    def __init__(self, layout: Layout, slots: int, device: torch.device) -> None:
        raw = torch.empty(slots * layout.stride + ALIGN, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGN
        self.layout = layout
        self.memory = raw[start : start + slots * layout.stride].view(slots, layout.stride)
        self.state = [State.FREE] * slots
        self.pins = np.zeros(slots, np.int64)
        self.owner: list[ExpertId | None] = [None] * slots
        self.slot_of: dict[ExpertId, int] = {}  # filling or resident
        self.free = list(range(slots - 1, -1, -1))
        self.layers, self.experts = np.zeros(slots, np.int64), np.zeros(slots, np.int64)  # of the owner, for the policy
        self.evictable = np.zeros(slots, bool)  # resident and not pinned

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
        poison: bool = False,
    ) -> None:
        self.pools = {precision: Pool(layouts[precision], n, device) for precision, n in slots.items() if n}
        self._policy = policy
        self._poison = poison
        for pool in self.pools.values():
            self._spoil(pool.memory)

    def find(self, expert: ExpertId, precision: Precision) -> int | None:
        """The slot of a resident twin, or None. Changes nothing; holds until the next `reserve` unless the slot is pinned."""
        pool = self.pools.get(precision)
        slot = pool.slot_of.get(expert) if pool else None
        return slot if pool and slot is not None and pool.state[slot] is State.RESIDENT else None

    def reserve(self, expert: ExpertId, precision: Precision, now: int) -> int | None:
        """A slot to fill with a twin that is neither resident nor filling, evicting the policy's choice while layer `now` is at
        work; None where every slot is pinned or filling."""
        pool = self.pools[precision]
        assert expert not in pool.slot_of, f"{expert} {precision.word} is resident or being filled already"
        if pool.free:
            slot = pool.free.pop()
        else:
            candidates = np.flatnonzero(pool.evictable)
            if not candidates.size:
                return None
            priorities = self._policy.priority(pool.layers[candidates], pool.experts[candidates], precision, now)
            slot = int(candidates[np.argmin(priorities)])
            victim = pool.owner[slot]
            assert victim is not None
            del pool.slot_of[victim]
            self._spoil(pool.memory[slot])
        pool.state[slot], pool.owner[slot], pool.slot_of[expert] = State.FILLING, expert, slot
        pool.layers[slot], pool.experts[slot] = expert
        pool.evictable[slot] = False
        return slot

    def commit(self, precision: Precision, slot: int) -> None:
        """The owner of a filling slot has filled it: it is resident, with one pin of the caller's."""
        pool = self.pools[precision]
        assert pool.state[slot] is State.FILLING
        pool.state[slot] = State.RESIDENT
        pool.pins[slot] = 1

    def abort(self, precision: Precision, slot: int) -> None:
        """The owner of a filling slot gives it up: it is free."""
        pool = self.pools[precision]
        owner = pool.owner[slot]
        assert pool.state[slot] is State.FILLING and owner is not None
        del pool.slot_of[owner]
        pool.state[slot], pool.owner[slot] = State.FREE, None
        self._spoil(pool.memory[slot])
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
                assert pool.evictable[slot] == (state is State.RESIDENT and not pool.pins[slot]), f"{word}: slot {slot}"

    def _spoil(self, memory: Tensor) -> None:
        if self._poison:
            memory.fill_(0xFF)  # NaN in bfloat16, float16 and float32
