"""Experts on a GPU, in Triton: codes are read packed from the slots and become numbers in registers.

    y[row] = gate[row] * down(act(up(x[token])))          act = silu(gate rows) * up rows, fused into the up kernel

One launch for the up matrices and one for the down matrices of all experts of a call: gemv.py in decode, gemm.py in prefill. What
lies between up and down is float32 in decode; in prefill it is rounded to the dtype of `x`, for the tensor cores.

Turing (sm_75) takes the GEMV for prefill too: there tl.dot compiles to plain multiply-adds, with its operands going through
shared memory, and has nothing to offer. TRITON_INTERPRET=1 runs all of this on the CPU, if it is set before the import.

Letters: T tokens of a step, K chosen experts a token, P (token, choice) pairs of a call, H hidden, S slots.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from apex_engine.errors import ApexError
from apex_engine.kernels.base import Activation, Routed
from apex_engine.kernels.layout import FIELD_ALIGN, Layout
from apex_engine.kernels.packing import GROUP_SIZES
from apex_engine.kernels.triton.launch import INTERPRETED, TYPES, Launch, launch
from apex_engine.kernels.triton.tiles import DECODE_TOKENS


class TritonKernel:
    """See `apex_engine.kernels.base.Kernel`. All experts of a call in two launches."""

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
        exact = INTERPRETED or tokens == 1 or not (fused or self._layout.up.raw)
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
