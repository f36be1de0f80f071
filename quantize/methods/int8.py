"""Symmetric INT8, absmax of each row, by bitsandbytes' vector-wise quantizer."""

from __future__ import annotations

import logging

from torch import Tensor

from apex_engine.quantize.methods.library import library


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 `[N, K]` on the CPU -> int8 codes `[N, K]`, float32 scale `[N]`: w ~ q * scale, scale = absmax / 127."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of 4-bit kernels that are not used here
    codes, absmax, _ = library("bitsandbytes.functional", "an int8 twin").int8_vectorwise_quant(weight)
    codes[absmax == 0] = 0  # the quantizer divides by the absmax
    return codes, absmax / 127
