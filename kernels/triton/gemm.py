"""Prefill: a tile of tokens of one expert a program, with tl.dot.

    y[pair] = act(rows n of the up matrix times x[token])               SWIGLU: silu(gate rows) * up rows; GATHER
    out[row] = gates[row] * (rows n of the down matrix times x[pair])   SCATTER

The grid is (tiles of TOKENS pairs, tiles of ROWS output columns). Sums are float32; float32 inputs are multiplied as such
(input_precision "ieee", no TF32). How codes lie in a blob, and the formula of their product: codes.py. A step of a grouped matrix
takes BYTES bytes of the first plane of every row, a tile [B, R], and as many inputs of each run. Groups whose run is below 16,
the least depth of a tl.dot, are dequantized before it instead, into a high and a low 16-bit part.

Letters: M, R, B tokens, rows and bytes (elements, where a code has a byte or two) of a tile, the rest as in gemv.py.
"""

# Arguments of kernels have the types the launcher gives them, and constexprs compare as they come.
# ruff: noqa: ANN001, ANN201, ANN202, SIM300
# mypy: disable-error-code="no-untyped-def,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from apex_engine.kernels.triton.codes import code_as_float, sum_along


@triton.jit(do_not_specialize=["tiles", "pairs"])
def gemm(
    x,  # as gemv
    memory,
    stride,
    meta,
    tiles,
    pairs,
    gates,
    y,
    N: tl.constexpr,
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
    DOT_TYPE: tl.constexpr,
    SWIGLU: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    tile = tl.program_id(0)
    base = memory + tl.load(meta + 3 * tile) * stride
    pair = tl.load(meta + 3 * tile + 1) + tl.arange(0, TOKENS)
    live = pair < tl.load(meta + 3 * tile + 2)
    token = tl.load(meta + 3 * tiles + pair, mask=live, other=0) if GATHER else pair
    COLUMNS: tl.constexpr = N // 2 if SWIGLU else N
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = n < COLUMNS
    value = _gemm_rows(
        x, token, live, base, n, inside, K, CODES, HIGH, SCALE, ZERO, BIAS, BITS, GROUP, WEIGHT_TYPE, BIAS_TYPE, DOT_TYPE,
        TOKENS, ROWS, BYTES,
    )  # fmt: skip
    if SWIGLU:
        up = _gemm_rows(
            x, token, live, base, n + COLUMNS, inside, K, CODES, HIGH, SCALE, ZERO, BIAS, BITS, GROUP, WEIGHT_TYPE, BIAS_TYPE,
            DOT_TYPE, TOKENS, ROWS, BYTES,
        )  # fmt: skip
        value = value / (1 + tl.exp(-value)) * up
    row = pair
    if SCATTER:
        row = tl.load(meta + 3 * tiles + pairs + pair, mask=live, other=0)
        value *= tl.load(gates + row, mask=live, other=0)[:, None]
    at = row[:, None] * COLUMNS + n[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _gemm_rows(
    x,
    token,  # [M]
    live,
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
    DOT_TYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """float32 [M, R]: rows n of the matrix times the M tokens, bias included."""
    total = tl.full([TOKENS, ROWS], 0, tl.float32)
    TYPE: tl.constexpr = x.dtype.element_ty
    inputs_at = x + token[:, None] * K
    if BITS >= 8:
        weights = (base + CODES).to(tl.pointer_type(WEIGHT_TYPE))
        for start in range(0, K, BYTES):
            k = start + tl.arange(0, BYTES)
            weight = tl.load(weights + n[None, :] * K + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0)
            inputs = tl.load(inputs_at + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0)
            if BITS == 8:
                weight = weight.to(tl.float32)  # exact in all three; the interpreter has no int8 -> bfloat16
            total = tl.dot(inputs.to(DOT_TYPE), weight.to(TYPE).to(DOT_TYPE), total, input_precision="ieee")
        if BITS == 8:
            total *= tl.load((base + SCALE).to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0)[None, :]
    else:
        PER_BYTE: tl.constexpr = 2 if BITS == 4 else 4
        RUN: tl.constexpr = GROUP // PER_BYTE
        STEPS: tl.constexpr = 1 << BITS
        scales = (base + SCALE).to(tl.pointer_type(tl.float16)) + n[None, :] * (K // GROUP)
        zeros = (base + ZERO).to(tl.pointer_type(tl.float16)) + n[None, :] * (K // GROUP)
        for start in range(0, K // PER_BYTE, BYTES):
            b = start + tl.arange(0, BYTES)
            known = b < K // PER_BYTE
            g, j = b // RUN, b % RUN
            mask = inside[None, :] & known[:, None]
            codes = tl.load(base + CODES + n[None, :] * (K // PER_BYTE) + b[:, None], mask=mask, other=0).to(tl.int32)
            high = codes  # [B, R]
            if BITS == 3:
                at = n[None, :] * (K // 8) + (g * (RUN // 2) + j % (RUN // 2))[:, None]
                high = tl.load(base + HIGH + at, mask=mask, other=0).to(tl.int32) >> (j // (RUN // 2))[:, None]
            if BYTES <= RUN:  # all of one group
                scale = tl.load(scales + start // RUN, mask=inside[None, :], other=0).to(tl.float32)
                zero = tl.load(zeros + start // RUN, mask=inside[None, :], other=0).to(tl.float32)
                products = tl.full([TOKENS, ROWS], 0, tl.float32)
                ones = tl.full([TOKENS], 0, tl.float32)
                for i in tl.static_range(PER_BYTE):
                    k = g * GROUP + i * RUN + j
                    inputs = tl.load(inputs_at + k[None, :], mask=live[:, None] & known[None, :], other=0)
                    code = code_as_float(codes, high, i, BITS).to(DOT_TYPE)
                    products = tl.dot(inputs.to(DOT_TYPE), code, products, input_precision="ieee")
                    ones += sum_along(inputs.to(tl.float32), 1)
                total += scale * (STEPS * products - (STEPS + zero) * ones[:, None])
            else:
                scale = tl.load(scales + g[:, None], mask=mask, other=0).to(tl.float32)  # [B, R]
                zero = tl.load(zeros + g[:, None], mask=mask, other=0).to(tl.float32)
                for i in tl.static_range(PER_BYTE):
                    k = g * GROUP + i * RUN + j
                    inputs = tl.load(inputs_at + k[None, :], mask=live[:, None] & known[None, :], other=0)
                    weight = scale * (STEPS * (code_as_float(codes, high, i, BITS) - 1) - zero)
                    part = weight.to(TYPE)
                    total = tl.dot(inputs.to(DOT_TYPE), part.to(DOT_TYPE), total, input_precision="ieee")
                    if TYPE != tl.float32:
                        rest = (weight - part.to(tl.float32)).to(TYPE)
                        total = tl.dot(inputs.to(DOT_TYPE), rest.to(DOT_TYPE), total, input_precision="ieee")
    if BIAS >= 0:
        total += tl.load((base + BIAS).to(tl.pointer_type(BIAS_TYPE)) + n, mask=inside, other=0).to(tl.float32)[None, :]
    return total
