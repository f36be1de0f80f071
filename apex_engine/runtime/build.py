"""Puts a device together: slots, host tier, loader, kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from apex_engine.config import Config
from apex_engine.core.events import Stream
from apex_engine.core.policies import Policy
from apex_engine.core.vocabulary import ExpertId, Geometry
from apex_engine.kernels.registry import pick
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.copies import Carrier
from apex_engine.memory.host import host_tier
from apex_engine.memory.link import Link
from apex_engine.memory.loader import Loader
from apex_engine.memory.plan import Plan
from apex_engine.memory.store import ExpertStore
from apex_engine.memory.tier import Tier
from apex_engine.runtime.device import Device

Progress = Callable[[str, int, int], object]  # what is being done, how much of it is, of how much


class Frame(Protocol):
    """What of an engine does not depend on its device."""

    geometry: Geometry
    plan: Plan
    stream: Stream
    link: Link | None

    @property
    def config(self) -> Config:
        """Its options."""


def make_device(
    frame: Frame,
    store: ExpertStore,
    policy: Policy,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Device:
    """The device of an engine, whose events go to its stream. Raises ApexError where a kernel asked for is not to be had."""
    config, geometry, layouts = frame.config, frame.geometry, store.layouts()
    cache = ExpertCache(geometry, layouts, frame.plan.slots, policy, device, stream=frame.stream)
    bit_equal = config.mode != "adaptive" and dtype != torch.float32
    kernels = {p: pick(config.kernels, pool.layout, pool.memory, bit_equal) for p, pool in cache.pools.items()}

    def filled(done: int, total: int) -> None:
        if progress:
            progress("filling the host tier", done, total)

    host = host_tier(geometry, layouts, frame.plan, store, device, filled)
    carrier = Carrier(store, cache, device, frame.link, host)
    return Device(device, cache, Loader(cache, carrier, frame.stream, host), kernels, frame.stream, host)


def load_every_lower_twin(tier: Tier, geometry: Geometry) -> None:
    """Make all twins but the highest resident, a layer at a time."""
    for precision in range(1, geometry.top):
        for layer in range(geometry.layers):
            with tier.lock:
                everything = [tier.request(ExpertId(layer, e), precision, layer) for e in range(geometry.experts)]
                tier.settle(everything, busy=False)
            while everything:
                for ticket in tier.arrived(everything):
                    assert ticket.slot is not None
                    tier.release([(precision, ticket.slot)])
