"""Half-quadratic zero-point optimisation, by the hqq library, groups along the inputs (its axis=1)."""

from __future__ import annotations

from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.quantize.methods.library import library
from apex_engine.quantize.methods.seal import seal


def quantize(
    weight: Tensor, bits: int, group: int, moments: MatrixMoments | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[N, K]` -> uint8 codes `[N, K]`, float16 scale and zero `[N, K / group]`; `moments` are not used."""
    _, meta = library("hqq.core.quantize", "--low-method hqq").Quantizer.quantize(
        weight,
        nbits=bits,
        group_size=group,
        axis=1,
        optimize=True,
        round_zero=False,
        bitpack=False,
        device=str(weight.device),
    )
    return seal(weight.view(-1, group), meta["scale"], meta["zero"], bits, weight.shape)
