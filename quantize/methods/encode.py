"""One matrix -> the fields of its twin. No file, no model.

Letters: N rows, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.kernels.layout import RAW, MatrixFormat
from apex_engine.kernels.packing import pack
from apex_engine.quantize.methods import int8
from apex_engine.quantize.methods.table import method as find


def encode(
    weight: Tensor, form: MatrixFormat, method: str = "clip", moments: MatrixMoments | None = None
) -> dict[str, Tensor]:
    """Fields of `weight` `[N, K]` (any float dtype) in `form`, by the names of `Layout` without their matrix prefix.

    `method`, one of METHODS, and `moments`, on the weight's device, are used by the grouped formats only. Raises ValueError
    where the weight has a NaN or an infinity or does not fit the format's range.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("has a NaN or an infinite value")
    if form.name in RAW:
        narrowed = weight.to(RAW[form.name])
        if not torch.isfinite(narrowed).all():
            raise ValueError(f"has a value beyond the range of {form.name}")
        return {"weight": narrowed}
    if form.name == "int8":
        # Always on the CPU, where the library takes float32.
        return dict(zip(("codes", "scale"), int8.quantize(weight.float().cpu()), strict=True))
    codes, scale, zero = find(method)(weight.float(), form.bits, form.group, moments)
    if not (torch.isfinite(scale).all() and torch.isfinite(zero).all()):
        raise ValueError("has a value beyond the range of the float16 scales")
    planes = {f"codes{i}": plane for i, plane in enumerate(pack(codes, form.bits, form.group))}
    return {**planes, "scale": scale, "zero": zero}
