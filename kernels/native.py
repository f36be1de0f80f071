"""Quantized experts on the CPU in C (native.c): integer dot products for INT2, INT3, INT4, float ones for INT8.

For a group of inputs with absmax m, a = m / 127 and xi = round(x / a), a matrix with grouped codes is computed as

    y = sum over groups of  scale * a * (sum of q * xi - zero * sum of xi)

which is the product of the dequantized matrix with the rounded inputs a * xi: `Reference(..., round_inputs=True)` is its truth.
INT8 and 16-bit twins keep float inputs. 16-bit twins are computed here for a few tokens only (torch's matrix products win above),
rounding where torch rounds: after each matrix, the activation and the product, to the dtype of `x`.

Instruction sets, the best chosen when the library is loaded: avx512-vnni, avx2, neon, generic.

Letters: T tokens of a step, K chosen experts a token, S slots, N rows, H hidden.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apex_engine.kernels.layout import MATRICES, RAW, Layout
from apex_engine.kernels.packing import PLANES
from apex_engine.kernels.reference import Activation, Reference, Routed, one_by_one

MOST_TOKENS = 4  # of one expert, for a 16-bit twin
FORMATS = {"int8": 0, "bfloat16": 1, "float16": 2}  # enum of native.c
ROUND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Matrix(ctypes.Structure):
    """struct matrix of native.c."""

    _fields_ = (
        ("n", ctypes.c_ssize_t),
        ("k", ctypes.c_ssize_t),
        ("group", ctypes.c_ssize_t),
        ("bits", ctypes.c_ssize_t),
        ("format", ctypes.c_ssize_t),
        ("codes", ctypes.c_void_p * 2),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
    )


class Expert(ctypes.Structure):
    """struct expert of native.c."""

    _fields_ = (("up", Matrix), ("down", Matrix))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None where it was not built. Torch must be loaded before: its OpenMP serves both."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            lib = ctypes.CDLL(str(path))
        except OSError:  # built for another machine, or no OpenMP in torch
            continue
        lib.apex_select.restype = ctypes.c_char_p
        size, address = ctypes.c_ssize_t, ctypes.c_void_p
        lib.apex_linear.argtypes = [address, address, size, address]
        lib.apex_swiglu_experts.argtypes = [address, address, size, *5 * [address], *2 * [ctypes.c_int], address]
        return lib
    return None


def select(isa: str | None = None) -> str | None:
    """Use the instruction set `isa`, or the best. Returns its name; None where this machine does not have it."""
    lib = library()
    name = lib.apex_select(isa.encode() if isa else None) if lib else None
    return name.decode() if name else None


class NativeKernel:
    """Experts of a pool on the CPU."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        """`memory`: uint8 `[S, stride]` on the CPU."""
        lib = library()
        assert lib is not None
        self.name = f"native {select()}"
        self._lib, self._layout = lib, layout
        self._memory = memory  # the structs below point into it
        self._raw = layout.up.name in RAW
        self._torch = Reference(layout, memory)
        self._experts = (Expert * len(memory))(*(_expert(layout, row.data_ptr()) for row in memory))

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        fused = activation.swiglu and activation.finish is None and not self._layout.shape.bias
        if self._raw:
            # Each expert by itself: what else is in the call depends on what is resident.
            to_torch = np.diff(routed.first) > (MOST_TOKENS if fused and x.dtype in ROUND else 0)
            if to_torch.any():
                self._torch(x, *_some(slots, routed, to_torch), gates, activation, out)
                slots, routed = _some(slots, routed, ~to_torch)
        if not slots:
            return
        if not fused or x.dtype not in ROUND:
            one_by_one(
                lambda some, slot: self.linear(activation.apply(self.linear(some, slot, "up")), slot, "down"),
                x.float(), slots, routed, gates, activation, out,
            )  # fmt: skip
            return
        x = x.contiguous()
        failed = self._lib.apex_swiglu_experts(
            self._experts,
            struct.pack(f"{len(slots)}q", *slots),  # bytes are handed over ten times as fast as the address of an array
            len(slots),
            routed.first.tobytes(),
            routed.tokens.tobytes(),
            routed.rows.tobytes(),
            gates.data_ptr(),
            x.data_ptr(),
            ROUND[x.dtype],
            ROUND[x.dtype] if self._raw else 0,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError

    def linear(self, x: Tensor, slot: int, matrix: str) -> Tensor:
        """`x` float32 `[M, K]` times the matrix "up" or "down" of a slot, bias included: float32 `[M, N]`."""
        x = x.contiguous()
        form = getattr(self._experts[slot], matrix)
        y = torch.empty(len(x), form.n)
        if self._lib.apex_linear(ctypes.byref(form), x.data_ptr(), len(x), y.data_ptr()):
            raise MemoryError
        return y + self._layout.views(self._memory[slot])[f"{matrix}.bias"] if self._layout.shape.bias else y


def _expert(layout: Layout, base: int) -> Expert:
    at = {field.name: base + field.offset for field in layout.fields}
    matrices = []
    for matrix in MATRICES:
        form = layout.format(matrix)
        if form.grouped:
            names = [f"{matrix}.codes{i}" for i in range(len(PLANES[form.bits]))]
        else:
            names = [f"{matrix}.weight" if form.name in RAW else f"{matrix}.codes"]
        codes = (ctypes.c_void_p * 2)(*(at[name] for name in names))
        scale, zero = (at.get(f"{matrix}.{part}", 0) for part in ("scale", "zero"))
        n, k = layout.shape.matrix(matrix)
        matrices.append(Matrix(n, k, form.group, form.bits, FORMATS.get(form.name, 0), codes, scale, zero))
    return Expert(*matrices)


def _some(slots: Sequence[int], routed: Routed, chosen: NDArray[np.bool_]) -> tuple[list[int], Routed]:
    """The experts `chosen` and their pairs."""
    counts = np.diff(routed.first)
    pairs = np.repeat(chosen, counts)
    first = np.concatenate([[0], np.cumsum(counts[chosen])])
    kept = [slot for slot, keep in zip(slots, chosen.tolist(), strict=True) if keep]
    return kept, Routed(first, routed.tokens[pairs], routed.rows[pairs])
