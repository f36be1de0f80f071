"""Which kernel computes the experts of a pool: decided once, when the pool is made. A kernel is imported when it is chosen."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from apex_engine.errors import ApexError

if TYPE_CHECKING:
    from torch import Tensor

    from apex_engine.kernels.base import Kernel
    from apex_engine.kernels.layout import Layout

KERNELS = ("auto", "torch", "native", "numba", "triton")


def pick(name: str, layout: Layout, memory: Tensor, bit_equal: bool = False) -> Kernel:
    """The kernel `name` for slots `memory`, uint8 `[S, stride]`, that hold nothing yet; "auto": the fastest for this layout that
    the machine has.

    `bit_equal`: with "auto", take for a 16-bit twin one whose sums are transformers' own to the last bit in any batch, torch's or
    such as are tried to be like them, because in 16-bit activations the last bit decides between likeliest tokens now and then.

    With "numba", layouts with an INT8 or 16-bit matrix are torch's own. Raises ApexError where the machine does not have the
    kernel asked for.
    """
    on_cpu = memory.device.type == "cpu"
    if name == "auto" and bit_equal and layout.up.raw:
        if on_cpu and (like_torch := _like_torch(layout, memory)):
            return like_torch
        name = "torch"
    if name == "auto":
        name = _fastest(layout, on_cpu)
    if name == "triton":
        return _triton(layout, memory, on_cpu)
    if name == "native":
        return _native(layout, memory, on_cpu)
    if name == "numba" and layout.up.grouped and layout.down.grouped:
        return _numba(layout, memory, on_cpu)
    from apex_engine.kernels.reference import Reference

    return Reference(layout, memory)


def _fastest(layout: Layout, on_cpu: bool) -> str:
    from apex_engine.kernels.cpu.native import instruction_set, reads

    if not on_cpu:
        return "torch"  # until `make gpu-check` has passed on a device; "triton" can be asked for
    return "native" if instruction_set() and reads(layout) else "numba" if find_spec("numba") else "torch"


def _triton(layout: Layout, memory: Tensor, on_cpu: bool) -> Kernel:
    if on_cpu or not find_spec("triton"):
        raise ApexError("kernels triton need a CUDA device and the triton package: use --kernels auto")
    from apex_engine.kernels.triton.kernel import TritonKernel

    return TritonKernel(layout, memory)


def _native(layout: Layout, memory: Tensor, on_cpu: bool) -> Kernel:
    from apex_engine.kernels.cpu.native import NativeKernel, instruction_set, reads

    if not reads(layout):
        raise ApexError(
            f"kernels native read no codes of {layout.up.name} above {layout.down.name}: use --kernels auto"
        )
    if not on_cpu or not instruction_set():
        raise ApexError("kernels native need a CPU and a C compiler when apex-engine is installed: use --kernels auto")
    return NativeKernel(layout, memory)


def _like_torch(layout: Layout, memory: Tensor) -> Kernel | None:
    """The native kernel with torch's own bits, where a trial says that it has them."""
    from apex_engine.kernels.cpu.native import NativeKernel, sums_like_torch

    return NativeKernel(layout, memory, like_torch=True) if sums_like_torch(layout, memory) else None


def _numba(layout: Layout, memory: Tensor, on_cpu: bool) -> Kernel:
    if not on_cpu:
        raise ApexError("kernels numba need a CPU: use --kernels auto")
    if not find_spec("numba"):
        raise ApexError("kernels numba need the numba package: pip install 'apex-engine[jit]'")
    from apex_engine.kernels.cpu.jit import JitKernel

    return JitKernel(layout, memory)
