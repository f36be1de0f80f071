"""Slots full of random experts, and what tests of every kernel compare with."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from apex_engine.kernels.base import Activation, Routed
from apex_engine.kernels.layout import MATRICES, ExpertShape, Layout, MatrixFormat
from apex_engine.kernels.packing import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the Triton kernels are imported


def swiglu(rows):
    gate, up = rows.chunk(2, -1)
    return silu(gate) * up


def clamped(rows):
    gate, up = rows.chunk(2, -1)
    return gelu(gate.clamp(max=0.1)) * (up + 1)


def norm(y):
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


SWIGLU = Activation(swiglu, swiglu=True)
CLAMPED = Activation(clamped)
NO_GATE = Activation(lambda rows: rows.relu().square())
NORMED = Activation(swiglu, norm, swiglu=True)


def form(name: str, group: int = 64) -> MatrixFormat:
    """Of a name alone: in groups of `group` where the format has groups."""
    return MatrixFormat(name, group if name in ("int2", "int3", "int4") else 0)


def fill(views: dict[str, torch.Tensor], layout: Layout) -> None:
    """Random fields of one blob: weights of about 0.02, every code."""
    for matrix in MATRICES:
        kind = layout.format(matrix)
        n, k = layout.shape.matrix(matrix)
        fields = {"bias": torch.randn(n) * 0.02} if layout.shape.bias else {}
        if kind.grouped:
            steps = 2**kind.bits
            codes = torch.randint(0, steps, (n, k), dtype=torch.uint8)
            assert len(codes.unique()) == steps
            fields |= dict(zip(kind.held, pack(codes, kind.bits, kind.group), strict=True))
            fields["scale"] = (0.04 + 0.04 * torch.rand(n, k // kind.group)) / steps
            fields["zero"] = (steps - 1) * (0.3 + 0.4 * torch.rand(n, k // kind.group))
        elif kind.raw:
            fields["weight"] = torch.randn(n, k) * 0.02
        else:
            fields |= {"codes": torch.randint(-128, 128, (n, k)), "scale": (1 + torch.rand(n)) * 2e-4}
        for name, value in fields.items():
            views[f"{matrix}.{name}"].copy_(value)


def a_pool(shape: ExpertShape, up: MatrixFormat, down: MatrixFormat, slots: int = 3) -> tuple[Layout, torch.Tensor]:
    """`slots` random experts and one slot of poison: NaN in every float format."""
    layout = Layout(shape, up, down)
    memory = torch.full((slots + 1, layout.stride), 0xFF, dtype=torch.uint8)
    for slot in range(slots):
        fill(layout.views(memory[slot]), layout)
    return layout, memory


def one_expert(tokens: int) -> Routed:
    """All of `tokens` to the one expert of a call, one choice each."""
    pairs = np.arange(tokens)
    return Routed(np.array([0, tokens]), pairs, pairs)


def errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(max, RMS) relative error."""
    difference = found.double() - expected.double()
    most, mean = expected.double().abs().max(), expected.double().square().mean().sqrt()
    return (difference.abs().max() / most).item(), (difference.square().mean().sqrt() / mean).item()
