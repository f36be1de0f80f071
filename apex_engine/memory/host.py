"""The tier between disk and device: a cache in host memory, or nothing but staging room."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from apex_engine.core.events import Use
from apex_engine.core.policies.lru import Lru
from apex_engine.core.vocabulary import ExpertId, Geometry, Precision
from apex_engine.kernels.layout import Layout
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.plan import LEAST_HOST_SLOTS, Plan
from apex_engine.memory.store import ExpertStore

READERS = 4  # threads that fill it
Progress = Callable[[int, int], object]  # told of experts done, of how many


class HostCache(ExpertCache):
    """Twins in host memory, least recently used first out."""

    def __init__(
        self,
        geometry: Geometry,
        layouts: Mapping[Precision, Layout],
        slots: Mapping[Precision, int],
        pinned: bool = False,
        poison: bool = False,
    ) -> None:
        super().__init__(geometry, layouts, slots, Lru(geometry), torch.device("cpu"), pinned=pinned, poison=poison)

    def end(self, expert: ExpertId, precision: Precision, slot: int, resident: bool, failed: bool) -> None:
        """A load by way of `slot` is over, which held the twin before (`resident`, pinned since) or was to be filled with it."""
        if resident:
            self.unpin(precision, slot)
        elif failed:
            self.abort(precision, slot)
        else:
            self.commit(precision, slot)
        self._stream.emit(Use(*expert, precision, 1, 0.0, 0))

    def is_pinned(self) -> bool:
        return all(pool.memory.is_pinned() for pool in self.pools.values())

    def fill(self, store: ExpertStore, geometry: Geometry, progress: Progress) -> None:
        """Read every twin, by several threads. Raises ApexError where one cannot be read."""
        everything = [
            (ExpertId(i, e), p) for p in self.pools for i in range(geometry.layers) for e in range(geometry.experts)
        ]

        def read(expert: ExpertId, precision: Precision, slot: int) -> None:
            memory = self.pools[precision].bytes
            assert memory is not None
            store.read(expert, precision, memory[slot])
            store.verify(expert, precision, memory[slot])

        slots = []
        for expert, precision in everything:
            slot = self.reserve(expert, precision, 0)
            assert slot is not None
            slots.append(slot)
        with ThreadPoolExecutor(READERS, "apex-host") as pool:
            reads = [pool.submit(read, *twin, slot) for twin, slot in zip(everything, slots, strict=True)]
            try:
                for i, (one, (_, precision), slot) in enumerate(zip(reads, everything, slots, strict=True)):
                    one.result()
                    self.commit(precision, slot)
                    progress(i + 1, len(reads))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def host_tier(
    geometry: Geometry,
    layouts: Mapping[Precision, Layout],
    plan: Plan,
    store: ExpertStore,
    device: torch.device,
    progress: Progress = lambda done, total: None,
) -> HostCache | None:
    """The host tier of `plan`, filled where it holds every twin. None on a CPU where none was asked for: reads go to the slot.

    For CUDA its memory is pinned; where the system refuses, it is pageable, with a warning, and copies wait for it.
    """
    slots = plan.host_slots
    if not slots:
        if device.type == "cpu":
            return None
        slots = {precision: LEAST_HOST_SLOTS for precision, n in plan.slots.items() if n}
    try:
        host = HostCache(geometry, layouts, slots, pinned=device.type == "cuda")
    except RuntimeError as error:
        warnings.warn(f"no pinned host memory ({error}): copies to {device} will be slower", stacklevel=2)
        host = HostCache(geometry, layouts, slots)
    if plan.host_holds_all:
        host.fill(store, geometry, progress)
    return host
