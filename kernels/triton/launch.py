"""What a kernel is specialised on for one matrix of a layout: its constants, its tile, its options."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from apex_engine.kernels.layout import BIASES, Layout
from apex_engine.kernels.triton.gemm import gemm
from apex_engine.kernels.triton.gemv import gemv
from apex_engine.kernels.triton.tiles import GEMM, GEMV, LEAST_DEPTH, Blocks

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INTERPRETED = not isinstance(gemv, triton.JITFunction)


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
    kernel, blocks = (gemv, GEMV[dtype.itemsize, form.bits]) if tokens == 1 else (gemm, GEMM[dtype.itemsize, tokens])
    run = form.group * form.planes[0] // 8 if form.grouped else 0
    units = k * run // form.group if form.grouped else k
    width = min(blocks.bytes, triton.next_power_of_2(units))
    if kernel is gemv:
        width = min(max(width, run), 64 if 0 < run < LEAST_DEPTH else blocks.bytes)  # many groups take many registers
    elif form.grouped:
        width = LEAST_DEPTH  # of each run: a byte is two or four codes, and deeper tiles spill
    else:
        width = max(width, LEAST_DEPTH)
    constants = {
        "N": n,
        "K": k,
        "CODES": offsets[form.held[0]],
        "HIGH": offsets[form.held[1]] if len(form.held) > 1 else -1,
        "SCALE": offsets.get("scale", -1),
        "ZERO": offsets.get("zero", -1),
        "BIAS": offsets.get("bias", -1),
        "BITS": form.bits,
        "GROUP": form.group,
        "WEIGHT_TYPE": TYPES[form.raw] if form.raw else tl.int8,
        "BIAS_TYPE": TYPES[BIASES[layout.shape.bias]] if layout.shape.bias else tl.float32,
        "DOT_TYPE": tl.float32 if INTERPRETED and dtype == torch.bfloat16 else TYPES[dtype],
        "SWIGLU": matrix == "up" and fused,
        "GATHER": matrix == "up",
        "SCATTER": matrix == "down" and scatter,
        "TOKENS": blocks.tokens,
        "ROWS": blocks.rows,
        "BYTES": width,
    }
    return Launch(kernel, constants, blocks)
