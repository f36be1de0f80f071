"""Experts with grouped codes on the CPU in numba: for installations without a compiler. Same arithmetic as native.py.

numba widens small integers to 64 bits unless told otherwise: every step of the inner loop is cast, or it runs at half speed.

Letters: T tokens, M tokens of one expert, K columns, N rows, G groups a row, p bits of a plane, b bytes of a group in a plane.
"""

# Functions of numba have the types they are called with.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apex_engine.kernels.layout import Layout
from apex_engine.kernels.packing import PLANES
from apex_engine.kernels.reference import Activation, Routed, one_by_one

HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # float16 bits -> float32


class JitKernel:
    """Experts of a pool whose matrices all have grouped codes."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        """`memory`: uint8 `[S, stride]` on the CPU. Raises ValueError for a layout with other matrices."""
        if not (layout.up.grouped and layout.down.grouped):
            raise ValueError("only grouped codes are faster in numba than in torch")
        self.name = "numba"
        self._layout = layout
        self._views = [layout.views(slot) for slot in memory]

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        one_by_one(
            lambda some, slot: self.linear(activation.apply(self.linear(some, slot, "up")), slot, "down"),
            x.float(), slots, routed, gates, activation, out,
        )  # fmt: skip

    def linear(self, x: Tensor, slot: int, matrix: str) -> Tensor:
        """`x` float32 `[M, K]` times the matrix "up" or "down" of a slot, bias included: float32 `[M, N]`."""
        form, views = self._layout.format(matrix), self._views[slot]
        scale, zero = (
            views[f"{matrix}.{part}"].view(torch.int16).numpy().view(np.uint16) for part in ("scale", "zero")
        )
        xi, xscale = _quantize(x.numpy(), form.group)
        y = np.zeros((len(x), scale.shape[0]), np.float32)
        _offsets(scale, zero, HALF, xscale * xi.sum(2, dtype=np.int32), y)
        weight = 1.0
        for i, width in enumerate(PLANES[form.bits]):
            codes = views[f"{matrix}.codes{i}"].numpy()
            _plane(codes, width, form.group, xi, xscale, scale, HALF, np.float32(weight), y)
            weight *= 1 << width
        result = torch.from_numpy(y)
        return result + views[f"{matrix}.bias"] if self._layout.shape.bias else result


def _quantize(x: NDArray[np.float32], group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """float32 `[M, K]` -> int8 `[M, G, group]` and its scales `[M, G]`."""
    grouped = x.reshape(len(x), -1, group)
    most = np.abs(grouped).max(2)
    inverse = np.divide(127, most, out=np.zeros_like(most), where=most > 0)
    return np.rint(grouped * inverse[..., None]).astype(np.int8), most / np.float32(127)


@numba.njit(parallel=True, fastmath=True, cache=True)
def _offsets(scale, zero, half, xsum, y):  # noqa: ANN001, ANN202
    """y[m, n] -= sum over g of scale[n, g] * zero[n, g] * xsum[m, g]."""
    for n in numba.prange(scale.shape[0]):
        for g in range(scale.shape[1]):
            offset = half[scale[n, g]] * half[zero[n, g]]
            for m in range(y.shape[0]):
                y[m, n] -= offset * xsum[m, g]


@numba.njit(parallel=True, fastmath=True, cache=True)
def _plane(codes, width, group, xi, xscale, scale, half, weight, y):  # noqa: ANN001, ANN202
    """y[m, n] += weight * sum over g of scale[n, g] * xscale[m, g] * (codes of the plane times xi)."""
    b = group * width // 8
    for n in numba.prange(scale.shape[0]):
        for m in range(y.shape[0]):
            total = np.float32(0)
            for g in range(scale.shape[1]):
                dot = _dot2(codes[n], xi[m, g], g * b, b) if width == 2 else _dot(codes[n], xi[m, g], g * b, b, width)
                total += half[scale[n, g]] * xscale[m, g] * np.float32(dot)
            y[m, n] += weight * total


@numba.njit(fastmath=True, cache=True, inline="always")
def _dot2(codes, x, start, b):  # noqa: ANN001, ANN202
    """Four codes a byte, each shift a loop of its own over consecutive inputs, which is what LLVM vectorizes."""
    dot = np.int32(0)
    three = np.uint8(3)
    for j in range(b):
        q = codes[start + j]
        dot = np.int32(
            dot
            + np.int32(np.int32(q & three) * np.int32(x[j]))
            + np.int32(np.int32(np.uint8(q >> np.uint8(2)) & three) * np.int32(x[b + j]))
            + np.int32(np.int32(np.uint8(q >> np.uint8(4)) & three) * np.int32(x[2 * b + j]))
            + np.int32(np.int32(np.uint8(q >> np.uint8(6)) & three) * np.int32(x[3 * b + j]))
        )
    return dot


@numba.njit(fastmath=True, cache=True, inline="always")
def _dot(codes, x, start, b, width):  # noqa: ANN001, ANN202
    """Codes of any width."""
    dot = np.int32(0)
    mask = np.uint8((1 << width) - 1)
    for s in range(8 // width):
        for j in range(b):
            q = np.uint8(np.uint8(codes[start + j] >> np.uint8(s * width)) & mask)
            dot = np.int32(dot + np.int32(np.int32(q) * np.int32(x[s * b + j])))
    return dot
