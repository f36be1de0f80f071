"""The resident experts: a pool of fixed-size slots for each precision. The same class holds the host tier.

Nothing here takes a lock: whoever shares a cache between threads has one (tier.py). Whoever reserved a slot fills it and says so
(`commit`) or gives it up (`abort`); a pinned or filling slot is never handed out.

Two things keep what decoding needs where it is:
  masked     a twin expected by a coming layer makes room only for a demand that finds no other victim
  streaming  a prompt goes through nearly all experts once (core/admission.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import numpy as np
import torch

from apex_engine.core.admission import passes
from apex_engine.core.events import Evicted, Stream
from apex_engine.core.eviction import Victims, least_valued
from apex_engine.core.policies import Policy
from apex_engine.core.vocabulary import SKIP, ExpertId, Geometry, Precision
from apex_engine.kernels.layout import Layout
from apex_engine.memory.pool import Pool, State


class ExpertCache:
    """Which twin is where: a `Residency`. Holds no file and starts no load.

    `poison` fills slots that hold nothing valid with NaN bytes, so that a use of one cannot pass a test.
    """

    def __init__(
        self,
        geometry: Geometry,
        layouts: Mapping[Precision, Layout],
        slots: Mapping[Precision, int],
        policy: Policy,
        device: torch.device,
        pinned: bool = False,
        poison: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """`stream`: is told of every twin that makes room. `policy` is a sink of it; one is made for the policy where none is
        given.
        """
        self.experts = geometry.layers * geometry.experts  # of the whole model
        self.pools = {p: Pool(layouts[p], n, device, pinned, poison) for p, n in slots.items() if n}
        self.victims = {p: Victims(geometry, policy, p) for p in self.pools}
        self._policy, self._stream = policy, stream or Stream(policy)
        for victims in self.victims.values():
            self._stream.add(victims)
        self._highest_first = sorted(self.pools, reverse=True)
        # layer -> what is masked until it has passed
        self._masked: dict[int, list[tuple[Precision, int, ExpertId]]] = {}

    def find(self, expert: ExpertId, precision: Precision) -> int | None:
        """The slot of a resident twin, or None. Changes nothing; holds until the next `reserve` unless the slot is pinned."""
        pool = self.pools.get(precision)
        slot = pool.slot_of.get(expert) if pool is not None else None
        return slot if pool is not None and slot is not None and pool.state[slot] is State.RESIDENT else None

    def best(self, expert: ExpertId) -> Precision:
        """The highest precision at which the expert is resident; SKIP where it is not."""
        for precision in self._highest_first:
            if self.find(expert, precision) is not None:
                return precision
        return SKIP

    def reserve(
        self, expert: ExpertId, precision: Precision, now: int, demand: bool = True, share: int | None = None
    ) -> int | None:
        """A slot to fill with a twin that is neither resident nor filling, evicting while layer `now` is at work; None where no
        slot may be taken.

        The policy chooses among the slots that are not masked; a `demand` takes a masked one where there is no other. `share`:
        the twin is streamed, unless there is a free slot and its layer has not got so many slots yet.
        """
        pool = self.pools[precision]
        assert expert not in pool.slot_of, f"{expert} at precision {precision} is resident or being filled already"
        if passes(share, bool(pool.free), pool.staying.get(expert.layer, 0)):
            return self._pass(expert, precision, now, demand)
        if pool.free:
            return pool.take(expert, pool.free.pop(), passing=False)
        victim = self._victim(precision, now, demand)
        return None if victim is None else self._replace(expert, precision, pool.slot_of[victim], passing=False)

    def _pass(self, expert: ExpertId, precision: Precision, now: int, demand: bool) -> int | None:
        """A slot for a twin that a prompt streams through."""
        pool = self.pools[precision]
        lesser = self._lesser(expert, precision, now)
        if lesser is not None:
            return self._replace(expert, precision, lesser, passing=False)
        passers = [slot for slot in pool.passers if pool.evictable(slot)]
        if passers:
            unmasked = [slot for slot in passers if not pool.masked[slot]]
            victim = self._least(precision, unmasked or (passers if demand else []), now)
        elif len(pool.passers) >= pool.most_passing:
            return None  # those that pass through are all at work
        elif pool.free:
            return pool.take(expert, pool.free.pop(), passing=True)
        else:
            victim = self._victim(precision, now, demand)
        return None if victim is None else self._replace(expert, precision, pool.slot_of[victim], passing=True)

    def _victim(self, precision: Precision, now: int, demand: bool) -> ExpertId | None:
        """Who makes room: the policy's choice among what is not masked, and for a demand among all where there is no other."""
        pool = self.pools[precision]
        victim = self.victims[precision].choose(now, pool.pinned)
        if victim is None and demand:
            victim = self._least(precision, [slot for slot in range(len(pool)) if pool.evictable(slot)], now)
        return victim

    def _lesser(self, expert: ExpertId, precision: Precision, now: int) -> int | None:
        """The slot of a twin of the same layer that the policy values less. Of other layers it has not heard yet what the prompt
        uses there."""
        pool = self.pools[precision]
        mine = np.flatnonzero(self.victims[precision].eligible()[expert.layer]).tolist()
        slots = [pool.slot_of[ExpertId(expert.layer, e)] for e in mine]
        stay = [slot for slot in slots if not pool.passing[slot] and pool.evictable(slot)]
        victim = self._least(precision, stay, now)
        if victim is None:
            return None
        layers, experts = np.array([victim.layer, expert.layer]), np.array([victim.expert, expert.expert])
        least, own = self._policy.values(layers, experts, precision, now)
        return pool.slot_of[victim] if least < own else None

    def _least(self, precision: Precision, slots: list[int], now: int) -> ExpertId | None:
        owners = [self.pools[precision].owner[slot] for slot in slots]
        pairs = np.array(owners, np.int64).reshape(-1, 2)
        return least_valued(self._policy, pairs[:, 0], pairs[:, 1], precision, now)

    def _replace(self, expert: ExpertId, precision: Precision, slot: int, passing: bool) -> int:
        self._leave(precision, slot)
        return self.pools[precision].take(expert, slot, passing)

    def _leave(self, precision: Precision, slot: int) -> None:
        owner = self.pools[precision].leave(slot)
        self.victims[precision].set(owner, False)
        self._stream.emit(Evicted(owner, precision))

    def _may_go(self, precision: Precision, slot: int) -> None:
        """What decides whether the twin of a slot may make room has changed."""
        pool = self.pools[precision]
        owner = pool.owner[slot]
        if owner is not None:
            self.victims[precision].set(owner, pool.state[slot] is State.RESIDENT and not pool.masked[slot])

    def evict(self, precision: Precision, slots: Iterable[int] | None = None) -> None:
        """Free those of `slots`, of all without them, that are resident and not pinned."""
        pool = self.pools[precision]
        for slot in [slot for slot in (range(len(pool)) if slots is None else slots) if pool.evictable(slot)]:
            pool.state[slot] = State.FILLING
            self.abort(precision, slot)

    def commit(self, precision: Precision, slot: int, pins: int = 0) -> None:
        """The owner of a filling slot has filled it: it is resident, pinned so many times."""
        pool = self.pools[precision]
        assert pool.state[slot] is State.FILLING
        pool.state[slot] = State.RESIDENT
        pool.pin(slot, pins)
        self._may_go(precision, slot)

    def abort(self, precision: Precision, slot: int) -> None:
        """The owner of a filling slot gives it up: it is free."""
        pool = self.pools[precision]
        assert pool.state[slot] is State.FILLING
        self._leave(precision, slot)
        pool.set_passing(slot, False)
        pool.state[slot] = State.FREE
        pool.free.append(slot)

    def pin(self, precision: Precision, slot: int) -> None:
        """Keep a resident slot from eviction until as many `unpin`s."""
        pool = self.pools[precision]
        assert pool.state[slot] is State.RESIDENT
        pool.pin(slot, 1)

    def unpin(self, precision: Precision, slot: int) -> None:
        pool = self.pools[precision]
        assert pool.pins[slot] > 0
        pool.pin(slot, -1)

    def mask(self, expert: ExpertId, precision: Precision) -> None:
        """Keep a twin, if it is resident, until its layer has passed (`unmask`), unless a demand finds no other victim."""
        slot = self.find(expert, precision)
        if slot is not None:
            self.pools[precision].masked[slot] = True
            self._masked.setdefault(expert.layer, []).append((precision, slot, expert))
            self._may_go(precision, slot)

    def unmask(self, layer: int) -> None:
        """The layer has passed."""
        for precision, slot, expert in self._masked.pop(layer, ()):
            if self.pools[precision].owner[slot] == expert:
                self.pools[precision].masked[slot] = False
                self._may_go(precision, slot)

    def end_streaming(self) -> None:
        """Free what passed through: what is left of it would depend on what came when."""
        for precision, pool in self.pools.items():
            self.evict(precision, list(pool.passers))
            for slot in list(pool.passers):
                pool.stays(slot)

    def resident_bytes(self) -> int:
        """Bytes of the slots that hold an expert."""
        return sum(len(pool.slot_of) * pool.memory.shape[1] for pool in self.pools.values())

    def rebuild(self, filling: Set[tuple[Precision, int]]) -> None:
        """Make the books anew, after a call that ended anywhere: what is resident for certain stays, unpinned and unmasked, and
        so does what these slots are being filled with."""
        self._masked.clear()
        for precision, pool in self.pools.items():
            pool.rebuild({slot for p, slot in filling if p == precision})
            self.victims[precision].clear()
            for slot in pool.slot_of.values():
                self._may_go(precision, slot)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not agree with each other. Changes nothing."""
        for precision, pool in self.pools.items():
            pool.check_integrity(f"precision {precision}")
            eligible = self.victims[precision].eligible()
            may_go = {
                owner
                for owner, slot in pool.slot_of.items()
                if pool.state[slot] is State.RESIDENT and not pool.masked[slot]
            }
            assert {ExpertId(*pair) for pair in np.argwhere(eligible).tolist()} == may_go, (
                f"precision {precision}: victims"
            )
