"""One twin of one expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.kernels.layout import MATRICES, Layout, dequantize
from apex_engine.quantize.methods.encode import encode


def make_blob(
    expert: dict[str, Tensor], layout: Layout, method: str, moments: Mapping[str, MatrixMoments | None] | None = None
) -> tuple[Tensor, dict[str, list[float]]]:
    """One twin of one expert: its blob, uint8 `[stride]` on the CPU, and `[squared error, squared weight]` of each matrix.

    `expert`: "up.weight", "down.weight" `[N, K]` and the biases; `moments` of each matrix, on the same device. Raises ValueError
    naming the matrix that cannot be encoded.
    """
    blob = torch.zeros(layout.stride, dtype=torch.uint8)
    views = layout.views(blob)
    sums = {}
    for matrix in MATRICES:
        weight = expert[f"{matrix}.weight"]
        try:
            fields = encode(weight, layout.format(matrix), method, (moments or {}).get(matrix))
        except ValueError as error:
            raise ValueError(f"the {matrix} matrix {error}") from None
        if layout.shape.bias:
            fields["bias"] = expert[f"{matrix}.bias"]
        for name, value in fields.items():
            views[f"{matrix}.{name}"].copy_(value)
        exact = weight.float().cpu()
        missed = dequantize(views, matrix, layout).sub_(exact)
        sums[matrix] = [_square_sum(missed), _square_sum(exact)]
    return blob, sums


def _square_sum(matrix: Tensor) -> float:
    return matrix.square().sum(dtype=torch.float64).item()
