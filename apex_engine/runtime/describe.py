"""What an engine is and holds, as plain JSON with the twins by their words."""

from __future__ import annotations

from typing import Any

from apex_engine.core.vocabulary import Words
from apex_engine.memory.plan import Plan
from apex_engine.runtime.device import Device


def describe_plan(plan: Plan, words: Words) -> dict[str, Any]:
    """Bytes and slots."""
    return {
        "budget_bytes": plan.budget,
        "slot_bytes": plan.slot_bytes,
        "slots": {words[p]: n for p, n in plan.slots.items()},
        "blob_bytes": {words[p]: plan.stride[p] for p in words.twins},
        "experts": plan.experts,
        "dense_bytes": plan.dense_bytes,
        "step_bytes": plan.step_bytes,
        "host_slots": {words[p]: n for p, n in plan.host_slots.items()},
    }


def describe_device(device: Device | None, words: Words) -> dict[str, Any]:
    """What is resident, and what computes it; nothing before the first token."""
    pools = device.cache.pools if device else {}
    return {
        "resident": {
            "bytes": device.cache.resident_bytes() if device else 0,
            **{words[p]: len(pools[p].slot_of) if p in pools else 0 for p in words.twins},
        },
        "kernels": {words[p]: kernel.name for p, kernel in device.kernels.items()} if device else {},
        "host_tier_is_pinned": device.host.is_pinned() if device and device.host else None,
    }
