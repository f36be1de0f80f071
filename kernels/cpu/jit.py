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

from apex_engine.kernels.base import Activation, Routed, Views
from apex_engine.kernels.layout import MATRICES, Layout, MatrixFormat
from apex_engine.kernels.reference import one_by_one, unfused

TILE = 32  # rows that a thread takes at once


class JitKernel:
    """Experts of a pool whose matrices all have grouped codes."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        """`memory`: uint8 `[S, stride]` on the CPU. Raises ValueError for a layout with other matrices."""
        if not (layout.up.grouped and layout.down.grouped):
            raise ValueError("only grouped codes are faster in numba than in torch")
        self.name = "numba"
        self._layout = layout
        self._views = [layout.views(slot) for slot in memory]
        self._int2 = {matrix: layout.format(matrix) == MatrixFormat("int2", 64) for matrix in MATRICES}
        self._fused = all(self._int2.values()) and not layout.shape.bias
        self._arrays = [{matrix: _arrays(views, matrix, layout) for matrix in MATRICES} for views in self._views]

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        if not (self._fused and activation.swiglu and activation.finish is None):
            one_by_one(unfused(self.linear, activation), x.float(), slots, routed, gates, activation, out)
            return
        shared, first = (x.float().numpy(), gates.numpy(), out.numpy()), routed.first.tolist()
        for i, slot in enumerate(slots):
            pairs = slice(first[i], first[i + 1])
            (up, *up_scales), (down, *down_scales) = self._arrays[slot].values()
            expert = (up[0], *up_scales, down[0], *down_scales)
            _int2_swiglu(*shared, routed.tokens[pairs], routed.rows[pairs], *expert)

    def linear(self, x: Tensor, slot: int, matrix: str) -> Tensor:
        """`x` float32 `[M, K]` times the matrix "up" or "down" of a slot, bias included: float32 `[M, N]`."""
        form = self._layout.format(matrix)
        codes, scale, zero = self._arrays[slot][matrix]
        if self._int2[matrix]:
            y = _int2(codes[0], scale, zero, x.numpy())
        else:
            xi, xscale, xsum = _quantize(x.numpy(), form.group)
            y = np.empty((len(x), len(scale)), np.float32)
            _offsets(scale, zero, xsum, y)
            weight = 1
            for plane, width in zip(codes, form.planes, strict=True):
                _plane(plane, width, form.group, xi, xscale, scale, np.float32(weight), y)
                weight <<= width
        result = torch.from_numpy(y)
        return result + self._views[slot][f"{matrix}.bias"] if self._layout.shape.bias else result


def _arrays(views: Views, matrix: str, layout: Layout) -> tuple[list[NDArray], NDArray, NDArray]:
    """Codes of each plane, and the bits of scale and zero, which numba has no type for."""
    codes = [views[f"{matrix}.{part}"].numpy() for part in layout.format(matrix).held]
    scale, zero = (views[f"{matrix}.{part}"].view(torch.int16).numpy().view(np.uint16) for part in ("scale", "zero"))
    return codes, scale, zero


@numba.njit(cache=True)
def _quantize(x, group):  # noqa: ANN001, ANN202
    """float32 `[M, K]` -> int8 `[M, G, group]`, its scales `[M, G]`, and scale * sum `[M, G]`."""
    M, G = x.shape[0], x.shape[1] // group
    xi = np.empty((M, G, group), np.int8)
    scale, total = np.empty((M, G), np.float32), np.empty((M, G), np.float32)
    for m in range(M):
        for g in range(G):
            some = x[m, g * group : (g + 1) * group]
            most = np.float32(0)
            for k in range(group):
                most = max(most, abs(some[k]))
            inverse = np.float32(127) / most if most > 0 else np.float32(0)
            count = np.int32(0)
            for k in range(group):
                xi[m, g, k] = np.int8(np.rint(some[k] * inverse))
                count = np.int32(count + np.int32(xi[m, g, k]))
            scale[m, g] = most / np.float32(127)
            total[m, g] = scale[m, g] * np.float32(count)
    return xi, scale, total


@numba.njit(cache=True, inline="always")
def _floats(halves, floats):  # noqa: ANN001, ANN202
    """Bits of float16 to float32; a scale or a zero is neither infinite nor NaN."""
    bits = floats.view(np.uint32)
    for g in range(len(halves)):
        sign = np.uint32(np.uint32(halves[g] & np.uint16(0x8000)) << np.uint32(16))
        bits[g] = np.uint32(np.uint32(np.uint32(halves[g] & np.uint16(0x7FFF)) << np.uint32(13)) | sign)
    for g in range(len(halves)):
        floats[g] *= np.float32(2.0**112)


@numba.njit(parallel=True, fastmath=True, cache=True)
def _int2(codes, scale, zero, x):  # noqa: ANN001, ANN202
    """The matrix of two-bit codes in groups of 64 times the inputs.

    Byte j of a group holds the codes j, j + 16, j + 32, j + 48: sixteen lanes keep their own sums over a row, in 16 bits within
    a group (4 * 3 * 127 fits), so that nothing is summed across lanes before the row ends.
    """
    N, G = scale.shape
    xi, xscale, xsum = _quantize(x, 64)
    y = np.empty((len(x), N), np.float32)
    for tile in numba.prange((N + TILE - 1) // TILE):
        start, stop = tile * TILE, min(N, tile * TILE + TILE)
        scales, zeros = np.empty((stop - start, G), np.float32), np.empty((stop - start, G), np.float32)
        _floats(scale[start:stop].reshape(-1), scales.reshape(-1))
        _floats(zero[start:stop].reshape(-1), zeros.reshape(-1))
        lanes = np.empty(16, np.float32)
        for n in range(start, stop):
            row, s, z = codes[n], scales[n - start], zeros[n - start]
            for m in range(y.shape[0]):
                offset = np.float32(0)
                for g in range(G):
                    offset += s[g] * z[g] * xsum[m, g]
                lanes[:] = 0
                for g in range(G):
                    w = s[g] * xscale[m, g]
                    for j in range(16):
                        q = row[16 * g + j]
                        dot = np.int16(np.int16(q & np.uint8(3)) * np.int16(xi[m, g, j]))
                        q1, q2, q3 = np.uint8(q >> np.uint8(2)), np.uint8(q >> np.uint8(4)), np.uint8(q >> np.uint8(6))
                        dot = np.int16(dot + np.int16(np.int16(q1 & np.uint8(3)) * np.int16(xi[m, g, 16 + j])))
                        dot = np.int16(dot + np.int16(np.int16(q2 & np.uint8(3)) * np.int16(xi[m, g, 32 + j])))
                        dot = np.int16(dot + np.int16(np.int16(q3) * np.int16(xi[m, g, 48 + j])))
                        lanes[j] += w * np.float32(dot)
                y[m, n] = lanes.sum() - offset
    return y


@numba.njit(cache=True)
def _int2_swiglu(x, gates, out, tokens, rows, up, up_scale, up_zero, down, down_scale, down_zero):  # noqa: ANN001, ANN202
    """A whole expert of such matrices, in one call: out[rows[m]] = gates[rows[m]] * expert(x[tokens[m]])."""
    halves = _int2(up, up_scale, up_zero, x[tokens])
    N = halves.shape[1] // 2
    hidden = np.empty((len(tokens), N), np.float32)
    for m in range(len(tokens)):
        for n in range(N):
            hidden[m, n] = halves[m, n] / (np.float32(1) + np.exp(-halves[m, n])) * halves[m, N + n]
    y = _int2(down, down_scale, down_zero, hidden)
    for m in range(len(tokens)):
        out[rows[m]] = gates[rows[m]] * y[m]


@numba.njit(parallel=True, fastmath=True, cache=True)
def _offsets(scale, zero, xsum, y):  # noqa: ANN001, ANN202
    """y[m, n] = - sum over g of scale[n, g] * zero[n, g] * xsum[m, g]."""
    N, G = scale.shape
    for n in numba.prange(N):
        s, z = np.empty(G, np.float32), np.empty(G, np.float32)
        _floats(scale[n], s)
        _floats(zero[n], z)
        for m in range(y.shape[0]):
            offset = np.float32(0)
            for g in range(G):
                offset += s[g] * z[g] * xsum[m, g]
            y[m, n] = -offset


@numba.njit(parallel=True, fastmath=True, cache=True)
def _plane(codes, width, group, xi, xscale, scale, weight, y):  # noqa: ANN001, ANN202
    """y[m, n] += weight * sum over g of scale[n, g] * xscale[m, g] * (codes of the plane times xi), codes of any width."""
    N, G = scale.shape
    b = group * width // 8
    mask = np.uint8((1 << width) - 1)
    for n in numba.prange(N):
        s = np.empty(G, np.float32)
        _floats(scale[n], s)
        for m in range(y.shape[0]):
            total = np.float32(0)
            for g in range(G):
                dot = np.int32(0)
                for shift in range(8 // width):
                    for j in range(b):
                        q = np.uint8(np.uint8(codes[n, g * b + j] >> np.uint8(shift * width)) & mask)
                        dot = np.int32(dot + np.int32(np.int32(q) * np.int32(xi[m, g, shift * b + j])))
                total += s[g] * xscale[m, g] * np.float32(dot)
            y[m, n] += weight * total
