"""Which kernel computes the experts of a pool: decided once, when the pool is made."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from apex_engine.kernels.layout import RAW, Layout
from apex_engine.kernels.native import NativeKernel, select
from apex_engine.kernels.reference import Kernel, Reference
from apex_engine.vocabulary import ApexError

KERNELS = ("auto", "torch", "native", "numba", "triton")


def pick(name: str, layout: Layout, memory: Tensor) -> Kernel:
    """The kernel `name` for slots `memory`, uint8 `[S, stride]`; "auto": the fastest for this layout that the machine has.

    16-bit twins on a CPU are torch's own in any case, and so are INT8 twins with "numba". Raises ApexError where the
    machine does not have the kernel asked for.
    """
    raw = layout.up.name in RAW
    on_cpu = memory.device.type == "cpu"
    if name == "auto":
        name = _fastest(on_cpu)
    if name == "triton":
        if on_cpu or not find_spec("triton"):
            raise ApexError("kernels triton need a CUDA device and the triton package: use --kernels auto")
        from apex_engine.kernels.gpu import TritonKernel  # triton is there on Linux only

        return TritonKernel(layout, memory)
    if name == "native" and not raw:
        if not on_cpu or not select():
            raise ApexError(
                "kernels native need a CPU and a C compiler when apex-engine is installed: use --kernels auto"
            )
        return NativeKernel(layout, memory)
    if name == "numba" and layout.up.grouped:
        if not on_cpu or not find_spec("numba"):
            raise ApexError("kernels numba need a CPU and the numba package: use --kernels auto")
        from apex_engine.kernels.jit import JitKernel  # a heavy import

        return JitKernel(layout, memory)
    return Reference(layout, memory)


def _fastest(on_cpu: bool) -> str:
    if not on_cpu:
        return "triton" if find_spec("triton") else "torch"
    return "native" if select() else "numba" if find_spec("numba") else "torch"
