"""What is compared: the engine's parts one after the other, from loading on demand to the default."""

from __future__ import annotations

from typing import Any

STEPS: dict[str, dict[str, Any]] = {
    "on-demand": {"system": "on-demand"},
    "+ dynamic precision": {"system": "on-demand", "mode": "adaptive"},
    "+ prefetch": {"system": "on-demand", "mode": "adaptive", "prefetch": 1},
    "+ policy": {"system": "on-demand", "mode": "adaptive", "prefetch": 1, "policy": "lcu"},
    "+ admission = default": {},
    "apex": {"system": "apex"},
    "floor": {"low_share": "floor"},
    "floor, upgrades async": {"low_share": "floor", "upgrade": "async"},
    "exact, prefetch": {"mode": "exact"},
    "default, gptq twins calibrated for KL .02": {},
}
CALIBRATED = list(STEPS)[-1]
SIDE_BY_SIDE = (
    ("+ dynamic precision", "on-demand"),
    ("+ prefetch", "+ dynamic precision"),
    ("+ admission = default", "apex"),
)
