"""Which kernel computes the experts of a pool: decided once, when the pool is made."""

from __future__ import annotations

from torch import Tensor

from apex_engine.kernels.layout import Layout
from apex_engine.kernels.reference import Kernel, Reference
from apex_engine.vocabulary import ApexError

KERNELS = ("auto", "torch")


def pick(name: str, layout: Layout, memory: Tensor) -> Kernel:
    """The kernel `name` for slots `memory`, uint8 `[S, stride]`. Raises ApexError where this machine does not have it."""
    if name in ("auto", "torch"):
        return Reference(layout, memory)
    raise ApexError(f"unknown kernels {name}: choose from {', '.join(KERNELS)}")
