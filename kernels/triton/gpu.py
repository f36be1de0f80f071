"""Experts on a GPU, in Triton: codes are read packed from the slots and become numbers in registers.

    y[row] = gate[row] * down(act(up(x[token])))          act = silu(gate rows) * up rows, fused into the up kernel

One launch for the up matrices and one for the down matrices of all experts of a call. `_gemv` computes one (token, choice)
pair a program and is for decode; its pairs of one expert are neighbours in the grid, so that the second one finds the weights in
the L2 cache. `_gemm` computes a tile of tokens with tl.dot and is for prefill. Both accumulate in float32; float32 inputs are
multiplied as such (input_precision "ieee", no TF32). What lies between up and down is float32 in decode; in prefill it is rounded
to the dtype of `x`, for the tensor cores.

Formats, as in layout.py and packing.py (q codes, s scale, z zero-point, g group size, w bits of a code):

    int2, int3, int4   byte j of a group holds the codes j, j + R, j + 2 R, ... with R = g w' / 8 bytes a group, w' = 2, 2, 4 the
                       width of the first plane: the byte tile, shifted by w' i, is run i, R consecutive codes. The second plane
                       of int3 has R / 2 bytes a group: bit 2 i + j // (R / 2) of byte j % (R / 2) belongs to code j of run i
    int8               y = s * (sum of q x) with one s a row
    bfloat16, float16  the weight itself

A code is not converted but put into the mantissa of a float: v = 1 + q / 2^w, which is exact in every dtype. As all codes of a
byte share their group, a group costs one multiplication by s, and the products of 16-bit inputs are exact:

    sum of s (q - z) x  =  s (2^w (sum of v x) - (2^w + z) (sum of x))

Groups whose R is below 16, the least depth of a tl.dot, are dequantized before it instead, into a high and a low 16-bit part.

Turing (sm_75) takes `_gemv` for prefill too: there tl.dot compiles to plain multiply-adds, with its operands going through
shared memory, and has nothing to offer. TRITON_INTERPRET=1 runs all of this on the CPU, if it is set before the import.

Letters: T tokens of a step, P (token, choice) pairs of a call, K inputs and N outputs of a matrix, H hidden, I intermediate,
S slots, M, R, B tokens, rows and bytes (elements, where a code has a byte or two) of a tile.
"""

# Arguments of kernels have the types the launcher gives them, and constexprs compare as they come.
# ruff: noqa: ANN001, ANN202, SIM300
# mypy: disable-error-code="no-untyped-def,import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from apex_engine.errors import ApexError
from apex_engine.kernels.base import Activation, Routed
from apex_engine.kernels.layout import DTYPES, FIELD_ALIGN, RAW, Layout
from apex_engine.kernels.packing import GROUP_SIZES, PLANES

DECODE_TOKENS = 16  # a step of up to so many tokens is decode; not measured yet
LEAST_DEPTH = 16  # of a tl.dot
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# Only builtins of tl and this one of its functions are used: the rest is compiled or interpreted as the environment was when
# triton was first imported, by whatever package.
_add = tl.standard._sum_combine


class Blocks(NamedTuple):
    """A tile, and how many warps and pipeline stages work on it."""

    tokens: int
    rows: int
    bytes: int  # of a row: of the first plane, or elements of an int8 or 16-bit matrix
    warps: int
    stages: int


GEMV = {  # by (bytes of an element of x, bits of the matrix)
    (2, 2): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (2, 3): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (2, 4): Blocks(1, 16, 128, 4, 2),  # not measured yet; a group of 256 is a run of 128 bytes
    (2, 8): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (2, 16): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (4, 2): Blocks(1, 16, 128, 8, 2),  # not measured yet; four warps spill
    (4, 3): Blocks(1, 16, 128, 8, 2),  # not measured yet
    (4, 4): Blocks(1, 16, 128, 8, 2),  # not measured yet
    (4, 8): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (4, 16): Blocks(1, 16, 128, 4, 2),  # not measured yet; rows of 256 spill
}
GEMM = {  # by (bytes of an element of x, tokens of a tile)
    (2, 16): Blocks(16, 64, 32, 4, 3),  # not measured yet
    (2, 64): Blocks(64, 64, 32, 8, 3),  # not measured yet; four warps spill
    (4, 16): Blocks(16, 32, 32, 4, 2),  # not measured yet
    (4, 64): Blocks(32, 32, 16, 8, 2),  # not measured yet; four warps spill
}


