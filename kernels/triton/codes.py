"""Packed codes on a GPU: how they lie, and how they become numbers in registers without a conversion.

Formats, as in layout.py and packing.py (q codes, s scale, z zero-point, g group size, w bits of a code):

    int2, int3, int4   byte j of a group holds the codes j, j + R, j + 2 R, ... with R = g w' / 8 bytes a group, w' = 2, 2, 4 the
                       width of the first plane: the byte tile, shifted by w' i, is run i, R consecutive codes. The second plane
                       of int3 has R / 2 bytes a group: bit 2 i + j // (R / 2) of byte j % (R / 2) belongs to code j of run i
    int8               y = s * (sum of q x) with one s a row
    bfloat16, float16  the weight itself

A code is not converted but put into the mantissa of a float: v = 1 + q / 2^w, which is exact in every dtype. As all codes of a
byte share their group, a group costs one multiplication by s, and the products of 16-bit inputs are exact:

    sum of s (q - z) x  =  s (2^w (sum of v x) - (2^w + z) (sum of x))
"""

# Arguments of kernels have the types the launcher gives them.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

# Only builtins of tl and this one of its functions are used: the rest is compiled or interpreted as the environment was when
# triton was first imported, by whatever package.
_add = tl.standard._sum_combine


@triton.jit
def code_as_float(codes, high, i: tl.constexpr, BITS: tl.constexpr):
    """1 + q / 2^BITS for run i of the codes in int32 `codes`, with the highest bit from `high` where BITS is 3."""
    WIDTH: tl.constexpr = 4 if BITS == 4 else 2
    LOW: tl.constexpr = 23 - BITS  # the code's lowest bit in the mantissa
    mantissa = (codes << (LOW - WIDTH * i)) & (((1 << WIDTH) - 1) << LOW)
    if BITS == 3:
        mantissa |= (high << (22 - 2 * i)) & (1 << 22)
    return (mantissa | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def sum_along(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _add)
