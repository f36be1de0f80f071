"""Slots of one precision in one contiguous buffer, and the state of each.

A slot's life:  free -> filling -> resident (pinned n times) -> free.  One owner at a time.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

import numpy as np
import torch

from apex_engine.core.admission import most_passing
from apex_engine.core.vocabulary import ExpertId
from apex_engine.kernels.layout import ALIGN, Layout


class State(Enum):
    FREE = 0
    FILLING = 1
    RESIDENT = 2


class Pool:
    """One contiguous uint8 buffer `[slots, stride]` at an address O_DIRECT can read to. `poison`: what holds nothing valid is
    NaN.

    Changed by `ExpertCache` only.
    """

    def __init__(
        self, layout: Layout, slots: int, device: torch.device, pinned: bool = False, poison: bool = False
    ) -> None:
        nbytes = slots * layout.stride + ALIGN
        raw = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        start = -raw.data_ptr() % ALIGN
        self.layout, self.poison = layout, poison
        self.memory = raw[start : start + slots * layout.stride].view(slots, layout.stride)
        # The same, for threads that should not ask torch.
        self.bytes = self.memory.numpy() if device.type == "cpu" else None
        self.state = [State.FREE] * slots
        self.pins = np.zeros(slots, np.int64)
        self.pinned: set[ExpertId] = set()  # whose slots have pins
        self.owner: list[ExpertId | None] = [None] * slots
        self.slot_of: dict[ExpertId, int] = {}  # filling or resident
        self.free = list(range(slots - 1, -1, -1))
        self.masked = np.zeros(slots, bool)
        self.passing = np.zeros(slots, bool)  # holds what a prompt streams through
        self.passers: set[int] = set()  # the same slots
        self.staying: dict[int, int] = {}  # layer -> slots it has that are not passing
        self.most_passing = most_passing(slots)
        self.spoil(slice(None))

    def __len__(self) -> int:
        return len(self.state)

    def evictable(self, slot: int) -> bool:
        return self.state[slot] is State.RESIDENT and not self.pins[slot]

    def pin(self, slot: int, times: int) -> None:
        """Add so many pins, or take them away, of a slot that is resident."""
        owner = self.owner[slot]
        assert owner is not None
        self.pins[slot] += times
        (self.pinned.add if self.pins[slot] else self.pinned.discard)(owner)

    def take(self, expert: ExpertId, slot: int, passing: bool) -> int:
        """A slot that has no owner is filled by `expert` from now on. Returns it."""
        self.owner[slot] = expert
        self.state[slot] = State.FILLING
        self.slot_of[expert] = slot
        self.set_passing(slot, passing)
        if not passing:
            self.staying[expert.layer] = self.staying.get(expert.layer, 0) + 1
        return slot

    def leave(self, slot: int) -> ExpertId:
        """The slot has no owner, and belongs to whoever called. Returns who had it."""
        owner = self.owner[slot]
        assert owner is not None
        if not self.passing[slot]:
            self.staying[owner.layer] -= 1
        del self.slot_of[owner]
        self.owner[slot] = None
        self.masked[slot] = False
        self.spoil(slot)
        return owner

    def set_passing(self, slot: int, passing: bool) -> None:
        self.passing[slot] = passing
        (self.passers.add if passing else self.passers.discard)(slot)

    def stays(self, slot: int) -> None:
        """What passed through stays."""
        owner = self.owner[slot]
        if self.passing[slot] and owner is not None:
            self.staying[owner.layer] = self.staying.get(owner.layer, 0) + 1
        self.set_passing(slot, False)

    def spoil(self, slots: int | slice) -> None:
        if self.poison:
            self.memory[slots] = 0xFF  # NaN in bfloat16, float16 and float32

    def rebuild(self, filling: set[int]) -> None:
        """Make the books of those slots that are resident for certain, unpinned, and of those that are being filled; all others
        are free."""
        kept = {
            slot: owner
            for slot, owner in enumerate(self.owner)
            if owner is not None
            and self.slot_of.get(owner) == slot
            and (slot in filling or self.state[slot] is State.RESIDENT)
        }
        slots = range(len(self))
        self.state = [
            (State.FILLING if slot in filling else State.RESIDENT) if slot in kept else State.FREE for slot in slots
        ]
        self.owner = [kept.get(slot) for slot in slots]
        self.slot_of = {owner: slot for slot, owner in kept.items()}
        self.free = [slot for slot in reversed(slots) if slot not in kept]
        self.pins[:] = 0
        self.pinned.clear()
        self.masked[:] = self.passing[:] = False
        self.passers, self.staying = set(), dict(Counter(owner.layer for owner in kept.values()))
        for slot in self.free:
            self.spoil(slot)

    def check_integrity(self, what: str) -> None:
        """Raises AssertionError where the books do not agree with each other. Changes nothing."""
        assert len(self.free) == len(set(self.free)), f"{what}: a slot is free twice"
        assert len(self.free) + len(self.slot_of) == len(self), f"{what}: a slot is lost"
        for expert, slot in self.slot_of.items():
            assert self.owner[slot] == expert, f"{what}: slot {slot} has two owners"
        free = set(self.free)
        for slot, state in enumerate(self.state):
            assert (state is State.FREE) == (slot in free) == (self.owner[slot] is None), f"{what}: slot {slot}"
            assert self.pins[slot] >= 0 and (state is State.RESIDENT or not self.pins[slot]), f"{what}: pins of {slot}"
            assert bool(self.pins[slot]) == (self.owner[slot] in self.pinned), f"{what}: {slot} is pinned or not"
            assert self.passing[slot] == (slot in self.passers), f"{what}: slot {slot} passes or not"
            assert not (state is State.FREE and (self.masked[slot] or self.passing[slot])), f"{what}: free {slot}"
        layers = [owner.layer for slot, owner in enumerate(self.owner) if owner and not self.passing[slot]]
        counted = {layer: n for layer, n in self.staying.items() if n}
        assert counted == {layer: layers.count(layer) for layer in set(layers)}, f"{what}: slots of layers"