@triton.jit(do_not_specialize=["tiles", "pairs"])
def _gemv(
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
        total = _sum(products, 1)
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
                products += _code(codes, high, i, BITS) * inputs
                ones += inputs
            mask = inside[:, None] & known[None, :]
            at = n[:, None] * (K // GROUP) + g[None, :]
            scale = tl.load(scales + at, mask=mask, other=0).to(tl.float32)
            zero = tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
            STEPS: tl.constexpr = 1 << BITS
            sums += scale * (STEPS * _sum(products, 2) - (STEPS + zero) * _sum(ones, 2))
        total = _sum(sums, 1)
    if BIAS >= 0:
        total += tl.load((base + BIAS).to(tl.pointer_type(BIAS_TYPE)) + n, mask=inside, other=0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tiles", "pairs"])
def _gemm(
    x,  # as _gemv
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
                    code = _code(codes, high, i, BITS).to(DOT_TYPE)
                    products = tl.dot(inputs.to(DOT_TYPE), code, products, input_precision="ieee")
                    ones += _sum(inputs.to(tl.float32), 1)
                total += scale * (STEPS * products - (STEPS + zero) * ones[:, None])
            else:
                scale = tl.load(scales + g[:, None], mask=mask, other=0).to(tl.float32)  # [B, R]
                zero = tl.load(zeros + g[:, None], mask=mask, other=0).to(tl.float32)
                for i in tl.static_range(PER_BYTE):
                    k = g * GROUP + i * RUN + j
                    inputs = tl.load(inputs_at + k[None, :], mask=live[:, None] & known[None, :], other=0)
                    weight = scale * (STEPS * (_code(codes, high, i, BITS) - 1) - zero)
                    part = weight.to(TYPE)
                    total = tl.dot(inputs.to(DOT_TYPE), part.to(DOT_TYPE), total, input_precision="ieee")
                    if TYPE != tl.float32:
                        rest = (weight - part.to(tl.float32)).to(TYPE)
                        total = tl.dot(inputs.to(DOT_TYPE), rest.to(DOT_TYPE), total, input_precision="ieee")
    if BIAS >= 0:
        total += tl.load((base + BIAS).to(tl.pointer_type(BIAS_TYPE)) + n, mask=inside, other=0).to(tl.float32)[None, :]
    return total


@triton.jit
def _code(codes, high, i: tl.constexpr, BITS: tl.constexpr):
    """1 + q / 2^BITS for run i of the codes in int32 `codes`, with the highest bit from `high` where BITS is 3."""
    WIDTH: tl.constexpr = 4 if BITS == 4 else 2
    LOW: tl.constexpr = 23 - BITS  # the code's lowest bit in the mantissa
    mantissa = (codes << (LOW - WIDTH * i)) & (((1 << WIDTH) - 1) << LOW)
    if BITS == 3:
        mantissa |= (high << (22 - 2 * i)) & (1 << 22)
    return (mantissa | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _add)


INTERPRETED = not isinstance(_gemv, triton.JITFunction)


class Launch(NamedTuple):
    """A kernel and all it is specialised on, for one matrix of a layout."""

    kernel: Any
    constants: dict[str, Any]
    blocks: Blocks

    @property
    def options(self) -> dict[str, Any]:
        """Fused multiply-adds are asked for by name: the default of Triton 3.10 is without."""
        return {"num_warps": self.blocks.warps, "num_stages": self.blocks.stages, "enable_fp_fusion": True}

    @property
    def columns(self) -> int:
        """Columns of its output."""
        return self.constants["N"] // 2 if self.constants["SWIGLU"] else self.constants["N"]


@cache
def launch(
    layout: Layout, matrix: str, dtype: torch.dtype, tokens: int, fused: bool = True, scatter: bool = True
) -> Launch:
    """The kernel for matrix "up" or "down" with x in `dtype`.

    `tokens` of a tile: 1 for the GEMV, 16 or 64 for the GEMM (which takes fewer in float32). `fused`: SwiGLU in the up kernel;
    `scatter`: the down kernel writes weighted rows of `out`.
    """
    n, k = layout.shape.matrix(matrix)
    form = layout.format(matrix)
    offsets = {
        field.name.removeprefix(f"{matrix}."): field.offset for field in layout.fields if field.name.startswith(matrix)
    }
    kernel, blocks = (_gemv, GEMV[dtype.itemsize, form.bits]) if tokens == 1 else (_gemm, GEMM[dtype.itemsize, tokens])
    run = form.group * PLANES[form.bits][0] // 8 if form.grouped else 0
    units = k * run // form.group if form.grouped else k
    width = min(blocks.bytes, triton.next_power_of_2(units))
    if kernel is _gemv:
        width = min(max(width, run), 64 if 0 < run < LEAST_DEPTH else blocks.bytes)  # many groups take many registers
    elif form.grouped:
        width = LEAST_DEPTH  # of each run: a byte is two or four codes, and deeper tiles spill
    else:
        width = max(width, LEAST_DEPTH)
    constants = {
        "N": n,
        "K": k,
        "CODES": next(offsets[name] for name in ("codes0", "codes", "weight") if name in offsets),
        "HIGH": offsets.get("codes1", -1),
        "SCALE": offsets.get("scale", -1),
        "ZERO": offsets.get("zero", -1),
        "BIAS": offsets.get("bias", -1),
        "BITS": form.bits,
        "GROUP": form.group,
        "WEIGHT_TYPE": TYPES[RAW[form.name]] if form.name in RAW else tl.int8,
        "BIAS_TYPE": TYPES[DTYPES[layout.shape.bias]] if layout.shape.bias else tl.float32,
        "DOT_TYPE": tl.float32 if INTERPRETED and dtype == torch.bfloat16 else TYPES[dtype],
        "SWIGLU": matrix == "up" and fused,
        "GATHER": matrix == "up",
        "SCATTER": matrix == "down" and scatter,
        "TOKENS": blocks.tokens,
        "ROWS": blocks.rows,
        "BYTES": width,
    }
    return Launch(kernel, constants, blocks)


class TritonKernel:
    """See `apex_engine.kernels.reference.Kernel`. All experts of a call in two launches."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        """`memory`: uint8 `[S, stride]`. Raises ApexError where it is not what the kernels rely on."""
        self.name = "triton"
        self._layout, self._memory = layout, memory
        device = memory.device
        if device.type == "cpu" and not INTERPRETED:
            raise ApexError("triton kernels need a GPU, or TRITON_INTERPRET=1 set before Python starts")
        if memory.dtype != torch.uint8 or memory.dim() != 2 or memory.shape[1] != layout.stride:
            raise ApexError(
                f"triton kernels: slots of {list(memory.shape)} {memory.dtype} are not uint8 [S, {layout.stride}]"
            )
        if not memory.is_contiguous() or memory.data_ptr() % FIELD_ALIGN:
            raise ApexError(f"triton kernels: slots have to be contiguous, at a multiple of {FIELD_ALIGN} bytes")
        if any(form.grouped and form.group not in GROUP_SIZES for form in (layout.up, layout.down)):
            raise ApexError(f"triton kernels: group sizes are {', '.join(map(str, GROUP_SIZES))}")
        if layout.stride >= 2**31:
            raise ApexError(f"triton kernels: an expert of {layout.stride} bytes is too large for 32-bit offsets")
        self._has_dot = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        self._check(x, slots, routed, gates, out)
        pairs = len(routed.tokens)
        if not pairs:
            return
        tokens = 1
        if len(x) > DECODE_TOKENS and self._has_dot:
            tokens = 16 if pairs <= 16 * np.count_nonzero(np.diff(routed.first)) else 64
        fused, scatter = activation.swiglu and self._layout.shape.gated, activation.finish is None
        up = launch(self._layout, "up", x.dtype, tokens, fused=fused)
        down = launch(self._layout, "down", x.dtype, tokens, scatter=scatter)
        meta, tiles = _metadata(slots, routed, up.blocks.tokens)
        meta = meta.to(x.device)
        # An activation of its own sees the up rows of a quantized matrix in float32, as in the plain expert. The interpreter
        # cuts bfloat16 off where it should round.
        exact = INTERPRETED or tokens == 1 or not (fused or self._layout.up.name in RAW)
        hidden = x.new_empty(pairs, up.columns, dtype=torch.float32 if exact else x.dtype)
        self._launch(up, x.contiguous(), meta, tiles, pairs, gates, hidden)
        if not fused:
            hidden = activation.apply(hidden).contiguous()
            if hidden.shape != (pairs, self._layout.shape.intermediate):
                raise ApexError(f"triton kernels: the activation gave {list(hidden.shape)} for {pairs} rows")
        if tokens > 1:
            hidden = hidden.to(x.dtype)
        if activation.finish is None:
            self._launch(down, hidden, meta, tiles, pairs, gates, out)
        else:
            y = x.new_empty(pairs, down.columns)
            self._launch(down, hidden, meta, tiles, pairs, gates, y)
            rows = meta[-pairs:]
            out[rows] = activation.finish(y).float() * gates[rows, None]

    def _launch(self, plan: Launch, x: Tensor, meta: Tensor, tiles: int, pairs: int, gates: Tensor, y: Tensor) -> None:
        blocks = plan.blocks
        grid = (tiles, triton.cdiv(plan.columns, blocks.rows))
        with _on(x.device):
            plan.kernel[grid](
                x,
                self._memory,
                self._layout.stride,
                meta,
                tiles,
                pairs,
                gates,
                y,
                **plan.constants,
                **plan.options,
            )

    def _check(self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, out: Tensor) -> None:
        """Raises ApexError for whatever would make a kernel read or write outside of its tensors."""
        hidden = self._layout.shape.hidden
        first, tokens, rows = routed
        if x.dim() != 2 or x.shape[1] != hidden or x.dtype not in TYPES:
            kinds = ", ".join(str(t).removeprefix("torch.") for t in TYPES)
            raise ApexError(f"triton kernels: x is {list(x.shape)} {x.dtype}, not [T, {hidden}] in one of {kinds}")
        if out.dim() != 2 or out.shape[1] != hidden or out.dtype != torch.float32 or not out.is_contiguous():
            raise ApexError(
                f"triton kernels: out is {list(out.shape)} {out.dtype}, not contiguous float32 [T K, {hidden}]"
            )
        if gates.shape != out.shape[:1] or gates.dtype != torch.float32 or not gates.is_contiguous():
            raise ApexError(f"triton kernels: gates are {list(gates.shape)} {gates.dtype}, not float32 [{len(out)}]")
        if not x.device == out.device == gates.device == self._memory.device:
            raise ApexError("triton kernels: x, gates, out and the slots are on different devices")
        if len(first) != len(slots) + 1 or first[0] or np.any(np.diff(first) < 0):
            raise ApexError(f"triton kernels: {len(slots)} slots, but groups begin at {list(first)}")
        if not len(tokens) == len(rows) == first[-1]:
            raise ApexError(f"triton kernels: {len(tokens)} tokens and {len(rows)} rows in groups of {first[-1]}")
        for what, numbers, limit in (
            ("slot", slots, len(self._memory)),
            ("token", tokens, len(x)),
            ("row", rows, len(out)),
        ):
            if len(numbers) and not (np.min(numbers) >= 0 and np.max(numbers) < limit):
                raise ApexError(
                    f"triton kernels: {what}s {np.min(numbers)}..{np.max(numbers)} are not in 0..{limit - 1}"
                )


def _metadata(slots: Sequence[int], routed: Routed, size: int) -> tuple[Tensor, int]:
    """(int64 [3 tiles + 2 P], tiles): slot, first and last + 1 pair of every tile of up to `size` pairs; tokens; rows."""
    first = routed.first
    table = [
        (slot, start, min(start + size, int(first[i + 1])))
        for i, slot in enumerate(slots)
        for start in range(int(first[i]), int(first[i + 1]), size)
    ]
    flat = np.concatenate([np.asarray(table, np.int64).ravel(), routed.tokens, routed.rows])
    return torch.from_numpy(flat), len(table)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
