"""Which kernel computes the experts of a pool: decided once, when the pool is made."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from apex_engine.errors import ApexError
from apex_engine.kernels.base import Kernel
from apex_engine.kernels.cpu.native import NativeKernel, instruction_set, sums_like_torch
from apex_engine.kernels.layout import RAW, Layout
from apex_engine.kernels.reference import Reference

KERNELS = ("auto", "torch", "native", "numba", "triton")


def pick(name: str, layout: Layout, memory: Tensor, bit_equal: bool = False) -> Kernel:
    """The kernel `name` for slots `memory`, uint8 `[S, stride]`, that hold nothing yet; "auto": the fastest for this layout that
    the machine has.

    `bit_equal`: with "auto", take for a 16-bit twin one whose sums are transformers' own to the last bit in any batch, torch's or
    such as are tried to be like them, because in 16-bit activations the last bit decides between likeliest tokens now and then.

    With "numba", INT8 and 16-bit twins are torch's own. Raises ApexError where the
    machine does not have the kernel asked for.
    """
    on_cpu = memory.device.type == "cpu"
    if name == "auto" and bit_equal and layout.up.name in RAW:
        if on_cpu and sums_like_torch(layout, memory):
            return NativeKernel(layout, memory, like_torch=True)
        name = "torch"
    if name == "auto":
        name = _fastest(on_cpu)
    if name == "triton":
        if on_cpu or not find_spec("triton"):
            raise ApexError("kernels triton need a CUDA device and the triton package: use --kernels auto")
        from apex_engine.kernels.triton.gpu import TritonKernel  # triton is there on Linux only

        return TritonKernel(layout, memory)
    if name == "native":
        if not on_cpu or not instruction_set():
            raise ApexError(
                "kernels native need a CPU and a C compiler when apex-engine is installed: use --kernels auto"
            )
        return NativeKernel(layout, memory)
    if name == "numba" and layout.up.grouped:
        if not on_cpu or not find_spec("numba"):
            raise ApexError("kernels numba need a CPU and the numba package: use --kernels auto")
        from apex_engine.kernels.cpu.jit import JitKernel  # a heavy import

        return JitKernel(layout, memory)
    return Reference(layout, memory)


def _fastest(on_cpu: bool) -> str:
    if not on_cpu:
        return "torch"  # until `make gpu-check` has passed on a device; "triton" can be asked for
    return "native" if instruction_set() else "numba" if find_spec("numba") else "torch"
