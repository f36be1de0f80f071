"""The tier between disk and device: a cache in host memory, or nothing but staging room."""

from __future__ import annotations

import warnings

import torch

from apex_engine.core.policies import Lru
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.kernels.layout import Layout
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.plan import LEAST_HOST_SLOTS, Plan
from apex_engine.memory.store import ExpertStore


def host_tier(
    layouts: dict[Precision, Layout], plan: Plan, store: ExpertStore, layers: int, experts: int, device: torch.device
) -> ExpertCache | None:
    """The host tier of `plan`, filled where it holds every twin. None on a CPU where none was asked for: reads go to the slot.

    For CUDA its memory is pinned; where the system refuses, it is pageable, with a warning, and copies wait for it.
    """
    slots = plan.host_slots
    if not slots:
        if device.type == "cpu":
            return None
        slots = {precision: LEAST_HOST_SLOTS for precision, n in plan.slots.items() if n}

    def make(pinned: bool) -> ExpertCache:
        return ExpertCache(layouts, slots, Lru(layers, experts, 1.0), torch.device("cpu"), pinned)

    try:
        host = make(device.type == "cuda")
    except RuntimeError as error:
        warnings.warn(f"no pinned host memory ({error}): copies to {device} will be slower", stacklevel=2)
        host = make(False)
    if plan.host_holds_all:
        everything = [(ExpertId(i, e), p) for p in slots for i in range(layers) for e in range(experts)]
        for expert, precision in everything:
            slot = host.reserve(expert, precision, 0)
            assert slot is not None
            memory = host.pools[precision].bytes
            assert memory is not None
            store.read(expert, precision, memory[slot])
            store.verify(expert, precision, memory[slot])
            host.commit(precision, slot)
    return host
