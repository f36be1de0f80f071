"""Decode: one (token, choice) pair a program, products and sums in float32.

    y[pair] = act(rows n of the up matrix times x[token])               SWIGLU: silu(gate rows) * up rows; GATHER
    out[row] = gates[row] * (rows n of the down matrix times x[pair])   SCATTER

The grid is (pairs, tiles of ROWS output columns): the pairs of one expert are neighbours in it, so that the second one finds the
weights in the L2 cache. How codes lie in a blob, and the formula of their product: codes.py. A step of a grouped matrix takes
BYTES bytes of the first plane of every row, whole groups: a tile [R, groups, R' bytes of a group]; of an int8 or 16-bit matrix
BYTES elements.

Letters: T tokens of a step, P (token, choice) pairs of a call, K inputs and N outputs of a matrix, I intermediate, S slots,
R rows of a tile.
"""

# Arguments of kernels have the types the launcher gives them.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from apex_engine.kernels.triton.codes import code_as_float, sum_along


@triton.jit(do_not_specialize=["tiles", "pairs"])
def gemv(
    x,  # [T, K] (up) or [P, K] (down)
    memory,  # uint8 [S, stride]
    stride,
    meta,  # int64: slot, first and last + 1 pair of each tile; token of each pair; row of each pair
    tiles,
    pairs,
    gates,  # float32 [T K]
    y,  # [P, N] or [P, I]; SCATTER: out [T K, N]
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,  # byte offsets in the blob; -1 where the field is missing
    HIGH: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,  # dtype of x; float32 where the interpreter has no bfloat16
    SWIGLU: tl.constexpr,
    GATHER: tl.constexpr,  # x by token instead of by pair
    SCATTER: tl.constexpr,  # y by row and times its gate weight instead of by pair
    TOKENS: tl.constexpr,  # 1
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    tile = tl.program_id(0)
    base = memory + tl.load(meta + 3 * tile) * stride
    pair = tl.load(meta + 3 * tile + 1)
    token = tl.load(meta + 3 * tiles + pair) if GATHER else pair
    COLUMNS: tl.constexpr = N // 2 if SWIGLU else N
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = n < COLUMNS
    value = _gemv_rows(
        x + token * K, base, n, inside, K, CODES, HIGH, SCALE, ZERO, BIAS, BITS, GROUP, WEIGHT_TYPE, BIAS_TYPE, ROWS, BYTES
    )  # fmt: skip
    if SWIGLU:
        up = _gemv_rows(
            x + token * K, base, n + COLUMNS, inside, K, CODES, HIGH, SCALE, ZERO, BIAS, BITS, GROUP, WEIGHT_TYPE, BIAS_TYPE,
            ROWS, BYTES,
        )  # fmt: skip
        value = value / (1 + tl.exp(-value)) * up
    row = pair
    if SCATTER:
        row = tl.load(meta + 3 * tiles + pairs + pair)
        value *= tl.load(gates + row)
    tl.store(y + row * COLUMNS + n, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gemv_rows(
    x,  # [K]
    base,
    n,  # [R]
    inside,
    K: tl.constexpr,
    CODES: tl.constexpr,
    HIGH: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """float32 [R]: rows n of the matrix times x, bias included.

    The same inputs are loaded for every row (`0 * n`): so they come in the layout of the codes, past shared memory.
    """
    if BITS >= 8:
        weights = (base + CODES).to(tl.pointer_type(WEIGHT_TYPE))
        products = tl.full([ROWS, BYTES], 0, tl.float32)
        for start in range(0, K, BYTES):
            k = start + tl.arange(0, BYTES)
            mask = inside[:, None] & (k < K)[None, :]
            weight = tl.load(weights + n[:, None] * K + k[None, :], mask=mask, other=0)
            inputs = tl.load(x + k[None, :] + 0 * n[:, None], mask=mask, other=0)
            if BITS == 16:  # as the plain expert does: the weight in the dtype of x
                weight = weight.to(inputs.dtype)
            products += weight.to(tl.float32) * inputs.to(tl.float32)
        total = sum_along(products, 1)
        if BITS == 8:
            total *= tl.load((base + SCALE).to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0)
    else:
        PER_BYTE: tl.constexpr = 2 if BITS == 4 else 4
        RUN: tl.constexpr = GROUP // PER_BYTE
        GROUPS: tl.constexpr = BYTES // RUN
        scales = (base + SCALE).to(tl.pointer_type(tl.float16))
        zeros = (base + ZERO).to(tl.pointer_type(tl.float16))
        j = tl.arange(0, RUN)
        sums = tl.full([ROWS, GROUPS], 0, tl.float32)
        for start in range(0, K // GROUP, GROUPS):
            g = start + tl.arange(0, GROUPS)
            known = g < K // GROUP
            mask = inside[:, None, None] & known[None, :, None]
            at = n[:, None, None] * (K // PER_BYTE) + g[None, :, None] * RUN + j[None, None, :]
            codes = tl.load(base + CODES + at, mask=mask, other=0).to(tl.int32)  # [R, groups, run]
            high = codes
            if BITS == 3:
                at = n[:, None, None] * (K // 8) + g[None, :, None] * (RUN // 2) + (j % (RUN // 2))[None, None, :]
                high = tl.load(base + HIGH + at, mask=mask, other=0).to(tl.int32) >> (j // (RUN // 2))[None, None, :]
            products = tl.full([ROWS, GROUPS, RUN], 0, tl.float32)
            ones = tl.full([ROWS, GROUPS, RUN], 0, tl.float32)
            for i in tl.static_range(PER_BYTE):
                k = g[None, :, None] * GROUP + i * RUN + j[None, None, :]
                inputs = tl.load(x + k + 0 * n[:, None, None], mask=mask, other=0).to(tl.float32)
                products += code_as_float(codes, high, i, BITS) * inputs
                ones += inputs
            mask = inside[:, None] & known[None, :]
            at = n[:, None] * (K // GROUP) + g[None, :]
            scale = tl.load(scales + at, mask=mask, other=0).to(tl.float32)
            zero = tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
            STEPS: tl.constexpr = 1 << BITS
            sums += scale * (STEPS * sum_along(products, 2) - (STEPS + zero) * sum_along(ones, 2))
        total = sum_along(sums, 1)
    if BIAS >= 0:
        total += tl.load((base + BIAS).to(tl.pointer_type(BIAS_TYPE)) + n, mask=inside, other=0).to(tl.float32)
    return total
