"""Quantized experts on the CPU in C (native.c): integer dot products for INT2, INT3, INT4, float ones for INT8.

For a group of inputs with absmax m, a = m / 127 and xi = round(x / a), a matrix with grouped codes is computed as

    y = sum over groups of  scale * a * (sum of q * xi - zero * sum of xi)

which is the product of the dequantized matrix with the rounded inputs a * xi: `Reference(..., round_inputs=True)` is its truth.
INT8 and 16-bit twins keep float inputs. 16-bit twins are computed here for a few tokens only (torch's matrix products win above),
rounding where torch rounds: after each matrix, the activation and the product, to the dtype of `x`. `sums_like_torch` tells where
bfloat16 twins can have the very sums of torch, for one token: where a sum's order is that of oneDNN's kernel for avx512-bf16.

Instruction sets: avx512-vnni, avx2, neon, generic. A kernel is made with one, the best unless told, and keeps it.

Letters: T tokens of a step, K chosen experts a token, S slots, N rows, H hidden.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from apex_engine.kernels.base import Activation, Routed
from apex_engine.kernels.layout import MATRICES, Layout
from apex_engine.kernels.reference import Reference, one_by_one, unfused

MOST_TOKENS = 4  # of one expert, for a 16-bit twin
WIDTHS = (2, 3, 4)  # of grouped codes, that native.c reads
FORMATS = {"int8": 0, "bfloat16": 1, "float16": 2}  # enum of native.c
IN_PAIRS = 3
VERSION = 2  # of the functions and structs of native.c: apex_version there
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
        if getattr(lib, "apex_version", int)() != VERSION:
            warnings.warn(
                f"{path} is of another version of this project: install it again (pip install -e .)", stacklevel=2
            )
            continue
        size, address = ctypes.c_ssize_t, ctypes.c_void_p
        lib.apex_isa.argtypes, lib.apex_isa.restype = [ctypes.c_char_p], address
        lib.apex_isa_name.argtypes, lib.apex_isa_name.restype = [address], ctypes.c_char_p
        lib.apex_linear.argtypes = [address, address, address, size, address]
        lib.apex_swiglu_experts.argtypes = [*3 * [address], size, *5 * [address], *2 * [ctypes.c_int], address]
        return lib
    return None


def instruction_set(name: str | None = None) -> str | None:
    """The name of the instruction set `name`, or of the best; None where this machine or the library does not have it."""
    lib = library()
    isa = lib.apex_isa(name.encode() if name else None) if lib else None
    return lib.apex_isa_name(isa).decode() if lib and isa else None


def sums_like_torch(layout: Layout, memory: Tensor) -> bool:
    """Whether torch on this machine multiplies one bfloat16 token with such matrices as `NativeKernel(like_torch=True)` does,
    bit for bit. Found out by trying, in the first slot of `memory` `[S, stride]`, which holds nothing afterwards.

    Every product of the trial has its negative elsewhere in the row: what is left of the sum is what was rounded on the way, and
    tells one order from another in nearly every row.
    """
    lib, shape = library(), layout.shape
    if lib is None or not lib.apex_has_pairs() or shape.bias or shape.hidden % 16 or shape.intermediate % 16:
        return False
    for matrix in MATRICES:
        n, k = shape.matrix(matrix)
        if layout.format(matrix).name != "bfloat16" or n * k < 10_000:  # torch has another way for tiny ones
            return False
    views, kernel = layout.views(memory[0]), NativeKernel(layout, memory[:1], like_torch=True)
    same = True
    for matrix in MATRICES:
        n, k = shape.matrix(matrix)
        draw = np.random.default_rng(k)
        order, half = draw.permutation(k), draw.standard_normal((min(n, 256), k // 2), np.float32)
        rows = torch.from_numpy(np.concatenate([half, -half], 1)[:, order]).bfloat16()
        x = torch.from_numpy(np.tile(draw.standard_normal((1, k // 2), np.float32), 2)[:, order]).bfloat16()
        weight = views[f"{matrix}.weight"]
        for i in range(0, n, len(rows)):
            weight[i : i + len(rows)] = rows[: n - i]
        same &= torch.equal(kernel.linear(x.float(), 0, matrix).bfloat16(), linear(x, weight))
    memory[0] = 0xFF  # NaN
    return same


class NativeKernel:
    """Experts of a pool on the CPU."""

    def __init__(self, layout: Layout, memory: Tensor, like_torch: bool = False, isa: str | None = None) -> None:
        """`memory`: uint8 `[S, stride]` on the CPU. `like_torch`, where `sums_like_torch`: give torch's own results to the bit,
        which is by torch for all but one bfloat16 token. `isa`: an instruction set that `instruction_set` knows, or the best."""
        lib, name = library(), instruction_set(isa)
        assert lib is not None and name is not None
        self.name = "native avx512-bf16" if like_torch else f"native {name}"
        self._lib, self._layout = lib, layout
        self._isa = lib.apex_isa(name.encode())
        self._memory = memory  # the structs below point into it
        self._raw = layout.up.raw is not None
        assert lib.apex_has_pairs() or not like_torch
        self._like_torch, self._tried = like_torch, _settings()
        self._torch = Reference(layout, memory)
        self._experts = (Expert * len(memory))(*(_expert(layout, row.data_ptr(), like_torch) for row in memory))

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        fused = activation.swiglu and activation.finish is None and not self._layout.shape.bias
        if self._raw:
            # Each expert by itself: what else is in the call depends on what is resident.
            most = self.most_tokens(x.dtype) if fused else 0
            # No token has an expert twice: of few tokens, none can have too many.
            to_torch = np.diff(routed.first) > most if len(x) > most else None
            if to_torch is not None and to_torch.any():
                self._torch(x, *_some(slots, routed, to_torch), gates, activation, out)
                slots, routed = _some(slots, routed, ~to_torch)
        if not slots:
            return
        if not fused or x.dtype not in ROUND:
            one_by_one(unfused(self.linear, activation), x.float(), slots, routed, gates, activation, out)
            return
        x = x.contiguous()
        failed = self._lib.apex_swiglu_experts(
            self._isa,
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

    def most_tokens(self, dtype: torch.dtype) -> int:
        """Of an expert that is computed here, for a 16-bit twin."""
        if self._like_torch:  # with other threads, oneDNN may divide a long row of few outputs among them
            return int(dtype == torch.bfloat16 and _settings() == self._tried)
        return MOST_TOKENS if dtype in ROUND else 0

    def linear(self, x: Tensor, slot: int, matrix: str) -> Tensor:
        """`x` float32 `[M, K]` times the matrix "up" or "down" of a slot, bias included: float32 `[M, N]`."""
        x = x.contiguous()
        form = getattr(self._experts[slot], matrix)
        y = torch.empty(len(x), form.n, dtype=torch.float32, device="cpu")  # whatever the defaults are
        if self._lib.apex_linear(self._isa, ctypes.byref(form), x.data_ptr(), len(x), y.data_ptr()):
            raise MemoryError
        return y + self._layout.views(self._memory[slot])[f"{matrix}.bias"] if self._layout.shape.bias else y


def _settings() -> tuple[int, bool]:
    """What the order of torch's sums depends on, beside the shape."""
    return torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)


def reads(layout: Layout) -> bool:
    """Whether native.c knows the codes of both matrices."""
    return all(form.bits in WIDTHS for form in (layout.up, layout.down) if form.grouped)


def _expert(layout: Layout, base: int, like_torch: bool) -> Expert:
    at = {field.name: base + field.offset for field in layout.fields}
    matrices = []
    for matrix in MATRICES:
        form = layout.format(matrix)
        codes = (ctypes.c_void_p * 2)(*(at[f"{matrix}.{part}"] for part in form.held))
        scale, zero = (at.get(f"{matrix}.{part}", 0) for part in ("scale", "zero"))
        n, k = layout.shape.matrix(matrix)
        number = IN_PAIRS if like_torch else FORMATS.get(form.name, 0)
        matrices.append(Matrix(n, k, form.group, form.bits, number, codes, scale, zero))
    return Expert(*matrices)


def _some(slots: Sequence[int], routed: Routed, chosen: NDArray[np.bool_]) -> tuple[list[int], Routed]:
    """The experts `chosen` and their pairs."""
    counts = np.diff(routed.first)
    pairs = np.repeat(chosen, counts)
    first = np.concatenate([[0], np.cumsum(counts[chosen])])
    kept = [slot for slot, keep in zip(slots, chosen.tolist(), strict=True) if keep]
    return kept, Routed(first, routed.tokens[pairs], routed.rows[pairs])
